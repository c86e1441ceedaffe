"""How TensorRT's versions differ, 10.0 to 11.x: one question a function, put to the tensorrt module that is here.

| since | what | asked by |
|---|---|---|
| 10.0 | explicit batch is the only kind of network, and no flag is needed for it | `network_flags` |
| 10.0 | plugins of IPluginV3; `all_creators` beside the older `plugin_creator_list`, which is gone in 11 | `creators` |
| 10.1 | the parser's errors name the node and its operator | `parser_answer` |
| 10.7 | a registered plugin wins over an ONNX function of its name; until 10.6 the function does (`engine/prepare` leaves no choice) | |
| 10.10 | a plugin is also looked for in the node's domain as namespace (`engine/prepare` always names it) | |
| 11.0 | every network is strongly typed, so that there is no FP16 flag to a builder | `network_flags`, `has_fp16_flag` |

Nothing here imports TensorRT; `engine/trt` is the one module that does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import ModuleType
from typing import Any

OLDEST = (10, 0)


def number(trt: ModuleType) -> tuple[int, int]:
    """(major, minor)."""
    found = re.findall(r"\d+", str(trt.__version__))
    return int(found[0]), int(found[1])


def network_flags(trt: ModuleType, *, strongly_typed: bool) -> int:
    """What `create_network` is given for such a network. From 11 on there is no other kind than the strongly typed."""
    known = trt.NetworkDefinitionCreationFlag.__members__
    return 1 << int(known["STRONGLY_TYPED"]) if strongly_typed and "STRONGLY_TYPED" in known else 0


def has_fp16_flag(trt: ModuleType) -> bool:
    """Whether a weakly typed network with the FP16 flag can be built."""
    return hasattr(trt.BuilderFlag, "FP16") and number(trt) < (11, 0)


def creators(registry: Any) -> Iterable[Any]:
    """All plugin creators of the registry."""
    every: Iterable[Any] = registry.all_creators if hasattr(registry, "all_creators") else registry.plugin_creator_list
    return every


def parser_answer(error: Any, question: str) -> str:
    """What a parser error says of itself, such as "node_name"; "" where this version has no such question."""
    method = getattr(error, question, None)
    return str(method()) if method is not None else ""
