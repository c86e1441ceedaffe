"""What `onnxfuse bisect` tells the user, from its report."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onnxfuse.report.summary import visible

_KINDS = {
    "site": "wrong by itself",
    "together": "harmless alone, wrong together",
    "sum": "each within the limits but far above the others' rounding, and over the limits together",
    "group": "wrong at all of its sites",
    "rounding": "rounding adds up",
}
_SHOWN = 8  # of the sites that rounding adds up over


def show(report: Mapping[str, Any]) -> None:
    """Prints what was found."""
    for line in precision_lines(report) if "precision" in report else site_lines(report):
        print(line)


def headline(report: Mapping[str, Any]) -> str:
    """The verdict in one line, for a report that does not agree."""
    if "precision" in report:
        return _precision_headline(report)
    name, verdict = visible(report["other"]), report["verdict"]
    if verdict == "elsewhere":
        return f"{name}: disagrees with every site off, too ({times(report['baseline'])}): no fused site is at fault; {_elsewhere(report)}"
    if verdict == "rounding":
        return (
            f"{name}: no single site is wrong, rounding adds up: {times(report['figure'])}, {times(report['baseline'])} with every site off"
        )
    guilty = [words for cause in report["causes"] if cause["kind"] != "rounding" for words in _guilty(cause)]
    more = f" and {len(guilty) - 2} more" if len(guilty) > 2 else ""
    often = f" in {report['flips']} of {report['runs']} runs" if report["flips"] < report["runs"] else ""
    return f"{name}: disagrees{often} because of {visible(', '.join(guilty[:2]))}{more}"


def _guilty(cause: Mapping[str, Any]) -> list[str]:
    sites = cause["sites"]
    if cause["kind"] == "group":
        return [f"{sites[0]['group']}, at all {len(sites)} sites"]
    return [site["words"] for site in sites]


def times(figure: float) -> str:
    """A figure as a share of its limit."""
    if math.isnan(figure):
        return "not known"
    if math.isinf(figure):
        return "beyond any limit"
    return f"{figure:.3g} times the limit" if figure > 1 else f"{figure:.2g} of the limit"


def site_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """All that is told of sites."""
    count, where = report["sites"], report["backend"]
    name = visible(report["other"])
    if report["verdict"] == "agree":
        often = f" in {report['runs']} runs" if report["runs"] > 1 else ""
        sites = f"all of its {count} sites" if count > 1 else "its site" if count else "no site at all"
        yield f"{name}: agrees with {sites} on{often} ({times(report['figure'])}), in {where}"
        return
    yield f"{name}: {count} {'site' if count == 1 else 'sites'}, {report['tries']} tries in {where}"
    yield f"{times(report['figure'])} with all sites on, {times(report['baseline'])} with all off"
    yield f"the sites change the outputs by {times(report['apart'])}"
    if 0 < report["flips"] < report["runs"]:
        yield f"intermittent: {report['flips']} of {report['runs']} runs disagree; a set of sites is asked up to {report['repeats']} times"
    for cause in report["causes"]:
        yield from _cause_lines(cause)
    if report["verdict"] == "found":
        yield f"the other sites change them by {times(report['rest'])}"
    if not report["complete"]:
        yield "the limit on runs was reached: the set may be larger than it need be; allow more with --tries"
    if report["faults"]:
        yield f"{len(report['faults'])} sets could not be run, as: {visible(report['faults'][0])}"
    for crash in report["crashes"][:1]:
        yield f"{len(report['crashes'])} engines were built and failed, as: {visible(crash)}"
    yield from _remedies(report)


def _cause_lines(cause: Mapping[str, Any]) -> Iterator[str]:
    sites, alone = cause["sites"], cause["alone"]
    typical = f"; other sites: {times(cause['typical'])}" if cause["typical"] > 0 else ""
    often = f", in {cause['flips']} of {cause['runs']} runs" if cause["flips"] < cause["runs"] else ""
    yield f"- {_KINDS[cause['kind']]}: {times(cause['figure'])}{often}{typical}"
    shown = sites
    if cause["kind"] in ("rounding", "group"):
        known = [site for site in sites if not math.isnan(alone[site["name"]])]
        shown = sorted(known, key=lambda site: -alone[site["name"]])[:_SHOWN]
        if len(shown) < len(sites):
            yield f"    {len(shown)} of {len(sites)} sites{' of ' + sites[0]['group'] if cause['kind'] == 'group' else ''}:"
    for site in shown:
        yield f"    {visible(site['words'])}: {times(alone[site['name']])} alone"
        if site["replaced"] and cause["kind"] != "rounding":
            yield f"      stands for {visible(', '.join(site['replaced']))}"


def _remedies(report: Mapping[str, Any]) -> Iterator[str]:
    made = report["reproduction"]
    if made is not None:
        behind = f", with {made['steps']} steps of what reads it" if made["steps"] else ""
        whole, fused = made["nodes"]
        count = f"{whole} node{'' if whole == 1 else 's'}"
        yield f"reproduced by {count}, {fused} in the fused form{behind} ({times(made['figure'])}):"
        yield f"  {reproduction_command(report)}"
        if report["backend"] != "tensorrt" and any(len(site["fused"]) > 1 for cause in report["causes"] for site in cause["sites"]):
            yield "which of the fused nodes that hold together it is:"
            yield f"  {reproduction_command(report)} --layers"
    elif report["verdict"] == "found":
        yield "not reproduced: not even the whole model disagreed again"
    if report.get("plan"):
        policy = ["--policy", report["policy"]] if report["policy"] else []
        yield "leave it unfused:"
        yield f"  {shlex.join(['onnxfuse', 'optimize', report['model'], *policy, '--plan', report['plan']])}"


def reproduction_command(report: Mapping[str, Any]) -> str:
    """One line that shows the disagreement again."""
    made = report["reproduction"]
    if report["backend"] != "tensorrt":
        return shlex.join(["onnxfuse", "compare", made["original"], made["fused"], "--data", made["data"]])
    engine = str(Path(made["fused"]).with_suffix(".engine"))
    build = shlex.join(["onnxfuse", "build-engine", made["fused"], "-o", engine])
    return f"{build} && {shlex.join(['onnxfuse', 'compare', made['original'], engine, '--data', made['data']])}"


def _elsewhere(report: Mapping[str, Any]) -> str:
    half = {"float16": "fp16", "bfloat16": "bf16"}.get(report["limits"])
    if half:
        return f"half precision costs that; `onnxfuse bisect --precision {half}` finds what must stay in float32"
    if report["backend"] == "tensorrt":
        return "compare an engine without plugins with MODEL"
    return "does the model give the same outputs twice?"


# ---------------------------------------------------------------------------------------------------------- precision


def precision_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """All that is told of a precision."""
    name, half = visible(report["model"]), report["precision"]
    if report["verdict"] == "agree":
        yield f"{name}: agrees in {half} with all {report['nodes']} nodes converted ({times(report['figure'])}), in {report['evaluator']}"
        yield from _checked_lines(report)
        return
    yield f"{name} in {half}: {times(report['figure'])}; {report['tries']} tries over {report['nodes']} nodes, in {report['evaluator']}"
    if report["verdict"] != "found":
        return
    nodes = report["keep"]
    if report["diffuse"]:
        yield f"no few nodes are at fault: rounding adds up, and {len(nodes)} would have to stay in float32; the largest errors are of"
        nodes = sorted(nodes, key=lambda node: -report["alone"][node])[:_SHOWN]
    else:
        yield f"in float32 must stay {len(nodes)} nodes, which leaves {times(report['remaining'])}:"
    for node in nodes:
        yield f"    {visible(node)} ({report['operators'][node]}): {times(report['alone'][node])} alone"
    if not report["complete"]:
        yield "the limit on runs was reached: fewer may do; allow more with --tries"
    yield from _checked_lines(report)
    yield f"  {shlex.join(['onnxfuse', 'optimize', report['model'], *report['options']])}"


def _checked_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """What the check of `optimize` says, whose evaluators round elsewhere."""
    checked = report["checked"]
    if checked is None:
        return
    reasons = [f"{name}: {output['reason']}" for name, output in checked["outputs"].items() if not output["agrees"]]
    yield f"the check of optimize, with {checked['reference']}: {'disagrees: ' + visible(reasons[0]) if reasons else 'agrees'}"
    if reasons and checked["reference"].startswith("onnx.reference"):
        yield "  onnx.reference rounds inside operators, too: its LayerNormalization and Softmax sum in half precision, kernels in float32"


def _precision_headline(report: Mapping[str, Any]) -> str:
    name, half = visible(report["model"]), report["precision"]
    if report["verdict"] == "elsewhere":
        return f"{name}: disagrees in {half} with every node in float32, too; compare what `optimize` makes of it without --precision first"
    if report["diffuse"]:
        return (
            f"{name}: disagrees in {half}: rounding adds up over the model, and {len(report['keep'])} nodes would have to stay in float32"
        )
    return f"{name}: disagrees in {half}, unless {len(report['keep'])} of {report['nodes']} nodes stay in float32"
