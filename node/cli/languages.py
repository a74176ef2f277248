"""The tokenizer of a RUN.toml's text, and the number of tokens in a sample.

A Hugging Face folder uses its own tokenizer, unless the key `tokenizer` gives another; such a model never
learns bytes. The length of a sample is `train.window`, otherwise `length` of `[options]`, otherwise the
model's maximum (for records, the length of the longest one).
"""

from pathlib import Path

from node.content.datasets import DIGITS_NAME
from node.content.model_folder import LENGTH_MAX, ModelFolder, is_model_folder, read_model_folder
from node.content.npz import BadArchive, read_layouts
from node.content.reading import unclear
from node.content.records import LINES, SUFFIXES
from node.content.sources import SCHEMES
from node.content.tokens import Language
from node.errors import UsageError
from node.protocols.run_file import RunFile
from node.runs.manifest_builder import WINDOW

LENGTH = "length"
"""The option of a folder's model that sets the number of tokens in a sample."""
_ARRAYS = (".npz", ".safetensors")
_BYTE_VOCABULARY_MAX = 512
"""Maximum vocabulary of a byte model: 256 bytes and some special tokens."""
_SAVE_TOKENIZER = (
    'AutoTokenizer.from_pretrained("FOLDER").save_pretrained("FOLDER") of transformers writes it'
)


def model_folder_of(run_file: RunFile, base: Path) -> ModelFolder | None:
    """Return the run's model folder if its model is a Hugging Face folder. Raises UsageError."""
    path = base / Path(run_file.model).expanduser()
    return read_model_folder(path) if is_model_folder(path) else None


def length_of(run_file: RunFile, name: str) -> int:
    """Return the number of tokens in a sample according to the run's settings, or 0 if they do not set it.
    Raises UsageError."""
    window, length = run_file.train.window, run_file.options.get(LENGTH, 0)
    length = length if isinstance(length, int) else 0
    if window and length and window != length:
        raise UsageError(
            f"{name}: train.window is {window}, and options.{LENGTH} is {length}",
            f"leave options.{LENGTH} out: the window sets it",
        )
    return window or length


def language_of(run_file: RunFile, base: Path, name: str) -> Language | None:
    """Return the tokenizer of the run's data, or None if the data is not text, or is learnt as bytes. Raises
    UsageError if the tokenizer is ambiguous, or does not fit the model."""
    source, keys = run_file.source, run_file.data_keys
    suffix = Path(source).suffix.lower()
    path = base / Path(source).expanduser()
    model = model_folder_of(run_file, base)
    is_text = source != DIGITS_NAME and ".py:" not in source and suffix not in _ARRAYS
    if not is_text or keys.form == "table" or path.is_dir():
        if run_file.tokenizer and ".py:" not in source:  # for a function, `check_keys` reports it
            raise UsageError(
                f"{name}: tokenizer: has no effect on {source}, which is not text", "leave tokenizer out"
            )
        return None
    if model is None or not model.is_of_text:
        if suffix in LINES and keys.form != "bytes":
            raise unclear(
                path,
                "records are read for the model of a Hugging Face folder, which has a tokenizer; for"
                f" {run_file.model!r} it may be a text by its bytes",
                keys,
                {"form": "bytes"},
            )
        if not run_file.tokenizer:
            return None
        return Language(_path(base, run_file.tokenizer), "", run_file.train.window or WINDOW)
    if keys.form == "bytes":
        return None
    window = length_of(run_file, name)
    if window > model.length_max and model.is_own_length:
        key = "train.window" if run_file.train.window else f"options.{LENGTH}"
        raise UsageError(
            f"{name}: {key} {window}: the model takes {model.length_max} tokens at most",
            f"{key} = {model.length_max}",
        )
    is_of_records = suffix in SUFFIXES and (path.is_file() or source.startswith(SCHEMES))
    if not run_file.tokenizer and not model.tokenizer.is_file():
        if not is_of_records and model.vocabulary <= _BYTE_VOCABULARY_MAX:
            return None  # a byte model
        what = f"the model in {model.path} knows {model.vocabulary:,} tokens, and there is no tokenizer.json"
        if is_of_records:
            raise UsageError(f"{name}: {what}", _SAVE_TOKENIZER)
        raise unclear(path, f"{what}: {_SAVE_TOKENIZER}; or bytes are its tokens", keys, {"form": "bytes"})
    tokenizer = _path(base, run_file.tokenizer) if run_file.tokenizer else str(model.tokenizer)
    if not is_of_records:
        window = window or min(model.length_max, LENGTH_MAX)
    return Language(tokenizer, str(model.path), window)


def sample_length(run_file: RunFile, base: Path, name: str) -> int:
    """Return the number of tokens in the samples of existing arrays or text, which is the length for which a
    folder's model is captured. Return 0 if the data has no tokens. Raises UsageError."""
    asked = length_of(run_file, name)
    path = base / Path(run_file.source).expanduser()
    if not (path / "train.npz").is_file():
        return asked
    try:
        with (path / "train.npz").open("rb") as file:
            arrays = read_layouts(file).arrays
    except (BadArchive, OSError):
        return asked  # errors in the data are reported when it is read
    shapes = [arrays[each].shape[1:] for each in ("input_ids", "x") if each in arrays]
    found = shapes[0][0] if shapes and len(shapes[0]) == 1 else 0
    if found and asked and found != asked:
        key = "train.window" if run_file.train.window else f"options.{LENGTH}"
        raise UsageError(
            f"{name}: {key} {asked}: the samples of {run_file.source} are of {found} tokens",
            f"{key} = {found}",
        )
    return found or asked


def _path(base: Path, text: str) -> str:
    return str(base / Path(text).expanduser())
