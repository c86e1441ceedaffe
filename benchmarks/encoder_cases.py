"""Cases of benchmarks/kernels.py: stacks of transformer encoder layers, by the kernel that takes any shape.

Their limit at few tokens is latency: five phases a layer that wait for each other. The weights, which are not counted, are most of what is
read. Kernels that an engine carries for its own shapes are timed in engines, by policy measure.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from benchmarks.kernel_cases import CODES, Case, Shape
from onnxfuse.engine import encoder
from onnxfuse.graph.encoder import ACTIVATIONS

Array = npt.NDArray[Any]
GELU, GELU_TANH, RELU = range(len(ACTIVATIONS))


class Problem(ctypes.Structure):
    """OnnxfuseEncoder of plugins/EncoderLayer/launch.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dtype", "layers", "batch", "sequence", "width", "inner", "heads")),
        *((name, ctypes.c_int32) for name in ("pre_norm", "first_norm", "activation")),
        *((name, ctypes.c_float) for name in ("epsilon", "scale")),
        *((name, ctypes.c_void_p) for name in ("x", "y", "weights", "vectors", "final_gamma", "final_beta", "mask")),
        ("mask_type", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("mask_batch", "mask_head", "mask_row")),
        *((name, ctypes.c_int32) for name in ("cluster", "clusters")),
        *((name, ctypes.c_int32 * 4) for name in ("parts", "blocks")),
        *((name, ctypes.c_int32) for name in ("per", "stages", "barrier", "restore", "skip")),
        *((name, ctypes.c_void_p) for name in ("counters", "profile", "fault")),
    ]


@dataclass(frozen=True)
class Stack:
    """Layers of `width`, whose feed-forward network is `inner` wide, over [batch, sequence, width]."""

    model: str
    layers: int
    width: int
    inner: int
    heads: int
    batch: int
    sequence: int
    pre_norm: bool = False
    epsilon: float = 1e-12


BERT = ("BERT base", 12, 768, 3072, 12)
STACKS = (
    Stack(*BERT, 1, 32),
    Stack(*BERT, 1, 128),
    Stack(*BERT, 1, 512),
    Stack(*BERT, 8, 128),
    Stack("MiniLM-L3", 3, 384, 1536, 12, 1, 32),
    Stack("ViT-S", 12, 384, 1536, 6, 1, 197, pre_norm=True, epsilon=1e-6),
)


def problem_of(sizes: Stack, dtype: str) -> Problem:
    """The sizes alone, without any tensor."""
    return Problem(
        dtype=CODES[dtype][0],
        layers=sizes.layers,
        batch=sizes.batch,
        sequence=sizes.sequence,
        width=sizes.width,
        inner=sizes.inner,
        heads=sizes.heads,
        pre_norm=int(sizes.pre_norm),
        first_norm=int(sizes.pre_norm),
        epsilon=sizes.epsilon,
        scale=(sizes.width // sizes.heads) ** -0.5,
    )


def layer_of(width: int, inner: int, rng: np.random.Generator, kind: Any) -> dict[str, Array]:
    """Parameters of a layer by their names in onnxfuse.graph.encoder.INPUTS, in numpy type `kind`."""
    shapes = {f"w{role}": (width, width) for role in "qkvo"} | {"w1": (width, inner), "w2": (inner, width)}
    weights = {name: (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(kind) for name, shape in shapes.items()}
    sizes = {f"b{role}": width for role in "qkvo2"} | {"b1": inner} | dict.fromkeys(("gamma1", "beta1", "gamma2", "beta2"), width)
    vectors = {name: (0.1 * rng.standard_normal(size) + name.startswith("gamma")).astype(kind) for name, size in sizes.items()}
    return weights | vectors


def encoders(library: ctypes.CDLL, dtype: str, other_threads: bool) -> Iterator[Case]:
    """x read, y written. None where this GPU or this type has no kernel."""
    for sizes in STACKS:
        case = stack(library, dtype, sizes)
        if case is not None:
            yield case


def packed(layers: Sequence[Mapping[str, Array]], first: Mapping[str, Array] | None, pre_norm: bool, kind: Any) -> tuple[Array, Array]:
    """Weights and vectors of a stack, [layers, elements] each. first: whose gamma2 and beta2 the norm before a post-norm stack has."""
    before = [first, *layers[:-1]]
    rows = []
    for layer, last in zip(layers, before, strict=True):
        of = (layer["gamma1"], layer["beta1"]) if pre_norm else None if last is None else (last["gamma2"], last["beta2"])
        inside = (layer["gamma2"], layer["beta2"]) if pre_norm else (layer["gamma1"], layer["beta1"])
        rows.append(encoder.pack_layer(layer, of, inside, pre_norm, kind))
    return np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])


def stack(library: ctypes.CDLL, dtype: str, sizes: Stack) -> Case | None:
    import torch

    function, workspace_of = library.onnxfuse_launch_encoder, library.onnxfuse_encoder_workspace
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    workspace_of.argtypes, workspace_of.restype = [ctypes.c_void_p], ctypes.c_size_t
    problem = problem_of(sizes, dtype)
    final = torch.stack([torch.ones(sizes.width), torch.zeros(sizes.width)]).cuda()
    problem.final_gamma, problem.final_beta = final[0].data_ptr(), final[1].data_ptr()
    bytes_needed = int(workspace_of(ctypes.byref(problem)))
    if not bytes_needed:
        return None
    room = torch.empty(bytes_needed + 256, dtype=torch.uint8, device="cuda")
    start = -(-room.data_ptr() // 256) * 256
    # One layer and a second one, again and again at another place: enough to be right, and quickly packed.
    kind = np.dtype(np.float16 if dtype == "float16" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(0)
    layers = [layer_of(sizes.width, sizes.inner, rng, kind) for _ in range(2)]
    layers = [layers[number > 0] for number in range(sizes.layers)]
    three = packed(layers[:3], None, sizes.pre_norm, kind)
    parts = (np.concatenate([rows[:3], *[rows[2:]] * (sizes.layers - 3)]) for rows in three)
    weights, vectors = (torch.from_numpy(part.view(np.uint8)).cuda() for part in parts)

    def launch(read: Sequence[int], written: Sequence[int], stream: int) -> int:
        problem.x, problem.y = read[0], written[0]
        problem.weights, problem.vectors = weights.data_ptr(), vectors.data_ptr()
        problem.final_gamma, problem.final_beta = final[0].data_ptr(), final[1].data_ptr()
        return int(function(ctypes.byref(problem), start, room.numel() - (start - room.data_ptr()), stream))

    def reference(read: Sequence[Any]) -> list[Any]:
        return [_torch(read[0].view(sizes.batch, sizes.sequence, sizes.width), layers, sizes)]

    rows, elements = sizes.batch * sizes.sequence, sizes.batch * sizes.sequence * sizes.width
    shape = Shape(rows, sizes.width, f"batch {sizes.batch}, {sizes.sequence} tokens", "middle")
    return Case(f"encoder {sizes.model}", dtype, shape, (elements,), (elements,), launch, reference, roundings=4)


def _torch(x: Any, layers: Sequence[Mapping[str, Array]], sizes: Stack) -> Any:
    """The stack in float32, with a norm of ones and zeros behind it."""
    import torch

    def norm(y: Any, *affine: Any) -> Any:
        return torch.nn.functional.layer_norm(y, (sizes.width,), *affine, eps=sizes.epsilon)

    def heads(y: Any) -> Any:
        return y.view(sizes.batch, sizes.sequence, sizes.heads, -1).transpose(1, 2)

    for number, layer in enumerate(layers):
        w = {name: torch.from_numpy(array.astype(np.float32)).cuda() for name, array in layer.items()}
        h = norm(x, w["gamma1"], w["beta1"]) if sizes.pre_norm else x
        q, k, v = (heads(h @ w[f"w{role}"] + w[f"b{role}"]) for role in "qkv")
        weights = (q @ k.transpose(2, 3) * (sizes.width // sizes.heads) ** -0.5).softmax(-1)
        middle = x + (weights @ v).transpose(1, 2).reshape(x.shape) @ w["wo"] + w["bo"]
        m = norm(middle, w["gamma2"], w["beta2"]) if sizes.pre_norm else norm(middle, w["gamma1"], w["beta1"])
        x = (middle if sizes.pre_norm else m) + torch.nn.functional.gelu(m @ w["w1"] + w["b1"]) @ w["w2"] + w["b2"]
        if not sizes.pre_norm and number < len(layers) - 1:
            x = norm(x, w["gamma2"], w["beta2"])
    return norm(x)
