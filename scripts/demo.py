"""The main job on a trained model, as `make demo` runs it: optimize, check, report, compile; build and time engines on a GPU.

Everything it does is a command that is printed before it runs, so that it can be typed again. Results go to demo/.
"""

from __future__ import annotations

import collections
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = Path("demo")
MODEL = Path("models/real/paraphrase-minilm.onnx")
FUSED = DEMO / "paraphrase-minilm.fused.onnx"
REPORT = DEMO / "optimize"
# Without a GPU here the plugin library is compiled for one that is common.
USUAL_GPU = "a100"


def main() -> int:
    os.chdir(ROOT)
    DEMO.mkdir(exist_ok=True)
    run(sys.executable, "models/fetch", MODEL.stem)
    run(sys.executable, "-m", "models.inputs", MODEL.stem, "-o", str(DEMO / "inputs"))
    can = json.loads(capture("doctor", "--json"))
    gpu = gpu_here(can)
    onnxfuse(
        *("optimize", str(MODEL), "-o", str(FUSED), "--policy", "all", "--data", str(DEMO / "inputs")),
        *("--report", f"{REPORT}.json", "--report", f"{REPORT}.html"),
    )
    onnxfuse("plugins", "build", "--gpu", "auto" if gpu else USUAL_GPU)
    engines = can["can"]["build-engine"]
    if engines["works"]:
        build_and_compare()
    summarise(gpu, engines["missing"])
    return 0


def build_and_compare() -> None:
    """The automatic and the fused engine in half precision, compared with onnxruntime and with each other."""
    half, shapes = DEMO / "paraphrase-minilm.fp16.onnx", "1x8..4x24..8x64"
    onnxfuse("optimize", str(MODEL), "-o", str(half), "--policy", "all", "--precision", "fp16", "--data", str(DEMO / "inputs"))
    options = [f"--shapes=input_ids:{shapes}", f"--shapes=attention_mask:{shapes}", f"--timing-cache={DEMO}/timing-cache"]
    onnxfuse("build-engine", str(half), "-o", str(DEMO / "automatic.engine"), "--no-plugins", *options)
    onnxfuse("build-engine", str(half), "-o", str(DEMO / "fused.engine"), *options)
    engines = [str(DEMO / "automatic.engine"), str(DEMO / "fused.engine")]
    onnxfuse("compare", str(MODEL), *engines, "--data", str(DEMO / "inputs"), "--report", str(DEMO / "compare"))


def gpu_here(can: dict) -> str | None:
    """The GPU's line in doctor's answer."""
    return next((finding["found"] for finding in can["findings"] if finding["name"] == "NVIDIA GPU" and finding["ok"]), None)


def summarise(gpu: str | None, missing: list[str]) -> None:
    """What was made, what was found and where to look."""
    report = json.loads(Path(f"{REPORT}.json").read_text())
    sites = collections.Counter(site["fusion"] for site in report["sites"] if site["decision"] == "fused")
    worst = max(output["max_abs"] for output in report["check"]["outputs"].values())
    print("\nWhat was made:")
    print(f"  {FUSED}   {report['nodes']['before']} nodes became {report['nodes']['after']}")
    print(f"  {REPORT}.html, {REPORT}.json   every site, every near miss, every output's error")
    print("What was found:")
    print(f"  fused: {', '.join(f'{count} {fusion}' for fusion, count in sorted(sites.items()))}")
    print(f"  onnxruntime gives the same as before: largest difference {worst:.2g} over {len(report['check']['outputs'])} outputs")
    if missing:
        print(f"No engine was built, for want of {', '.join(missing)}: `onnxfuse doctor` says how to get what is missing.")
    else:
        print(f"Engines were built and timed on {gpu}: {DEMO}/compare/")


def onnxfuse(*arguments: str) -> None:
    run(sys.executable, "-m", "onnxfuse", *arguments)


def run(*command: str) -> None:
    """Print and run one command; a failure ends the demo with its status."""
    text = shlex.join(command).replace(f"{sys.executable} -m onnxfuse", "onnxfuse").replace(sys.executable, "python")
    print(f"\n$ {text}", flush=True)
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


def capture(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "onnxfuse", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
