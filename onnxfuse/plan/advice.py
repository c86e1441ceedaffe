"""Which fusions still earn their place, by the verdicts at hand: pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from onnxfuse.plan.verdicts import Verdict, release


@dataclass(frozen=True)
class Advice:
    """What to do about a fusion, on one GPU or everywhere (gpu None).

    kind: "keep", "retire" (it has stopped winning), "leave" (it never won), "measure" (what had won was not measured again),
    "unknown" (this version of onnxfuse has no such fusion).
    """

    fusion: str
    gpu: str | None
    kind: str
    text: str


def advise(verdicts: Iterable[Verdict], fusions: Collection[str]) -> tuple[Advice, ...]:
    """Advice for every fusion that there are verdicts of; `fusions` are those that this version has."""
    by_fusion: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_fusion.setdefault(verdict.fusion, []).append(verdict)
    return tuple(advice for name, of in sorted(by_fusion.items()) for advice in _of_fusion(name, of, fusions))


def _of_fusion(name: str, verdicts: Sequence[Verdict], fusions: Collection[str]) -> Iterable[Advice]:
    if name not in fusions:
        text = f"no such fusion in this version: retired or renamed; `onnxfuse verdicts forget --fusion {name}` removes its verdicts"
        return (Advice(name, None, "unknown", text),)
    if not any(verdict.outcome == "won" for verdict in verdicts):
        text = f"never won anywhere, in {_measured(len(verdicts))}: leave it to TensorRT"
        return (Advice(name, None, "leave", text),)
    return [_on_gpu(name, gpu, [v for v in verdicts if v.gpu == gpu]) for gpu in sorted({verdict.gpu for verdict in verdicts})]


def _on_gpu(name: str, gpu: str, verdicts: Sequence[Verdict]) -> Advice:
    """By the newest TensorRT: an older one says what had been won before."""
    last = max(release(verdict.tensorrt) for verdict in verdicts)
    now = [verdict for verdict in verdicts if release(verdict.tensorrt) == last]
    won = sum(verdict.outcome == "won" for verdict in now)
    before = [verdict for verdict in verdicts if verdict not in now and verdict.outcome == "won"]
    version = ".".join(map(str, last))
    if won:
        return Advice(name, gpu, "keep", f"wins {won} of {len(now)} on {gpu} with TensorRT {version}: it earns its place there")
    if not before:
        return Advice(name, gpu, "leave", f"never won on {gpu}, in {_measured(len(verdicts))}: leave it to TensorRT there")
    newest = max(before, key=lambda verdict: release(verdict.tensorrt)).tensorrt
    again = {verdict.shape for verdict in now}
    if any(verdict.shape in again for verdict in before):
        text = f"won on {gpu} with TensorRT {newest}, and nothing any more with {version}: retire it there"
        return Advice(name, gpu, "retire", text)
    text = f"won on {gpu} with TensorRT {newest}, at shapes that were not measured again with {version}: measure them"
    return Advice(name, gpu, "measure", text)


def _measured(count: int) -> str:
    return f"{count} measurement{'' if count == 1 else 's'}"
