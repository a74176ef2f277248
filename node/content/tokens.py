"""A text as tokens of a tokenizer's JSON file (`tokenizer.json` of the package `tokenizers`), in windows.

It runs in the fenced process that reads a source; only arrays of ids travel. A sample is a window of tokens;
its labels are the tokens one position later. The end of the text is held out, as for text learnt byte by
byte.
"""

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from node.content.datasets import TEXT_HELD_OUT
from node.content.model_folder import ModelFolder
from node.content.reading import SAMPLES_SHOWN, SourceReading, shown
from node.content.shards import PartName
from node.errors import UsageError
from node.invocation import install_command

Tell = Callable[[str], None]
Array = np.ndarray[Any, np.dtype[Any]]

TEXT_BYTES_MAX = 1 << 31
TOKENIZER_BYTES_MAX = 1 << 27
"""The size of a tokenizer.json: those of 256,000 tokens have 35 MB."""
IDS_MAX = 1 << 24
"""Token ids: each is a row of the model's embeddings, and no vocabulary is this large."""
LINE_BYTES_MAX = 1 << 24
"""Bytes tokenized at once: a line, cut if it is longer."""
_TOLD_BYTES = 1 << 22


class Language(msgspec.Struct, frozen=True):
    """The tokenizer of a text: a tokenizer.json, the folder of its model (empty for a built-in one), and the
    number of tokens in a sample (0: the model's or the data's)."""

    tokenizer: str
    folder: str = ""
    window: int = 0


class Tokens:
    """A loaded tokenizer, for a model or for none. Raises UsageError: it cannot be read, or does not fit the
    model."""

    def __init__(self, path: Path, model: ModelFolder | None = None) -> None:
        self.path = path
        self._known = load_tokenizer(path)
        # The file of a sentence model sets truncation and padding; in a text all tokens count.
        self._known.no_truncation()
        self._known.no_padding()
        ids = self._known.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise UsageError(f"{path}: a tokenizer without tokens")
        highest = int(max(ids))  # ids of added tokens may exceed their count
        if highest >= IDS_MAX:
            raise UsageError(f"{path}: a token has the id {highest:,}; at most {IDS_MAX - 1:,}")
        self.count = highest + 1
        """The rows of its embeddings."""
        self._rows = self.count
        self._model = model
        if model is not None and model.vocabulary:
            self._rows = model.vocabulary

    @property
    def dtype(self) -> Any:
        return np.uint16 if self._rows <= 1 << 16 else np.int32

    @property
    def package(self) -> Any:
        """Return the tokenizer object of the package `tokenizers`."""
        return self._known

    def encode(self, text: str, *, special: bool = False) -> Any:
        """Return the tokens of a text, with the tokenizer's surrounding special ones if `special`. Raises
        UsageError: ids that the model does not know, or a text that the tokenizer refuses."""
        try:
            found = self._known.encode(text, add_special_tokens=special)
        except Exception as error:  # the package raises Exception itself
            told = " ".join(str(error).split())[:200]
            raise UsageError(f"{self.path}: refuses {shown(text)}: {told}") from None
        self.check(found.ids)
        return found

    def check(self, ids: list[int]) -> None:
        """Raise UsageError for an id that the model or the tokenizer does not have."""
        if not ids or (highest := max(ids)) < self._rows:
            return
        if self._model is None:
            raise UsageError(f"{self.path}: gives the id {highest:,}, which none of its tokens has")
        raise UsageError(
            f"{self.path}: gives the id {highest:,} ({shown(self.token_of(highest))}), and the model"
            f" in {self._model.path} has {self._rows:,} tokens",
            "the tokenizer that belongs to the model; or model.resize_token_embeddings, and save it again",
        )

    def id_of(self, token: str) -> int:
        """Return the id of a token, -1 if there is none of this name."""
        found = self._known.token_to_id(token)
        return -1 if found is None else int(found)

    def token_of(self, number: int) -> str:
        return str(self._known.id_to_token(number) or "")

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of tokens; special ones only if `special`."""
        return str(self._known.decode(ids, skip_special_tokens=not special))

    def around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that it puts before and after a text."""
        bare, whole = self.encode("a").ids, self.encode("a", special=True).ids
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return [], []


def load_tokenizer(path: Path) -> Any:
    """Return what a tokenizer.json holds. Raises UsageError."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            f"{path}: the package tokenizers, which reads it, is not installed", install_command("tokenizers")
        ) from None
    if not path.is_file():
        raise UsageError(f"{path}: no such file", "tokenizer is a tokenizer.json of the package tokenizers")
    if path.stat().st_size > TOKENIZER_BYTES_MAX:
        raise UsageError(f"{path}: more than {TOKENIZER_BYTES_MAX >> 20} MiB, and no tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself
        text = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: no tokenizer.json that can be read: {text}") from None


def read_windows(
    text: Path, known: Tokens, window: int, reading: SourceReading, tell: Tell
) -> dict[PartName, dict[str, Array]]:
    """Return a text's tokens in windows, x and y (N, window) of each part. Raises UsageError: no text, or too
    few tokens for two windows. OSError."""
    size = text.stat().st_size
    if size > TEXT_BYTES_MAX:
        raise UsageError(f"{text}: more than {TEXT_BYTES_MAX >> 30} GiB of text")
    # Arrays of the transfer type: a list of Python numbers takes eight times as much.
    ids = array("H" if known.dtype is np.uint16 else "i")
    done = told = 0
    try:
        with text.open(encoding="utf-8-sig", newline="") as file:
            # A line at a time: a tokenizer's state for a whole text is many times its size.
            while line := file.readline(LINE_BYTES_MAX):
                if "\0" in line:
                    raise UsageError(f"{text}: no text in UTF-8: it has bytes that are 0", "save it as UTF-8")
                ids.extend(known.encode(line).ids)
                done += len(line)
                if done - told > _TOLD_BYTES:
                    told = done
                    tell(f"{done / 1e6:,.0f} of {size / 1e6:,.0f} MB of text, {len(ids):,} tokens")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{text}: not UTF-8: it has the byte {error.object[error.start]:#04x} where no letter has it",
            "save it as UTF-8",
        ) from None
    count = (len(ids) - 1) // window
    if count < 2:
        raise UsageError(
            f"{text}: {len(ids)} tokens are too few for samples of {window}",
            "a longer text, or a smaller train.window",
        )
    tokens = np.frombuffer(ids, known.dtype)[: count * window + 1]
    x, y = tokens[:-1].reshape(count, window), tokens[1:].reshape(count, window)
    kept = count - max(1, count // TEXT_HELD_OUT)
    reading.form = f"text, {len(ids):,} tokens of {known.path}, in windows of {window}"
    reading.label = "the tokens one further on"
    reading.window, reading.vocabulary = window, known.count
    rest = len(ids) - count * window - 1
    reading.notes.append(
        f"test: the last {count - kept:,} of {count:,} windows; they follow without gap or padding"
        + (f"; {rest} tokens at the end fill none" if rest else "")
    )
    reading.samples = [
        shown(" ".join(known.decode(x[row].tolist(), special=True).split()))
        for row in range(min(SAMPLES_SHOWN, kept))
    ]
    return {"train": {"x": x[:kept], "y": y[:kept]}, "test": {"x": x[kept:], "y": y[kept:]}}
