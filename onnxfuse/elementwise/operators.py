"""The operators that an expression may hold: what they take and give, and the device function that computes them.

An operator is named as in ONNX; `Silu`, `QuickGelu` and `GeluTanh` are those of domain onnxfuse. The device functions are in
plugins/Elementwise/operators.cuh, where each has the meaning of the ONNX operator in onnxruntime, NaN and infinities included.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FLOATS = frozenset({"float32", "float16", "bfloat16"})
INTEGERS = frozenset({"int32", "int64"})
NUMBERS = FLOATS | INTEGERS
BOOL = frozenset({"bool"})
TYPES = NUMBERS | BOOL
# Types of values between a quantization and what undoes it: within an expression alone, never of an input or output.
QUANTIZED = {"int8": (-128.0, 127.0), "uint8": (0.0, 255.0)}
SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "bool": 1}

MOST_OPERANDS = 8


@dataclass(frozen=True)
class Operator:
    """One operator.

    function: of the device. takes: element types of its operands. least, most: operands. gives: "same" as the operands, "bool", "to"
    for what the attribute `to` says, "quantized" for the type whose ends the attributes `low` and `high` are, or "scale" for that of
    operand 1. jumps: whether a small change of an operand can change the result by a step, so that operands are
    rounded to their type first, as in the original. attributes: name -> default, always numbers; None where it must be given. first_bool:
    whether operand 0 is a condition. cost: of one element, in additions, for choosing a cut.
    """

    function: str
    takes: frozenset[str]
    least: int = 1
    most: int = 1
    gives: str = "same"
    jumps: bool = False
    attributes: dict[str, float | None] = field(default_factory=dict)
    first_bool: bool = False
    folded: bool = False  # of many operands, two at a time
    cost: int = 1


def _unary(function: str, takes: frozenset[str] = FLOATS, cost: int = 1, jumps: bool = False, **attributes: float | None) -> Operator:
    return Operator(function, takes, jumps=jumps, attributes=attributes, cost=cost)


def _binary(function: str, takes: frozenset[str] = NUMBERS, cost: int = 1) -> Operator:
    return Operator(function, takes, 2, 2, cost=cost)


def _compare(function: str, takes: frozenset[str] = NUMBERS) -> Operator:
    return Operator(function, takes, 2, 2, "bool", jumps=True)


OPERATORS: dict[str, Operator] = {
    "Abs": _unary("absolute", NUMBERS),
    "Add": _binary("add"),
    "And": _binary("logical_and", BOOL),
    "BitwiseAnd": _binary("bitwise_and", INTEGERS),
    "BitwiseNot": _unary("bitwise_not", INTEGERS),
    "BitwiseOr": _binary("bitwise_or", INTEGERS),
    "BitwiseXor": _binary("bitwise_xor", INTEGERS),
    "Cast": Operator("", TYPES, gives="to"),
    "Ceil": _unary("ceiling", jumps=True),
    "Celu": _unary("celu", cost=12, alpha=1.0),
    "Clip": Operator("clip", NUMBERS, 1, 3, cost=2),
    "Cos": _unary("cosine", cost=20),
    "DequantizeLinear": Operator("dequantize", frozenset(QUANTIZED), 2, 2, "scale", attributes={"zero": 0.0}, cost=2),
    "Div": _binary("divide", cost=8),
    "Elu": _unary("elu", cost=12, alpha=1.0),
    "Equal": _compare("equal", TYPES),
    "Erf": _unary("error_function", cost=16),
    "Exp": _unary("exponential", cost=8),
    "Floor": _unary("floor_of", jumps=True),
    "Gelu": _unary("gelu", cost=20),
    "GeluTanh": _unary("gelu_tanh", cost=20),
    "Greater": _compare("greater"),
    "GreaterOrEqual": _compare("greater_or_equal"),
    "HardSigmoid": _unary("hard_sigmoid", cost=4, alpha=0.2, beta=0.5),
    "HardSwish": _unary("hard_swish", cost=5),
    "Identity": _unary("", TYPES, cost=0),
    "IsInf": Operator("is_inf", FLOATS, gives="bool", jumps=True, attributes={"detect_negative": 1.0, "detect_positive": 1.0}),
    "IsNaN": Operator("is_nan", FLOATS, gives="bool"),
    "LeakyRelu": _unary("leaky_relu", cost=2, alpha=0.01),
    "Less": _compare("less"),
    "LessOrEqual": _compare("less_or_equal"),
    "Log": _unary("logarithm", cost=10),
    "Max": Operator("maximum", NUMBERS, 1, MOST_OPERANDS, folded=True, cost=2),
    "Mean": Operator("mean", FLOATS, 1, MOST_OPERANDS, folded=True, cost=8),
    "Min": Operator("minimum", NUMBERS, 1, MOST_OPERANDS, folded=True, cost=2),
    "Mish": _unary("mish", cost=30),
    "Mod": Operator("modulo", NUMBERS, 2, 2, jumps=True, attributes={"fmod": 0.0}, cost=16),
    "Mul": _binary("multiply"),
    "Neg": _unary("negate", NUMBERS),
    "Not": _unary("logical_not", BOOL),
    "Or": _binary("logical_or", BOOL),
    "PRelu": _binary("prelu", FLOATS, cost=2),
    "Pow": _binary("power", FLOATS, cost=30),
    "QuantizeLinear": Operator(
        "quantize", FLOATS, 2, 2, "quantized", jumps=True, attributes={"low": None, "high": None, "zero": 0.0}, cost=14
    ),
    "QuickGelu": _unary("quick_gelu", cost=20),
    "Reciprocal": _unary("reciprocal", cost=8),
    "Relu": _unary("relu", NUMBERS),
    "Round": _unary("round_even", jumps=True),
    "Selu": _unary("selu", cost=12, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875),
    "Sigmoid": _unary("sigmoid", cost=16),
    "Sign": _unary("sign", NUMBERS),
    "Silu": _unary("silu", cost=17),
    "Sin": _unary("sine", cost=20),
    "Softplus": _unary("softplus", cost=20),
    "Softsign": _unary("softsign", cost=9),
    "Sqrt": _unary("square_root", cost=8),
    "Sub": _binary("subtract"),
    "Sum": Operator("add", FLOATS, 1, MOST_OPERANDS, folded=True),
    "Tanh": _unary("hyperbolic_tangent", cost=16),
    "ThresholdedRelu": _unary("thresholded_relu", jumps=True, alpha=1.0),
    "Where": Operator("select", TYPES, 3, 3, first_bool=True),
    "Xor": _binary("logical_xor", BOOL),
}

# What may be there once, at the end or in the middle: a reduction over the last axis. Their results have the shape of the rows (keepdims 1:
# with a last axis of 1) or, of those below that normalise, of the operand.
REDUCTIONS: dict[str, Operator] = {
    "ReduceMax": Operator("max", FLOATS, attributes={"keepdims": 1.0}),
    "ReduceMean": Operator("mean", FLOATS, attributes={"keepdims": 1.0}),
    "ReduceMin": Operator("min", FLOATS, attributes={"keepdims": 1.0}),
    "ReduceSum": Operator("sum", FLOATS, attributes={"keepdims": 1.0}),
    "LayerNormalization": Operator("layer_norm", FLOATS, 2, 3, attributes={"epsilon": 1e-5}),
    "RMSNormalization": Operator("rms_norm", FLOATS, 2, 2, attributes={"epsilon": 1e-5}),
    "Softmax": Operator("softmax", FLOATS),
    "LogSoftmax": Operator("log_softmax", FLOATS),
}
NORMALISING = frozenset({"LayerNormalization", "RMSNormalization", "Softmax", "LogSoftmax"})
