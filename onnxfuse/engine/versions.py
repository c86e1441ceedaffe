"""How TensorRT's versions differ, 10.0 to 11.x: one question a function, put to the tensorrt module that is here.

| since | what | where it matters |
|---|---|---|
| 10.7 | a registered plugin wins over an ONNX function of its name; until 10.6 the function does | nowhere: `prepare` leaves no choice |
| 10.10 | a plugin is also looked for in the node's domain as namespace | nowhere: `prepare` names the namespace |
| 11.0 | every network is strongly typed: the flag is still taken, and the builder has no FP16 flag | `network_flags`, `has_fp16_flag` |
| 11.0 | the registry's older list of creators is gone | nowhere: `all_creators` is in every version |

The layouts of the plugin classes are the same in all of them. docs/compatibility.md says how each line is known. Nothing here imports
TensorRT; `engine/trt` is the one module that does.
"""

from __future__ import annotations

import re
from types import ModuleType

OLDEST = (10, 0)


def number(trt: ModuleType) -> tuple[int, int]:
    """(major, minor)."""
    found = re.findall(r"\d+", str(trt.__version__))
    return int(found[0]), int(found[1])


def network_flags(trt: ModuleType, *, strongly_typed: bool) -> int:
    """What `create_network` is given for such a network; 0 where a version should have no other kind, nor a flag for it."""
    known = trt.NetworkDefinitionCreationFlag.__members__
    return 1 << int(known["STRONGLY_TYPED"]) if strongly_typed and "STRONGLY_TYPED" in known else 0


def has_fp16_flag(trt: ModuleType) -> bool:
    """Whether a weakly typed network with the FP16 flag can be built."""
    return hasattr(trt.BuilderFlag, "FP16") and number(trt) < (11, 0)
