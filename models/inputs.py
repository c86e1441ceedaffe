"""Inputs that make the trained models' outputs move: two shapes each, the same on every machine.

    python -m models.inputs paraphrase-minilm -o FOLDER     writes FOLDER/paraphrase-minilm-0.npz and -1.npz

Noise is no input: the text detector answers below 1e-4 on it, so any tolerance would pass a wrong rewrite. Sentences
are real (models/tokenise.py says from where); pictures, pages, sounds and signals are drawn here from formulas, seeded.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

TOKENS = Path(__file__).resolve().parent / "inputs"

Feeds = dict[str, np.ndarray]


def feeds(name: str) -> list[Feeds]:
    """The two inputs of a model of models/catalog.py, by input name."""
    return MAKERS[name]()


def _tokens(name: str) -> Callable[[], list[Feeds]]:
    """One sentence, and four of different length with padding: int64 [batch, sequence]."""

    def load() -> list[Feeds]:
        loaded = []
        for number in (0, 1):
            with np.load(TOKENS / f"{name}-{number}.npz") as file:
                loaded.append({key: file[key] for key in file.files})
        return loaded

    return load


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """A landscape-like picture: sky, hills, a sun, a house, fine texture. float32 [3, height, width] in 0..1."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / np.array([height, width]).reshape(2, 1, 1)
    image = np.stack([0.45 + 0.3 * y, 0.6 + 0.25 * y, 0.95 - 0.15 * y])
    for level, colour in ((0.45, (0.35, 0.45, 0.55)), (0.6, (0.25, 0.45, 0.25)), (0.78, (0.2, 0.35, 0.12))):
        waves = sum(rng.uniform(0.02, 0.06) * np.sin(x * rng.uniform(4, 16) + rng.uniform(0, 6)) for _ in range(3))
        image = np.where(y > level + waves, np.array(colour).reshape(3, 1, 1), image)
    sun = (x - rng.uniform(0.2, 0.8)) ** 2 + (y - 0.2) ** 2 < 0.006
    image = np.where(sun, np.array([1.0, 0.95, 0.7]).reshape(3, 1, 1), image)
    left = rng.uniform(0.15, 0.6)
    house = (abs(x - left - 0.09) < 0.09) & (abs(y - 0.68) < 0.09)
    roof = (abs(x - left - 0.09) < 0.12 - (0.59 - y) * 1.2) & (y < 0.59) & (y > 0.49)
    image = np.where(house, np.array([0.85, 0.8, 0.7]).reshape(3, 1, 1), image)
    image = np.where(roof, np.array([0.6, 0.15, 0.1]).reshape(3, 1, 1), image)
    return np.clip(image + rng.normal(0, 0.02, image.shape), 0, 1).astype(np.float32)


def _vit() -> list[Feeds]:
    """Pictures with ImageNet's normalisation: float32 [1 or 2, 3, 224, 224]."""
    mean, deviation = (np.array(v, np.float32).reshape(3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pictures = [(picture(224, 224, seed) - mean) / deviation for seed in range(3)]
    return [{"input_image": np.stack(pictures[:1])}, {"input_image": np.stack(pictures[1:])}]


def page(height: int, width: int, lines: int, seed: int) -> np.ndarray:
    """Lines of dark glyph-like strokes on white paper. float32 [3, height, width] in -1..1 (PP-OCR's normalisation)."""
    rng = np.random.default_rng(seed)
    paper = np.ones((height, width))
    pitch = height // lines
    size = max(int(pitch * 0.6), 6)
    stroke = max(size // 8, 1)
    for line in range(lines):
        top = line * pitch + (pitch - size) // 2
        left = size // 2
        while left + size < width:
            if rng.random() > 0.15:  # else: a gap between words
                _glyph(paper[top : top + size, left : left + int(size * 0.7)], stroke, rng)
            left += int(size * 0.8)
    paper += rng.normal(0, 0.01, paper.shape)
    return np.broadcast_to(np.clip(paper, 0, 1) * 2 - 1, (3, height, width)).astype(np.float32)


def _glyph(cell: np.ndarray, stroke: int, rng: np.random.Generator) -> None:
    """Draw a few strokes into the cell, in place: stems, bars and a diagonal, as Latin capitals have."""
    height, width = cell.shape
    stems, bars = rng.random(3) < 0.55, rng.random(3) < 0.5
    stems[rng.integers(3)] = True
    for on, centre in zip(stems, (0, (width - stroke) // 2, width - stroke), strict=True):
        if on:
            cell[:, centre : centre + stroke] = 0.08
    for on, centre in zip(bars, (0, (height - stroke) // 2, height - stroke), strict=True):
        if on:
            cell[centre : centre + stroke, :] = 0.08
    if rng.random() < 0.3:
        y, x = np.mgrid[0:height, 0:width]
        cell[abs(x * height - y * width) < stroke * height * 0.7] = 0.08


def _ocr_page() -> list[Feeds]:
    return [{"x": page(320, 320, 6, 0)[None]}, {"x": np.stack([page(192, 416, 4, seed) for seed in (1, 2)])}]


def _ocr_line(width: int) -> Callable[[], list[Feeds]]:
    def make() -> list[Feeds]:
        batch = np.stack([page(48, width // 2, 1, 4), page(48, width // 2, 1, 5)[:, ::-1, ::-1]])
        return [{"x": page(48, width, 1, 3)[None]}, {"x": np.ascontiguousarray(batch)}]

    return make


def voice(samples: int, rate: int, seed: int) -> np.ndarray:
    """A voice-like sound: glottal pulses through three moving formants, in syllables. float32 [samples] in -1..1."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / rate
    pitch = 120 + 25 * np.sin(2 * np.pi * 1.7 * time + rng.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    sound = np.zeros(samples)
    formants = [(500, 200), (1500, 300), (2500, 300)]
    for harmonic in range(1, int(rate / 2 / 150)):
        frequency = harmonic * pitch
        gain = sum(np.exp(-(((frequency - f * (1 + 0.2 * np.sin(5 * time))) / w) ** 2)) for f, w in formants)
        sound += (gain + 0.02) / harmonic**0.5 * np.sin(harmonic * phase)
    syllables = np.clip(np.sin(2 * np.pi * 2.2 * time + 0.6), 0, 1) ** 0.5
    sound = sound / abs(sound).max() * syllables * 0.6
    return (sound + rng.normal(0, 0.003, samples)).astype(np.float32)


def _aecmos() -> list[Feeds]:
    """Log spectrograms of far end, microphone with echo, cleaned signal: float32 [1, 3, frames, 160]; h0 [4, 1, 64]."""

    def spectra(frames: int, seed: int) -> Feeds:
        far, near = (voice(frames * 160 + 160, 16000, seed + k) for k in (0, 1))
        microphone = near + 0.4 * np.roll(far, 400)
        images = []
        for signal in (far, microphone, near):
            windows = np.lib.stride_tricks.sliding_window_view(signal, 320)[::160][:frames] * np.hanning(320)
            power = abs(np.fft.rfft(windows, axis=1))[:, :160] ** 2
            images.append(np.clip((10 * np.log10(power + 1e-7) + 30) / 40, -1, 1.5))
        return {"input": np.stack(images)[None].astype(np.float32), "h0": np.zeros((4, 1, 64), np.float32)}

    return [spectra(100, 0), spectra(150, 10)]


def _silero() -> list[Feeds]:
    """512 samples behind 64 of context at 16 kHz, and a batch of two at 8 kHz (256 behind 32), mid-syllable."""
    at16, at8 = voice(16000, 16000, 0), voice(8000, 8000, 1)
    state = np.random.default_rng(0).normal(0, 0.2, (2, 2, 128)).astype(np.float32)
    return [
        {"input": at16[2000:2576][None], "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000, np.int64)},
        {"input": np.stack([at8[1000:1288], at8[5000:5288]]), "state": state, "sr": np.array(8000, np.int64)},
    ]


def _spindle() -> list[Feeds]:
    """30 s of EEG-like signal at 250 Hz with spindles (13 Hz bursts) and band powers of 15 frequencies around them."""

    def record(seed: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(seed)
        time = np.arange(7500) / 250
        spectrum = np.fft.rfft(rng.normal(0, 1, 7500))
        signal = np.fft.irfft(spectrum / np.maximum(np.fft.rfftfreq(7500, 1 / 250), 0.5), 7500)
        signal /= signal.std()
        for centre in rng.uniform(2, 28, 5):
            signal += 2.0 * np.exp(-(((time - centre) / 0.45) ** 2)) * np.sin(2 * np.pi * 13 * time)
        signal = (signal - signal.mean()) / signal.std()
        bands = []
        for frequency in np.linspace(6, 20, 15):
            kernel = np.exp(2j * np.pi * frequency * np.arange(-125, 126) / 250) * np.hanning(251)
            bands.append(abs(np.convolve(signal, kernel, mode="same")))
        image = np.stack(bands)
        return signal[None], (image - image.mean()) / image.std()

    records = [record(seed) for seed in range(3)]
    batches = (records[:1], records[1:])
    return [
        {
            "raw_signal": np.stack([r[0] for r in batch]).astype(np.float32),
            "spectrogram": np.stack([r[1] for r in batch]).astype(np.float32),
        }
        for batch in batches
    ]


def _deepfilternet() -> list[Feeds]:
    """Encoder features as ReLU layers leave them (non-negative, smooth in time): float32 [1, 64, frames, bands]."""

    def features(frames: int, seed: int) -> Feeds:
        rng = np.random.default_rng(seed)

        def smooth(*shape: int, axis: int) -> np.ndarray:
            steps = np.cumsum(rng.normal(0, 0.3, shape), axis=axis) + rng.normal(0, 0.5, shape)
            return np.tanh(steps).astype(np.float32)

        widths = {"e0": 32, "e1": 16, "e2": 8, "e3": 8}
        maps = {name: np.maximum(smooth(1, 64, frames, width, axis=2), 0) for name, width in widths.items()}
        return {"emb": smooth(1, frames, 512, axis=1), **maps}

    return [features(32, 0), features(50, 1)]


def _terrain() -> list[Feeds]:
    """Hills (1/f noise) under Gaussian noise of strength sigma: float32 [1 or 2, 1, 128, 128]."""

    def noisy(sigma: float, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        distance = np.hypot(np.fft.fftfreq(128)[:, None], np.fft.fftfreq(128)[None, :])
        hills = np.fft.ifft2(np.fft.fft2(rng.normal(0, 1, (128, 128))) / np.maximum(distance, 1 / 128) ** 1.8).real
        return (hills / hills.std() * 0.5 + rng.normal(0, sigma, (128, 128)))[None].astype(np.float32)

    sigmas, difficulties = np.array([0.5, 0.2, 2.0], np.float32), np.array([0.5, 0.1, 0.9], np.float32)
    fields = np.stack([noisy(float(sigma), seed) for seed, sigma in enumerate(sigmas)])
    parts = (slice(0, 1), slice(1, 3))
    return [{"noisy": fields[part], "sigma": sigmas[part], "difficulty": difficulties[part]} for part in parts]


MAKERS: dict[str, Callable[[], list[Feeds]]] = {
    "vit-s-focus": _vit,
    "paraphrase-minilm": _tokens("paraphrase-minilm"),
    "ppocr-rec": _ocr_line(320),
    "ppocr-det": _ocr_page,
    "ppocr-cls": _ocr_line(192),
    "aecmos": _aecmos,
    "silero-vad": _silero,
    "eeg-spindle": _spindle,
    "t5-encoder-int8": _tokens("t5-encoder-int8"),
    "deepfilternet-erb": _deepfilternet,
    "terrain-unet": _terrain,
    "minilm-int8": _tokens("minilm-int8"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m models.inputs", description="Write inputs as .npz files.")
    parser.add_argument("name", choices=sorted(MAKERS), metavar="NAME", help="a model of `models/fetch --list`")
    parser.add_argument("-o", "--output", type=Path, default=Path(), help="folder for the files (default: here)")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for number, inputs in enumerate(feeds(arguments.name)):
        path = arguments.output / f"{arguments.name}-{number}.npz"
        np.savez(path, **inputs)
        print(path, *(f"{name}{list(value.shape)}" for name, value in inputs.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
