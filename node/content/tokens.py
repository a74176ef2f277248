"""Text as tokens, in windows; the tokenizer is a JSON file (`tokenizer.json` of the package `tokenizers`).

This runs in the sandboxed process that reads a source, and only arrays of ids leave that process. A sample is
a window of tokens, and its labels are the same tokens shifted by one position. The end of the text is held
out, as for text that is learnt byte by byte.
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
"""Maximum size of a tokenizer.json. Tokenizers with 256,000 tokens take 35 MB."""
IDS_MAX = 1 << 24
"""Upper limit on token ids. Each id is a row of the model's embeddings, and no vocabulary is this large."""
LINE_BYTES_MAX = 1 << 24
"""Maximum number of bytes tokenized in one call: one line, split if it is longer."""
_TOLD_BYTES = 1 << 22


class Language(msgspec.Struct, frozen=True):
    """The tokenizer of a text. `tokenizer` is a tokenizer.json, `folder` the folder of its model (empty for a
    built-in one), and `window` the number of tokens in a sample (0: use the model's or the data's)."""

    tokenizer: str
    folder: str = ""
    window: int = 0


class Tokens:
    """A loaded tokenizer, with or without a model that it must fit. Raises UsageError if it cannot be read or
    does not fit the model."""

    def __init__(self, path: Path, model: ModelFolder | None = None) -> None:
        self.path = path
        self._known = load_tokenizer(path)
        # The tokenizer file of a sentence model enables truncation and padding. For training text, all tokens
        # count.
        self._known.no_truncation()
        self._known.no_padding()
        ids = self._known.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise UsageError(f"{path}: a tokenizer without tokens")
        highest = int(max(ids))  # ids of added tokens may exceed their count
        if highest >= IDS_MAX:
            raise UsageError(f"{path}: a token has the id {highest:,}; at most {IDS_MAX - 1:,}")
        self.count = highest + 1
        """Number of rows that the embeddings need."""
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
        """Return the tokens of a text; if `special`, with the special tokens that the tokenizer puts around
        it. Raises UsageError if the model does not know an id, or the tokenizer refuses the text."""
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
            f"{self.path}: gives the id {highest:,} ({shown(self.token_of(highest))}), "
            f"but the model in {self._model.path} has {self._rows:,} tokens",
            "use the model's own tokenizer; or call model.resize_token_embeddings and save the model again",
        )

    def id_of(self, token: str) -> int:
        """Return the id of a token, or -1 if no token has this name."""
        found = self._known.token_to_id(token)
        return -1 if found is None else int(found)

    def token_of(self, number: int) -> str:
        return str(self._known.id_to_token(number) or "")

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Return the text of tokens. Special tokens are included only if `special`."""
        return str(self._known.decode(ids, skip_special_tokens=not special))

    def around(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that the tokenizer puts before and after a text."""
        bare, whole = self.encode("a").ids, self.encode("a", special=True).ids
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        return [], []


def load_tokenizer(path: Path) -> Any:
    """Load a tokenizer.json. Raises UsageError."""
    try:
        import tokenizers
    except ImportError:
        raise UsageError(
            f"{path}: the package tokenizers, which reads it, is not installed", install_command("tokenizers")
        ) from None
    if not path.is_file():
        raise UsageError(
            f"{path}: no such file", "set tokenizer to a tokenizer.json of the package tokenizers"
        )
    if path.stat().st_size > TOKENIZER_BYTES_MAX:
        raise UsageError(f"{path}: more than {TOKENIZER_BYTES_MAX >> 20} MiB, so it is not a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises Exception itself
        text = " ".join(str(error).split())[:200]
        raise UsageError(f"{path}: is not a readable tokenizer.json: {text}") from None


def read_windows(
    text: Path, known: Tokens, window: int, reading: SourceReading, tell: Tell
) -> dict[PartName, dict[str, Array]]:
    """Return a text's tokens in windows: x and y (N, window) of each part. Raises UsageError if it is not
    text, or has too few tokens for two windows; OSError if it cannot be read."""
    size = text.stat().st_size
    if size > TEXT_BYTES_MAX:
        raise UsageError(f"{text}: more than {TEXT_BYTES_MAX >> 30} GiB of text")
    # An array of the transfer type: a list of Python numbers takes eight times as much memory.
    ids = array("H" if known.dtype is np.uint16 else "i")
    done = told = 0
    try:
        with text.open(encoding="utf-8-sig", newline="") as file:
            # Tokenize line by line: the tokenizer's state for a whole text would be many times as large as
            # the text.
            while line := file.readline(LINE_BYTES_MAX):
                if "\0" in line:
                    raise UsageError(
                        (f"{text}: not text in UTF-8: it has bytes that are 0"), "save it as UTF-8"
                    )
                ids.extend(known.encode(line).ids)
                done += len(line)
                if done - told > _TOLD_BYTES:
                    told = done
                    tell(f"{done / 1e6:,.0f} of {size / 1e6:,.0f} MB of text, {len(ids):,} tokens")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{text}: not UTF-8: it has an invalid byte {error.object[error.start]:#04x}",
            "save it as UTF-8",
        ) from None
    count = (len(ids) - 1) // window
    if count < 2:
        raise UsageError(
            f"{text}: {len(ids)} tokens are too few for samples of {window}",
            "use a longer text, or set a smaller train.window",
        )
    tokens = np.frombuffer(ids, known.dtype)[: count * window + 1]
    x, y = tokens[:-1].reshape(count, window), tokens[1:].reshape(count, window)
    kept = count - max(1, count // TEXT_HELD_OUT)
    reading.form = f"text, {len(ids):,} tokens of {known.path}, in windows of {window}"
    reading.label = "the same tokens, shifted by one"
    reading.window, reading.vocabulary = window, known.count
    rest = len(ids) - count * window - 1
    reading.notes.append(
        f"test: the last {count - kept:,} of {count:,} windows; windows have no gaps and no padding"
        + (f"; {rest} tokens at the end do not fill a window" if rest else "")
    )
    reading.samples = [
        shown(" ".join(known.decode(x[row].tolist(), special=True).split()))
        for row in range(min(SAMPLES_SHOWN, kept))
    ]
    return {"train": {"x": x[:kept], "y": y[:kept]}, "test": {"x": x[kept:], "y": y[kept:]}}
