"""A text as tokens of a tokenizer's JSON file (`tokenizer.json` of the package `tokenizers`), in windows.

In the requester's own process; what travels is arrays of ids. A sample is a window of tokens, its labels the
tokens one further on. The end of the text is held out, as of text that is trained on byte by byte.
"""

from array import array
from pathlib import Path
from typing import Any

import numpy as np

from node.content.datasets import TEXT_HELD_OUT
from node.errors import UsageError
from node.invocation import install_command

TEXT_BYTES_MAX = 1 << 31
IDS_MAX = 1 << 24
"""Ids of tokens: each is a row of the model's table of embeddings, and no vocabulary has so many."""


def vocabulary_of(tokenizer: Path) -> int:
    """Return how many rows a tokenizer's embeddings take: its highest id and one. Raises UsageError."""
    return _id_count(_load(tokenizer), tokenizer)


def _id_count(known: Any, tokenizer: Path) -> int:
    ids = known.get_vocab(with_added_tokens=True).values()
    if not ids:
        raise UsageError(f"{tokenizer}: a tokenizer without tokens")
    highest = max(ids)  # added tokens may have ids beyond their count
    if highest >= IDS_MAX:
        raise UsageError(f"{tokenizer}: a token has the id {highest:,}; at most {IDS_MAX - 1:,}")
    return int(highest) + 1


def tokenize(text: Path, tokenizer: Path, window: int, folder: Path) -> int:
    """Write `train.npz` and `test.npz` with x and y (N, window) into `folder`; returns how many
    tokens the text has.

    Raises:
        UsageError: no text, no tokenizer, or too few tokens for two windows.
    """
    known = _load(tokenizer)
    # A file of a model for sentences says where to cut and fill them; of a text all tokens count.
    known.no_truncation()
    known.no_padding()
    values = _id_count(known, tokenizer)
    kind: Any = np.uint16 if values <= 1 << 16 else np.int32
    ids = array("I")
    try:
        if text.stat().st_size > TEXT_BYTES_MAX:
            raise UsageError(f"{text}: more than {TEXT_BYTES_MAX >> 30} GiB of text")
        with text.open(encoding="utf-8-sig", newline="") as file:
            # A line at a time: what a tokenizer keeps of a whole text is many times its size.
            for line in file:
                ids.extend(known.encode(line, add_special_tokens=False).ids)
    except OSError as error:
        raise UsageError(f"{text}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{text}: not UTF-8: it has the byte {error.object[error.start]:#04x} where no letter has it",
            "save it as UTF-8",
        ) from None
    if ids and max(ids) >= values:
        raise UsageError(f"{tokenizer}: gives the id {max(ids):,}, which none of its tokens has")
    count = (len(ids) - 1) // window
    if count < 2:
        raise UsageError(
            f"{text}: {len(ids)} tokens are too few for samples of {window}",
            "a longer text, or a smaller train.window",
        )
    tokens = np.array(ids[: count * window + 1], kind)
    x, y = tokens[:-1].reshape(count, window), tokens[1:].reshape(count, window)
    kept = count - max(1, count // TEXT_HELD_OUT)
    for name, part in (("train", slice(0, kept)), ("test", slice(kept, count))):
        try:
            np.savez(folder / f"{name}.npz", x=x[part], y=y[part])
        except OSError as error:
            raise UsageError(f"{folder / name}.npz: {error.strerror or error}") from None
    return len(ids)


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            f"{path}: the package tokenizers, which reads it, is not installed", install_command("tokenizers")
        ) from None
    if not path.is_file():
        raise UsageError(f"{path}: no such file", "tokenizer is a tokenizer.json of the package tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself
        text = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: no tokenizer.json that can be read: {text}") from None
