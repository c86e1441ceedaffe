"""Encoder layers in float64, phase by phase."""
import numpy as np
def layer_norm(x, gamma, beta, eps):
    m = x.mean(-1, keepdims=True); d = x - m; v = (d * d).mean(-1, keepdims=True); return d / np.sqrt(v + eps) * gamma + beta
def erf(x):
    """Abramowitz and Stegun 7.1.26: absolute error 1.5e-7, a thousandth of what float16 rounds."""
    z = np.abs(x); t = 1 / (1 + 0.3275911 * z)
    e = 1 - t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))) * np.exp(-z * z); return np.where(x < 0, -e, e)
def activate(kind, x):
    if kind == 2: return np.maximum(x, 0)
    if kind == 1: return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)))
    return 0.5 * x * (1 + erf(x * 0.7071067811865476))
def attention(q, k, v, heads, scale, mask):
    B, S, D = q.shape; s = lambda a: a.reshape(B, S, heads, -1).transpose(0, 2, 1, 3)
    x = s(q) @ s(k).transpose(0, 1, 3, 2) * scale
    if mask is not None: x = x + mask
    x = x - x.max(-1, keepdims=True); e = np.exp(x); p = e / e.sum(-1, keepdims=True)
    return (p @ s(v)).transpose(0, 2, 1, 3).reshape(B, S, D)
def encoder(x, layers, heads, scale, mask, pre, first_norm, act, eps, final):
    """x [B, S, D]; layers: dicts of float64 arrays; final: (gamma, beta) or None. Returns the result and the phases of the last layer."""
    for i, w in enumerate(layers):
        h = layer_norm(x, w["g0"], w["e0"], eps) if (i > 0 or first_norm) else x
        qkv = h @ np.concatenate([w["wq"], w["wk"], w["wv"]], 1) + np.concatenate([w["bq"], w["bk"], w["bv"]])
        D = x.shape[-1]; ctx = attention(qkv[..., :D], qkv[..., D:2 * D], qkv[..., 2 * D:], heads, scale, mask)
        middle = ctx @ w["wo"] + w["bo"] + (x if pre else h)
        m = layer_norm(middle, w["g1"], w["e1"], eps)
        inner = activate(act, m @ w["w1"] + w["b1"])
        x = inner @ w["w2"] + w["b2"] + (middle if pre else m)
    return (layer_norm(x, *final, eps) if final else x), dict(qkv=qkv, context=ctx, middle=middle, inner=inner, outer=x)
