"""A text as tokens of a tokenizer's JSON file (`tokenizer.json` of the package `tokenizers`), in windows.

In the requester's own process; what travels is arrays of ids. A sample is a window of tokens, its labels the
tokens one further on. The end of the text is held out, as of text that is trained on byte by byte.
"""

from pathlib import Path
from typing import Any

import numpy as np

from node.content.datasets import TEXT_HELD_OUT
from node.errors import UsageError
from node.invocation import install_command

TEXT_BYTES_MAX = 1 << 31


def vocabulary_of(tokenizer: Path) -> int:
    """How many different ids a tokenizer gives. Raises UsageError."""
    return int(_load(tokenizer).get_vocab_size())


def tokenize(text: Path, tokenizer: Path, window: int, folder: Path) -> int:
    """Write `train.npz` and `test.npz` with x and y (N, window) into `folder`; returns how many
    tokens the text has.

    Raises:
        UsageError: no text, no tokenizer, or too few tokens for two windows.
    """
    known = _load(tokenizer)
    try:
        if text.stat().st_size > TEXT_BYTES_MAX:
            raise UsageError(f"{text}: more than {TEXT_BYTES_MAX >> 30} GiB of text")
        ids: list[int] = []
        with text.open(encoding="utf-8", errors="replace", newline="") as file:
            # A line at a time: what a tokenizer keeps of a whole text is many times its size.
            for line in file:
                ids += known.encode(line, add_special_tokens=False).ids
    except OSError as error:
        raise UsageError(f"{text}: {(error.strerror or str(error)).lower()}") from None
    count = (len(ids) - 1) // window
    if count < 2:
        raise UsageError(
            f"{text}: {len(ids)} tokens are too few for samples of {window}",
            "a longer text, or a smaller train.window",
        )
    kind: Any = np.uint16 if known.get_vocab_size() <= 1 << 16 else np.int32
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
