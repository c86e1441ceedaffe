"""Writing ONNX function bodies as text.

Bodies compute in float32 and give back the type of the attribute `dtype` (an ONNX element type), which every node of domain onnxfuse
that needs it carries: CastLike exists only from version 15 on. All attributes are written at every node, since default values of
function attributes need IR version 9.
"""

from __future__ import annotations

import re

import onnx
import onnx.parser

from onnxfuse.fusions.pattern import DOMAIN


def define(opset: int, body: str) -> onnx.FunctionProto:
    """The function that `body` says, in onnx's text form, importing version `opset` of the standard operators."""
    return onnx.parser.parse_function(f'<opset_import: ["" : {opset}], domain: "{DOMAIN}">\n{body}')


def epsilon(opset: int) -> str:
    """Statements that give a float32 scalar `eps` from the attribute `epsilon`.

    Below version 12 a Constant cannot take its value from an attribute, but LeakyRelu can: of -1 it is -alpha.
    """
    if opset >= 12:
        return "eps = Constant <value_float: float = @epsilon> ()"
    return "minus = Constant <value = float {-1.0}> () minus_eps = LeakyRelu <alpha: float = @epsilon> (minus) eps = Neg (minus_eps)"


def row_mean(opset: int, result: str, of: str) -> str:
    """Statements for the mean over the last axis; the axes became an input in version 18."""
    if opset >= 18:
        return f"{result}_axes = Constant <value_ints = [-1]> () {result} = ReduceMean <keepdims = 1> ({of}, {result}_axes)"
    return f"{result} = ReduceMean <axes = [-1], keepdims = 1> ({of})"


def scoped(statements: str, prefix: str, outside: frozenset[str] = frozenset()) -> str:
    """`statements` with a prefix before all names that they give to results, but for those in `outside`: to be used twice in a body."""
    names = sorted(set(re.findall(r"(\w+)\s*=\s*[A-Z]", statements)) - outside)
    # Attributes may be called like results (`x = 1`, `epsilon: float = @epsilon`), and stay.
    return re.sub(rf"\b({'|'.join(names)})\b(?!\s*[:=]\s*[a-z@])", rf"{prefix}\1", statements) if names else statements
