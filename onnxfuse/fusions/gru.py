"""gru: layers of ONNX's GRU, and what exporters put between and around them, in persistent kernels.

    r, z = sigmoid(W x + R h + b)    n = tanh(W x + Wb + r (R h + Rb))    h = (1 - z) n + z h        with linear_before_reset
                                     n = tanh(W x + Wb + R (r h) + Rb)                               without

When it wins: nearly always, as lstm; the form without linear_before_reset exchanges values twice a step and gains less.
One step in primitives (a cell) becomes the same node, as with lstm.
Source of the idea: persistent RNNs (Diamos et al., ICML 2016).
"""

from __future__ import annotations

from onnxfuse.fusions import _recurrence


class Gru(_recurrence.Recurrence):
    name = "gru"
    cell = anchor = "GRU"
    same = ("linear_before_reset",)
    patterns = _recurrence.patterns("GRU")


FUSION = Gru()
