"""The one module that imports TensorRT and CUDA: what is missing is told apart, and what TensorRT says becomes one line.

A stand-in for the tensorrt module shows how failures travel; the real one is tested in tests/gpu.
"""

from __future__ import annotations

import enum
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onnxfuse.engine import trt
from onnxfuse.errors import BadInput, MissingHere


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What this module remembers for the process must not outlive a stand-in."""
    cached = (trt.tensorrt, trt.cuda, trt.logger, trt._standard_plugins)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def importing(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """Makes import_module answer with these: a module, or an exception to raise. Others import as always."""
    real = importlib.import_module

    def answer(name: str, package: str | None = None) -> Any:
        key = name.replace(".", "_")
        if key not in modules:
            return real(name, package)
        if isinstance(modules[key], BaseException):
            raise modules[key]
        return modules[key]

    monkeypatch.setattr(trt.importlib, "import_module", answer)


class CudaError(Exception):
    pass


def driver(count: int = 1, fault: Exception | None = None) -> types.ModuleType:
    module = types.ModuleType("pycuda.driver")

    def init() -> None:
        if fault is not None:
            raise fault

    module.init = init  # type: ignore[attr-defined]
    module.Error = CudaError  # type: ignore[attr-defined]
    module.Device = type("Device", (), {"count": staticmethod(lambda: count)})  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (ModuleNotFoundError("No module named 'tensorrt'", name="tensorrt"), "is not installed here.*pip install tensorrt"),
        (ModuleNotFoundError("No module named 'foo'", name="foo"), "cannot be loaded here"),
        (ImportError("libnvinfer.so.10: cannot open shared object file"), "libnvinfer.*LD_LIBRARY_PATH"),
        (OSError("libcudart.so.12: cannot open"), "cannot be loaded here: libcudart"),
    ],
)
def test_tensorrt_missing_or_broken(monkeypatch: pytest.MonkeyPatch, fault: Exception, says: str) -> None:
    importing(monkeypatch, tensorrt=fault)
    with pytest.raises(MissingHere, match=says) as caught:
        trt.tensorrt()
    assert "\n" not in str(caught.value)


def test_tensorrt_too_old_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("tensorrt")
    importing(monkeypatch, tensorrt=old)
    with pytest.raises(MissingHere, match="the module tensorrt is empty"):
        trt.tensorrt()
    old.Builder = object  # type: ignore[attr-defined]
    old.__version__ = "8.6.1"  # type: ignore[attr-defined]
    with pytest.raises(MissingHere, match=r"TensorRT 8\.6\.1 is too old"):
        trt.tensorrt()


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (ModuleNotFoundError("No module named 'pycuda'", name="pycuda"), "pycuda is not installed"),
        (ModuleNotFoundError("No module named 'siphash24'", name="siphash24"), "needs the package siphash24"),
        (ImportError("libcuda.so.1: cannot open shared object file"), "no NVIDIA driver here"),
        (ImportError("libcurand.so.10: cannot open shared object file"), "pycuda cannot be loaded here"),
        (driver(fault=CudaError("cuInit failed: no CUDA-capable device")), "no NVIDIA GPU can be used.*no CUDA-capable"),
        (driver(count=0), "sees none; check `nvidia-smi` and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_package_driver_and_gpu_are_told_apart(monkeypatch: pytest.MonkeyPatch, module: Any, says: str) -> None:
    importing(monkeypatch, pycuda_driver=module)
    with pytest.raises(MissingHere, match=says):
        trt.cuda()


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "IBuilder::buildSerializedNetwork: Error Code 4: API Usage Error (Network must have at least one output)",
            "error 4: API Usage Error (Network must have at least one output)",
        ),
        (
            "[optimizer.cpp::computeCosts::4136] Error Code 10: Internal Error (Could not find any\n implementation for node x.)",
            "error 10: Internal Error (Could not find any implementation for node x.)",
        ),
        ("plain words", "plain words"),
        ("x" * 400, "x" * 299 + "…"),
    ],
)
def test_one_line_of_what_tensorrt_says(said: str, line: str) -> None:
    assert trt.shorten(said) == line


def test_the_first_error_is_the_reason() -> None:
    messages = trt.Messages()
    messages.add(True, "of an earlier build")
    mark = messages.mark()
    messages.add(False, "a warning")
    messages.add(True, "the cause")
    messages.add(True, "a consequence")
    assert messages.reason(mark, "none") == "the cause"
    assert messages.warnings(mark) == ["a warning"]
    assert messages.reason(messages.mark(), "none") == "none"


# A stand-in for tensorrt, as far as trt.build calls it ----------------------------------------------------------------


class Parser:
    def __init__(self, network: Any, logger: Any) -> None:
        self.num_errors = 2

    def parse(self, model: bytes, path: str) -> bool:
        return model != b"refused"

    def get_error(self, index: int) -> Any:
        answers = {"node": 7, "node_name": "norm_0", "node_operator": "Odd", "desc": f"no importer ({index})"}
        return type("Error", (), {name: (lambda self, value=value: value) for name, value in answers.items()})()


def stand_in(version: str, build: Callable[[Any], bytes | None], dims: tuple[int, ...] = (1, 4), cache_fits: bool = True) -> Any:
    """A tensorrt module whose builder calls build(config)."""
    module = types.ModuleType("tensorrt")
    member = types.SimpleNamespace
    tensor = member(name="x", shape=dims, is_shape_tensor=False)
    log: list[Any] = []

    class Base:
        INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2

    class Profile:
        def set_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
            log.append((name, shapes))

    class Config:
        progress_monitor: Any = None

        def add_optimization_profile(self, profile: Profile) -> int:
            return 0

        def create_timing_cache(self, data: bytes) -> Any:
            return member(serialize=lambda: b"cache")

        def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> bool:
            assert ignore_mismatch is False
            return cache_fits

    class Builder:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def create_network(self, flags: int) -> Any:
            log.append(("flags", flags))
            return member(num_inputs=1, get_input=lambda i: tensor)

        def create_builder_config(self) -> Config:
            return Config()

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Any, config: Config) -> bytes | None:
            log.append(("plugins", getattr(config, "plugins_to_serialize", None)))
            plan = build(config)
            if plan is None:
                self.logger.log(Base.ERROR, "the cause")
            return plan

    flags = {"EXPLICIT_BATCH": 0, "STRONGLY_TYPED": 1} if version.startswith("10") else {"STRONGLY_TYPED": 0}
    module.__dict__.update(
        __version__=version, log=log, ILogger=Base, Logger=Base, IProgressMonitor=Base, Builder=Builder, OnnxParser=Parser,
        ProfilingVerbosity=member(DETAILED=2),
        NetworkDefinitionCreationFlag=enum.IntEnum("NetworkDefinitionCreationFlag", flags),  # type: ignore[misc]
    )  # fmt: skip
    Base.__init__ = lambda self: None  # type: ignore[method-assign,assignment,misc]
    return module


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def install(module: Any) -> None:
        importing(monkeypatch, tensorrt=module, pycuda_driver=driver())
        monkeypatch.setattr(trt, "_described", lambda *a, **k: ((), ()))

    return install


def order(model: bytes = b"model", **changes: Any) -> trt.Order:
    return trt.Order(model=model, path=Path("m.onnx"), **changes)


class Watch:
    """A monitor that stops the build at a step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.seen: list[object] = []

    def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
        self.seen.append((phase, parent, steps))

    def step_complete(self, phase: str, step: int) -> bool:
        self.seen.append(step)
        return step != self.stop_at

    def phase_finish(self, phase: str) -> None:
        self.seen.append("end")


def three_steps(config: Any) -> bytes | None:
    monitor = config.progress_monitor
    monitor.phase_start("Building", "", 3)
    for step in range(3):
        if not monitor.step_complete("Building", step):
            return None
    monitor.phase_finish("Building")
    return b"plan"


@pytest.mark.parametrize(("version", "flags"), [("10.6.0.post1", 1 << 1), ("11.2.1.2", 1 << 0)])
def test_strong_typing_in_every_version(use: Callable[[Any], None], version: str, flags: int) -> None:
    module = stand_in(version, lambda config: b"plan")
    use(module)
    built = trt.build(order(cache=b""))
    assert built is not None
    assert (built.engine, built.cache) == (b"plan", b"cache")
    assert ("flags", flags) in module.log
    assert ("plugins", None) in module.log


def test_progress_is_passed_on(use: Callable[[Any], None]) -> None:
    use(stand_in("10.6.0", three_steps))
    watch = Watch()
    assert trt.build(order(), watch) is not None
    assert watch.seen == [("Building", None, 3), 0, 1, 2, "end"]


def test_a_stopped_build_gives_nothing(use: Callable[[Any], None]) -> None:
    use(stand_in("10.6.0", three_steps))
    watch = Watch(stop_at=1)
    assert trt.build(order(), watch) is None
    assert watch.seen == [("Building", None, 3), 0, 1]


def test_a_monitor_that_raises_stops_the_build(use: Callable[[Any], None]) -> None:
    class Broken(Watch):
        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            raise RuntimeError("closed terminal")

    use(stand_in("10.6.0", three_steps))
    assert trt.build(order(), Broken()) is None


def test_a_failed_build_says_the_first_reason(use: Callable[[Any], None]) -> None:
    use(stand_in("10.6.0", lambda config: None))
    with pytest.raises(BadInput, match=r"m\.onnx: TensorRT cannot build an engine: the cause"):
        trt.build(order(), Watch())


def test_a_refused_model_names_the_node(use: Callable[[Any], None]) -> None:
    use(stand_in("10.6.0", three_steps))
    with pytest.raises(BadInput, match=r"m\.onnx: TensorRT cannot take the model: node norm_0 \(Odd\): no importer \(0\) \(and 1 more\)"):
        trt.build(order(b"refused"))


def test_a_timing_cache_of_another_gpu_is_refused(use: Callable[[Any], None]) -> None:
    use(stand_in("10.6.0", three_steps, cache_fits=False))
    with pytest.raises(BadInput, match="the timing cache cannot be used here: it belongs to another GPU"):
        trt.build(order(cache=b"old"))


def test_profiles_of_dynamic_inputs(use: Callable[[Any], None]) -> None:
    module = stand_in("10.6.0", lambda config: b"plan", dims=(-1, 4))
    use(module)
    shapes = ((1, 4), (2, 4), (8, 4))
    assert trt.build(order(profiles={"x": shapes})) is not None
    assert ("x", shapes) in module.log
    with pytest.raises(BadInput, match="input x has a dynamic shape; give --shapes x:MIN"):
        trt.build(order())


def test_a_plugin_library_that_is_not_there(use: Callable[[Any], None], tmp_path: Path) -> None:
    use(stand_in("10.6.0", three_steps))
    with pytest.raises(BadInput, match=r"plugin library .*absent\.so: No such file"):
        trt.build(order(libraries=(tmp_path / "absent.so",)))


def test_importing_the_package_imports_no_gpu_library() -> None:
    import subprocess

    code = (
        "import sys; from onnxfuse.engine import build, run, trt; from onnxfuse.bench import timing; import "
        "onnxfuse.commands.build_engine;"
        "sys.exit(str([m for m in ('tensorrt', 'pycuda', 'cuda', 'torch') if m in sys.modules] or ''))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr.strip() == ""
