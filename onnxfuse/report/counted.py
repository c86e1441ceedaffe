"""How many tests each fusion and each plugin has, and lines each plugin, counted from the sources.

In a checkout tests are counted when asked for. An installed package has no tests: the numbers are counted when the wheel is
built (hatch_build.py) and lie in tests.json beside this file. Only the standard library is used here, as the wheel is built in an
environment without the package.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent


def tests() -> dict[str, int]:
    """Name of a fusion or of a plugin -> test functions. Empty where neither the tests nor their counts are there."""
    root = HERE.parent.parent
    if (root / "tests" / "fusions").is_dir():
        return count(root)
    try:
        counted: dict[str, int] = json.loads((HERE / "tests.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return counted


def count(root: Path) -> dict[str, int]:
    """Test functions; a parametrized one counts once.

    Of a fusion: those of tests/fusions/test_NAME.py. Of a plugin, in tests/plugins and tests/gpu: those that name it or a kernel of it, and
    those that name no plugin at all in a file that names it, as they run over all of that file's. All of tests/NAME, where a plugin has a
    folder of its own there.
    """
    fusions = sorted((root / "onnxfuse" / "fusions").glob("[a-z]*.py"))
    files = {path.stem: root / "tests" / "fusions" / f"test_{path.stem}.py" for path in fusions if path.stem not in ("base", "pattern")}
    found = {name: len(_functions(path)) for name, path in files.items() if path.is_file()}
    plugins = {name: said for path in sorted((root / "plugins").glob("*/plugin.cpp")) for name, said in _plugins_of(path).items()}
    found.update(dict.fromkeys(plugins, 0))
    for path in (path for folder in ("plugins", "gpu") for path in sorted((root / "tests" / folder).glob("test_*.py"))):
        everywhere = _named(path.read_text(encoding="utf-8"), plugins)
        for text in _functions(path):
            for plugin in _named(text, plugins) or everywhere:
                found[plugin] += 1
    for plugin in plugins:
        found[plugin] += sum(len(_functions(path)) for path in sorted((root / "tests" / plugin.lower()).glob("test_*.py")))
    return found


def _plugins_of(source: Path) -> dict[str, tuple[str, ...]]:
    """The plugins of a folder, each with the words that name it in a test: a kernel, or where several share the kernels, the folder."""
    folder = source.parent
    names = re.findall(r'kName = "(\w+)"', source.read_text(encoding="utf-8"))
    shared = kernels(folder) if len(names) == 1 else (folder.name, folder.name.lower())
    return {name: (name, *shared) for name in names}


def kernels(folder: Path) -> tuple[str, ...]:
    """Names of the __global__ functions in a plugin's folder."""
    pattern = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)")
    return tuple(dict.fromkeys(name for path in sorted(folder.glob("*.cu*")) for name in pattern.findall(path.read_text(encoding="utf-8"))))


def lines(folder: Path) -> int:
    """Lines of a plugin's sources, without blank lines and those that are a comment alone."""
    texts = (path.read_text(encoding="utf-8") for path in sorted(folder.glob("*")) if path.suffix in (".cu", ".cuh", ".h", ".cpp"))
    return sum(bool(line.strip()) and not line.strip().startswith(("//", "/*", "*")) for text in texts for line in text.splitlines())


def _named(text: str, plugins: Mapping[str, tuple[str, ...]]) -> list[str]:
    return [plugin for plugin, names in plugins.items() if any(name in text for name in names)]


def _functions(path: Path) -> list[str]:
    """The sources of a file's test functions, decorators included."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    return [
        "\n".join(lines[min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 : node.end_lineno])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
