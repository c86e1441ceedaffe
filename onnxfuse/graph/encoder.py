"""Op types and inputs of the fused encoder layers of domain onnxfuse."""

from __future__ import annotations

# Operator between the two products of the feed-forward network -> its part of the op type; the kernel numbers them in this order.
ACTIVATIONS = {"Gelu": "", "GeluTanh": "Tanh", "Relu": "Relu"}
# Matrices are [K, N]. 1: the norm behind the attention's sum (post-norm) or before the attention (pre-norm), 2: the other one.
INPUTS = ("x", "wq", "bq", "wk", "bk", "wv", "bv", "wo", "bo", "gamma1", "beta1", "w1", "b1", "w2", "b2", "gamma2", "beta2", "mask")


def op_type(before: bool, activation: str, masked: bool) -> str:
    """`before`: pre-norm; `activation`: one of ACTIVATIONS."""
    return f"{'PreNorm' if before else ''}EncoderLayer{ACTIVATIONS[activation]}{'Masked' if masked else ''}"
