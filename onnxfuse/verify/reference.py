"""The reference: onnxruntime on the CPU with its optimizations off, in a child process.

Optimizations are off because onnxruntime's own fusions are at times wrong. The process is a child because onnxruntime crashes
on some valid models. One `Runtime` serves several models, as starting the child takes about half a second.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onnxfuse.errors import BadInput, OnnxfuseError
from onnxfuse.verify import worker
from onnxfuse.verify.skim import skeleton

Feeds = Mapping[str, np.ndarray]
Outputs = dict[str, Any]  # name -> array; a list of arrays for a sequence; None for an empty optional
Progress = Callable[[int, int], None]  # done, total

ONNXRUNTIME = "onnxruntime"
ONNX_REFERENCE = "onnx.reference"
TIMEOUT = 1800.0  # seconds of silence after which a run is given up
RANGES_BUDGET = 512 << 20  # bytes of inner tensors held at once by `ranges`

# The child sees exactly the modules that the parent sees; -I keeps the current folder out of it.
_START = "import sys; sys.path[:] = sys.argv[2:]; from onnxfuse.verify.worker import main; main(sys.argv[1])"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a tensor is: its dtype, as numpy or ml_dtypes name it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, element: str, shape: Sequence[int]) -> Kind:
        """From onnxruntime's words, such as tensor(float)."""
        name = element.removeprefix("tensor(").removesuffix(")")
        name = {"float": "float32", "double": "float64"}.get(name, name).replace("float8e", "float8_e")
        return cls(name, tuple(shape))

    @classmethod
    def fed(cls, array: np.ndarray) -> Kind:
        """What an array that is fed is."""
        return cls("string" if array.dtype.kind in "OUS" else array.dtype.name, array.shape)

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of memory; of text, of its pointers."""
        width = 8 if self.dtype == "string" else int(np.dtype("uint16" if self.dtype == "bfloat16" else _plain(self.dtype)).itemsize)
        return math.prod(self.shape) * width

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def _plain(dtype: str) -> str:
    return "uint8" if dtype.startswith("float8") or "int4" in dtype or "float4" in dtype or "int2" in dtype else dtype


class CannotRun(OnnxfuseError):
    """No kernel for this model (bfloat16 Add, double Conv...), or it is too new for the evaluator: no fault of the model."""


class Runtime:
    """Runs models in a child process. A context manager; the child starts with the first request, and again after a crash.

    threads: of onnxruntime, 0 for one a core. timeout: seconds that one answer may take.
    """

    def __init__(self, threads: int = 0, timeout: float = TIMEOUT):
        self.threads = threads
        self.timeout = timeout
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._untidy: set[Path] = set()  # models with repeated node names

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop()
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    def run(
        self,
        model: Path,
        feeds_list: Sequence[Feeds],
        tensors: Sequence[str] | None = None,
        evaluator: str = ONNXRUNTIME,
        progress: Progress | None = None,
    ) -> list[Outputs]:
        """Outputs of `model` for each feed; with `tensors`, those tensors instead, which may be inner ones of the main graph.

        CannotRun: no kernel for it. OnnxfuseError: it failed, crashed or took too long. BadInput: no such tensor or file.
        """
        model = Path(model)
        if tensors is not None:
            _require(model, tensors)
        results = []
        for done, feeds in enumerate(feeds_list):
            if progress:
                progress(done, len(feeds_list))
            request = {"op": "run", "tensors": None if tensors is None else list(tensors), "evaluator": evaluator}
            results.append(self._with_files(model, [feeds], functools.partial(self._one, model, request), self._outputs))
        if progress:
            progress(len(feeds_list), len(feeds_list))
        return results

    def ranges(
        self, model: Path, feeds_list: Sequence[Feeds], tensors: Sequence[str] | None = None, progress: Progress | None = None
    ) -> dict[str, float]:
        """Largest finite magnitude of each floating tensor over the feeds; by default of every input and node output of the main graph.

        Tensors inside subgraphs and functions are not seen. About 512 MiB of tensors are held at once, in the child.
        """
        model = Path(model)
        tensors = list(tensors) if tensors is not None else _tensors(model)
        _require(model, tensors)
        found: dict[str, float] = {}
        for feeds in feeds_list:
            for name, array in feeds.items():
                if worker.is_float(array):
                    found[name] = max(found.get(name, 0.0), worker.max_finite(array))
        inner = [name for name in tensors if name not in found]
        request = {"op": "ranges", "tensors": inner, "budget": RANGES_BUDGET}
        answer = self._with_files(model, feeds_list, lambda files: self._tidily(model, {**request, "feeds": files}, progress), lambda a: a)
        wanted = set(tensors)
        return {name: top for name, top in {**found, **answer}.items() if name in wanted}

    def kinds(self, model: Path, feeds: Feeds, tensors: Sequence[str]) -> dict[str, Kind]:
        """What each of `tensors` of the main graph is for these feeds; sequences and maps are left out."""
        request = {"op": "kinds", "tensors": list(tensors)}
        answer = self._with_files(Path(model), [feeds], functools.partial(self._one, Path(model), request), lambda a: a)
        return {name: Kind.of(*about) for name, about in answer.items()}

    def truth_start(self, model: Path, feeds: Feeds, tensors: Sequence[str]) -> None:
        """Begins an evaluation of `model` in float64 (see `double`), which `truth` goes on with: every one of `tensors`, once, in order.

        The child holds what is still to be read, as any runtime does. OnnxfuseError: the model does not fit into memory.
        """
        request = {"op": "truth_start", "tensors": list(tensors)}
        self._with_files(Path(model), [feeds], functools.partial(self._one, Path(model), request), lambda a: a)

    def truth(self, model: Path, tensors: Sequence[str], decisions: Feeds) -> tuple[Outputs, dict[str, str]]:
        """The next of the tensors in float64, and why some have no truth. decisions: integers and booleans that the reference made of
        floats on the way; the evaluation follows them, as a float on the edge may fall either way.
        """
        request = {"op": "truth", "tensors": list(tensors)}
        read: Callable[[Any], Any] = lambda a: (self._outputs(a["values"]), a["missing"])  # noqa: E731
        answer: tuple[Outputs, dict[str, str]] = self._with_files(
            Path(model), [decisions], functools.partial(self._one, Path(model), request), read
        )
        return answer

    def truth_again(self, model: Path, name: str, inputs: Feeds) -> Any:
        """Tensor `name` in float64, computed by its node alone from these inputs; None where they are not all that it needs."""
        request = {"op": "truth_again", "tensors": [name]}
        read: Callable[[Any], Any] = lambda a: None if a is None else _read(a)  # noqa: E731
        return self._with_files(Path(model), [inputs], functools.partial(self._one, Path(model), request), read)

    # One request: files for the feeds, the question, the answer's files read and everything removed again.

    def _with_files(
        self, model: Path, feeds_list: Sequence[Feeds], ask: Callable[[list[dict[str, Any]]], Any], read: Callable[[Any], Any]
    ) -> Any:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="onnxfuse-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        try:
            files = [
                {n: worker.write_array(folder / f"in{i}_{k}.npy", a) for k, (n, a) in enumerate(f.items())}
                for i, f in enumerate(feeds_list)
            ]
            return read(ask(files))
        except OSError as error:
            raise OnnxfuseError(
                f"{folder}: cannot hold the tensors of {model.name} ({error.strerror or error}); free some space or set TMPDIR"
            ) from error
        finally:
            for left in folder.glob("*.npy"):
                left.unlink(missing_ok=True)

    def _one(self, model: Path, request: dict[str, Any], files: list[dict[str, Any]]) -> Any:
        return self._tidily(model, {**request, "feeds": files[0]})

    def _outputs(self, answer: dict[str, worker.Entry]) -> Outputs:
        return {name: _read(entry) for name, entry in answer.items()}

    def _tidily(self, model: Path, request: dict[str, Any], progress: Progress | None = None) -> Any:
        """Ask; where onnxruntime refuses repeated node names, ask again for a copy in which they are unique."""
        tidy = model in self._untidy
        try:
            return self._ask(model, request, tidy, progress)
        except OnnxfuseError as error:
            if tidy or "two nodes with same node name" not in str(error):
                raise
        self._untidy.add(model)
        return self._ask(model, request, True, progress)

    def _ask(self, model: Path, request: dict[str, Any], tidy: bool, progress: Progress | None) -> Any:
        child = self._start()
        evaluator = request.get("evaluator", ONNXRUNTIME)
        if evaluator != ONNX_REFERENCE:
            request = {**request, "tidy": tidy, "threads": self.threads}
        else:
            request = {**request, "tidy": False, "threads": 0}
        with contextlib.suppress(OSError):  # a child that is gone shows by its end of file below
            assert child.stdin is not None
            child.stdin.write(json.dumps({**request, "model": str(model.absolute())}) + "\n")
            child.stdin.flush()
        while True:
            try:
                line = self._answers.get(timeout=self.timeout)
            except queue.Empty:
                self._stop(patience=0.0)
                raise OnnxfuseError(
                    f"{model}: {evaluator} gave no answer within {self.timeout:g} s; use a smaller input (--dims) or a faster machine"
                ) from None
            if line is None:
                raise OnnxfuseError(f"{model}: {evaluator} {self._stop()}; run it alone to see more, or try a smaller input (--dims)")
            answer = json.loads(line)
            if "progress" in answer:
                if progress:
                    progress(*answer["progress"])
            elif "error" in answer:
                kind = CannotRun if answer["kind"] == "cannot" else OnnxfuseError
                verb = "cannot run it" if answer["kind"] == "cannot" else "failed on it"
                raise kind(f"{model}: {evaluator} {verb}: {answer['error']}")
            else:
                return answer["result"]

    def _start(self) -> subprocess.Popen[str]:
        if self._child is None:
            assert self._folder is not None
            with open(Path(self._folder.name) / "errors.txt", "w") as errors:
                self._child = subprocess.Popen(
                    [sys.executable, "-I", "-c", _START, self._folder.name, *sys.path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    encoding="utf-8",
                )
            self._answers = queue.Queue()
            threading.Thread(target=_pump, args=(self._child.stdout, self._answers), daemon=True).start()
        return self._child

    def _stop(self, patience: float = 2.0) -> str:
        """End the child, which ends by itself when its input does; after `patience` seconds it is killed. Says how it ended."""
        child, self._child = self._child, None
        if child is None:
            return "was not running"
        assert child.stdin is not None and self._folder is not None  # noqa: PT018
        with contextlib.suppress(OSError):
            child.stdin.write('{"op": "stop"}\n')
            child.stdin.flush()
        with contextlib.suppress(OSError):
            child.stdin.close()
        try:
            status = child.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        said = ""
        with contextlib.suppress(OSError):
            lines = (Path(self._folder.name) / "errors.txt").read_text(errors="replace").strip().splitlines()
            said = f": {lines[-1][:300]}" if lines else ""
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"crashed on it ({signal.Signals(-status).name}){said}"
        return f"stopped on it with status {status}{said}"


def run(model_path: Path, feeds_list: Sequence[Feeds], tensors: Sequence[str] | None = None, threads: int = 0) -> list[Outputs]:
    """`Runtime.run` in a child of its own."""
    with Runtime(threads) as runtime:
        return runtime.run(model_path, feeds_list, tensors)


def ranges(
    model_path: Path, feeds_list: Sequence[Feeds], tensors: Sequence[str] | None = None, progress: Progress | None = None
) -> dict[str, float]:
    """`Runtime.ranges` in a child of its own."""
    with Runtime() as runtime:
        return runtime.ranges(model_path, feeds_list, tensors, progress)


def describe(evaluator: str) -> str:
    """What stands in a report as the reference."""
    from importlib.metadata import version

    if evaluator == ONNX_REFERENCE:
        return f"onnx.reference of onnx {version('onnx')} (onnxruntime has no kernels for this model)"
    return f"onnxruntime {version('onnxruntime')}, CPU, optimizations off"


def _pump(pipe: Any, answers: queue.Queue[str | None]) -> None:
    with contextlib.suppress(ValueError, OSError), pipe:
        for line in pipe:
            answers.put(line)
    answers.put(None)


def _read(entry: worker.Entry) -> Any:
    if entry.get("none"):
        return None
    if "sequence" in entry:
        return [_read(item) for item in entry["sequence"]]
    array = np.load(entry["file"], allow_pickle=False)
    if array.dtype.name != entry["dtype"] and entry["dtype"] != "object":
        import ml_dtypes

        array = array.view(np.dtype(getattr(ml_dtypes, entry["dtype"])))
    return array.astype(object) if entry["dtype"] == "object" else array


def _tensors(model: Path) -> list[str]:
    return list(dict.fromkeys(name for node in skeleton(model).graph.node for name in node.output if name))


def _require(model: Path, tensors: Sequence[str]) -> None:
    graph = skeleton(model).graph
    have = {name for node in graph.node for name in node.output} | {v.name for v in (*graph.input, *graph.output)}
    missing = [name for name in tensors if name not in have]
    if missing:
        raise BadInput(f"{model}: no tensor {missing[0]!r} in its main graph; `onnxfuse explain` lists the names")
