"""The verdicts that ship with the package, made from rows of policy measure and only:FUSION of benchmarks/results, and from the chains
that were timed alone (GPU-elementwise-engines.json, made by tests/elementwise/gpu_run.py).

python -m benchmarks.verdicts            print them
python -m benchmarks.verdicts --write    write onnxfuse/plan/verdicts.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.suite import ROOT
from onnxfuse import gpus
from onnxfuse.bench.stats import Interval
from onnxfuse.graph.files import atomic
from onnxfuse.plan import store
from onnxfuse.plan.verdicts import DTYPES, ESTIMATE_MARGIN, Verdict, shape_class

FILE = ROOT / "onnxfuse" / "plan" / "verdicts.json"


def verdicts(data: results.Results) -> Iterator[Verdict]:
    """Those that a search found; and of a row that measured one fusion alone, agreed, and carries no mark, one for each class of shapes."""
    for row in data["rows"]:
        if "failed" in row:
            continue
        yield from map(Verdict.from_dict, row.get("verdicts", ()))
        fusion = row["policy"].removeprefix("only:")
        if fusion != row["policy"] and row["agrees"] and not row["marks"]:
            yield from _alone(fusion, row, data["machine"])


def _alone(fusion: str, row: results.Row, machine: Mapping[str, Any]) -> Iterator[Verdict]:
    for rows, width in sorted({shape_class(shape) for shape in row["site_shapes"].get(fusion, ())}):
        if not rows or not width:
            continue  # of a symbolic shape: a search says what it measured
        yield Verdict(
            fusion=fusion,
            model=row["name"],
            rows=rows,
            width=width,
            dtype=DTYPES.get(row["precision"], "float32"),
            gpu=gpus.resolve(machine["gpu"]).name,
            driver=row["measured"]["driver"],
            tensorrt=machine["tensorrt"],
            automatic_ms=Interval(**row["automatic_ms"]),
            fused_ms=Interval(**row["fused_ms"]),
            ratio=Interval(**row["ratio"]),
            date=row["measured"]["date"],
        )


def chains(data: results.Results) -> Iterator[Verdict]:
    """Of element-wise chains that were timed alone at the size of their model, agreed, and carry no mark; one for each form and class.

    A chain alone is more than a chain in its model, where TensorRT may merge it with what is around it: it won only where it won by the
    margin that an estimate needs, and what won by less says nothing. Of several chains of one form and class the most cautious counts.
    """
    found: dict[tuple[Any, ...], Verdict] = {}
    for row in data["rows"]:
        if row["site"] is None or not row["agrees"] or row["marks"]:
            continue
        rows, width = shape_class(row["site"])
        verdict = Verdict(
            fusion="elementwise",
            model=f"{row['model']} (the chain alone)",
            rows=rows,
            width=width,
            dtype=DTYPES[row["precision"]],
            gpu=gpus.resolve(data["machine"]["gpu"]).name,
            driver=data["machine"]["driver"],
            tensorrt=data["machine"]["tensorrt"],
            automatic_ms=Interval(**row["automatic_ms"]),
            fused_ms=Interval(**row["fused_ms"]),
            ratio=Interval(**row["ratio"]),
            date=data["machine"]["date"],
            variant=row["form"],
        )
        known = found.get(verdict.key)
        if known is None or verdict.ratio.low < known.ratio.low:
            found[verdict.key] = verdict
    yield from (one for one in found.values() if one.outcome != "won" or one.ratio.low >= ESTIMATE_MARGIN)


def text(folder: Path = results.FOLDER) -> str:
    """The content of the verdicts file, from every results file of `folder`."""
    found = [verdict for path in sorted(folder.glob("*-trt*.json")) for verdict in verdicts(results.load(path))]
    found += [verdict for path in sorted(folder.glob("*-elementwise-engines.json")) for verdict in chains(results.load(path))]
    return store.text(sorted(store.newest(found), key=lambda verdict: tuple(map(str, verdict.key))))


def main(argv: Sequence[str]) -> int:
    if list(argv) == ["--write"]:
        with atomic(FILE) as part:
            part.write_text(text(), encoding="utf-8")
        return 0
    print(text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
