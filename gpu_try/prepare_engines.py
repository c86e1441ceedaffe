"""prepare_engines.py BATCH FOLDER: the float32 model of engine/skeleton.onnx, then FOLDER/b{BATCH}.auto.onnx and .fused.onnx as TensorRT's parser takes them (float16 inside)."""
import collections, sys, time
from pathlib import Path
HERE = Path(__file__).resolve().parent; sys.path[:0] = [str(HERE), *([] if (HERE / "src").exists() else [str(HERE.parent)])]
from expand import expand

def main(batch, folder):
    import onnx
    from onnxfuse import pipeline, plugins  # noqa
    from onnxfuse.engine import prepare
    t0 = time.time(); folder.mkdir(parents=True, exist_ok=True); src = folder / f"b{batch}.onnx"; expand(HERE / "engine" / "skeleton.onnx", src, batch)
    for kind, policy in (("fused", "all"), ("auto", "none")):
        out = folder / f"b{batch}.{kind}.tmp.onnx"; pipeline.optimize(src, out, policy=policy, precision="fp16", ranges={}, check=False)
        (folder / f"b{batch}.{kind}.onnx").write_bytes(prepare.for_parser(out, plugins.PLUGIN_OPS if kind == "fused" else frozenset()))
        print(kind, dict(collections.Counter(n.op_type for n in onnx.load(out).graph.node)), f"{time.time() - t0:.1f} s", flush=True)
if __name__ == "__main__": main(int(sys.argv[1]), Path(sys.argv[2]))
