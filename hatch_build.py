"""What the wheel holds and the checkout does not: the number of tests of each fusion and plugin, counted when it is built."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CountTests(BuildHookInterface[Any]):
    """Puts onnxfuse/report/tests.json into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "standard":
            return  # an editable installation has the tests themselves
        root = Path(self.root)
        spec = importlib.util.spec_from_file_location("counted", root / "onnxfuse" / "report" / "counted.py")
        if spec is None or spec.loader is None:
            raise FileNotFoundError(root / "onnxfuse" / "report" / "counted.py")
        counted = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(counted)
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name) / "tests.json"
        path.write_text(json.dumps(counted.count(root), indent=1) + "\n", encoding="utf-8")
        build_data["force_include"][str(path)] = "onnxfuse/report/tests.json"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version == "standard":
            self.folder.cleanup()
