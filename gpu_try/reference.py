"""ONNX LSTM and GRU in float64: what the kernels are held to. Checked against onnxruntime by check_reference.py."""
import numpy as np

def sigmoid(x): return 0.5 * (1 + np.tanh(0.5 * x))

def recurrence(cell, x, w, r, b, h0, c0, lengths, reversed_mask, clip):
    """x [T,B,I], w [D,GH,I], r [D,GH,H], b [D,2GH] or None, h0/c0 [D,B,H] or None, lengths [B] or None.
    cell 0 LSTM, 1 GRU linear_before_reset, 2 GRU. Returns y [T,D,B,H], h [D,B,H], c [D,B,H]."""
    x, w, r = (np.asarray(v, np.float64) for v in (x, w, r))
    T, B, I = x.shape; D, GH, H = r.shape; G = GH // H
    bias = np.zeros((D, 2 * GH)) if b is None else np.asarray(b, np.float64)
    y = np.zeros((T, D, B, H)); hs = np.zeros((D, B, H)); cs = np.zeros((D, B, H))
    lens = np.full(B, T) if lengths is None else np.clip(np.asarray(lengths), 0, T)
    lim = (lambda v: np.clip(v, -clip, clip)) if clip > 0 else (lambda v: v)
    for d in range(D):
        back = reversed_mask >> d & 1
        h = np.zeros((B, H)) if h0 is None else np.array(h0[d], np.float64)
        c = np.zeros((B, H)) if c0 is None else np.array(c0[d], np.float64)
        xw = (x.reshape(T * B, I) @ w[d].T).reshape(T, B, GH) + bias[d, :GH]
        rT = np.ascontiguousarray(r[d].T); rb = bias[d, GH:]
        for s in range(T):
            t = np.where(s < lens, lens - 1 - s, s) if back else np.full(B, s)
            g = xw[t, np.arange(B)]
            if cell == 0:
                a = g + h @ rT + rb
                i, o, f, n = (a[:, k * H:(k + 1) * H] for k in range(4))
                c2 = sigmoid(lim(f)) * c + sigmoid(lim(i)) * np.tanh(lim(n)); h2 = sigmoid(lim(o)) * np.tanh(c2)
            else:
                a = h @ rT[:, :2 * H] + rb[:2 * H]
                z = sigmoid(lim(g[:, :H] + a[:, :H])); q = sigmoid(lim(g[:, H:2 * H] + a[:, H:]))
                if cell == 1: n = np.tanh(lim(g[:, 2 * H:] + q * (h @ rT[:, 2 * H:] + rb[2 * H:])))
                else: n = np.tanh(lim(g[:, 2 * H:] + (q * h) @ rT[:, 2 * H:] + rb[2 * H:]))
                h2 = (1 - z) * n + z * h; c2 = c
            live = (s < lens)[:, None]
            y[t, d, np.arange(B)] = np.where(live, h2, 0); h = np.where(live, h2, h); c = np.where(live, c2, c)
        hs[d], cs[d] = h, c
    return y, hs, cs
