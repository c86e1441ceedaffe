"""Plan files: read back what a report wrote, refuse what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onnxfuse.errors import BadInput
from onnxfuse.plan import planfile
from onnxfuse.plan.sites import Decision, Site


def test_a_report_is_a_plan(tmp_path: Path) -> None:
    decisions = [
        Decision(Site("gelu", "erf", "y", ("n1", "n2"), "2x8", "float32"), True, "canonical", "gelu"),
        Decision(Site("bias_gelu", "erf", "z", ("n3",), "2x8", "float32"), False, "lost"),
    ]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"sites": [decision.to_dict() for decision in decisions]}))
    assert planfile.read(path) == {("gelu", "y"): (True, "canonical"), ("bias_gelu", "z"): (False, "lost")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "no list 'sites'"),
        ('{"sites": {}}', "no list 'sites'"),
        ('{"sites": [{"fusion": "gelu", "output": "y", "decision": "maybe"}]}', "site 0 needs"),
        ('{"sites": [7]}', "site 0 needs"),
        ("[" * 100_000, "not JSON"),
        (
            '{"sites": [{"fusion": "gelu", "output": "y", "decision": "fused"}, {"fusion": "gelu", "output": "y", "decision": "kept"}]}',
            "site 1, gelu at 'y', is both fused and kept",
        ),
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=message) as refused:
        planfile.read(path)
    assert "\n" not in str(refused.value)


def test_a_missing_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        planfile.read(tmp_path / "absent.json")
