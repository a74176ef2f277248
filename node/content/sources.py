"""Users' data converted to a folder with `train.npz` and `test.npz`: the form that a run reads.

The requester's own command converts the requester's files, and only arrays leave it. This module runs no code
from the data and does not unpickle. It does not guess: the reading of a source is stated
(`node.content.reading`), and a source with more than one possible reading is refused, with the key that
decides. The sources are:

    TABLE.csv, .tsv, .parquet   a row a sample: numbers, and one column of labels
    ARRAYS.npz, .safetensors    `x` and `y`, or arrays named as the model's inputs and labels; or all of them
                                with the name of a part, `train_NAME` or `NAME_train`
    a folder of images          a folder for each class, at the top or under `train`, `test` and `validation`
    a folder of arrays          `train.npz`, and perhaps `test.npz` and `validation.npz`
    a folder of CIFAR-10        `data_batch_*.bin` and `test_batch.bin` (its binary version)
    http(s)://, s3://, gs://    one of the files above (`node.content.buckets`)

`[splits]` of RUN.toml takes validation and test samples from another source, or a share of the training
samples. Without a test part, always the same fifth is held out. Equal sources have equal hashes.
"""

import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from node.content.array_files import channels_first, check_numbers, parts_of, read_npz, read_safetensors
from node.content.buckets import BUCKET_SCHEMES, open_bucket
from node.content.columns import Schema, schema_from
from node.content.datasets import ORIGINS_NAME
from node.content.fine_tuning import read_records
from node.content.images import is_cifar, read_cifar, read_images
from node.content.model_folder import read_model_folder
from node.content.plain_text import check_text
from node.content.reading import SourceReading, describe, shown, write_reading
from node.content.records import LINES, SUFFIXES
from node.content.shards import PARTS, PartName
from node.content.tables import read_csv, read_parquet
from node.content.tokens import Language, Tokens, read_windows
from node.errors import UsageError
from node.protocols.data_table import DataTable

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = dict[str, Array]
Parts = dict[PartName, Arrays]
"""The arrays of each part; `train` always exists."""
Tell = Callable[[str], None]
"""Receives the progress of the reading."""

_NUMBER = " number"
WEB_SCHEMES = ("http://", "https://")
SCHEMES = (*WEB_SCHEMES, *BUCKET_SCHEMES)
DOWNLOAD_BYTES_MAX = 1 << 31
DOWNLOAD_SECONDS = 60.0
"""Longest time to wait for the next byte of a download."""
HELD_OUT = 5
"""One sample in five is held out if the source has no held-out samples."""
SAMPLES_MIN = 2
_SPLIT_SEED = 20
_VALIDATION_SEED = 21
_CHUNK_BYTES = 1 << 20
_REORDERED_BYTES = 4 << 20
"""Number of bytes moved in one step while samples are reordered."""
_ARCHIVES = {".npz": read_npz, ".safetensors": read_safetensors}
_UNPACK = "unpack it first"
_OTHER_FORMS = {
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z", ".rar"), _UNPACK),
    **dict.fromkeys((".xlsx", ".xls", ".ods", ".numbers"), "save the sheet as csv"),
    ".npy": "make an npz of arrays x and y with numpy.savez",
    **dict.fromkeys(
        (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"), "make a folder for each class"
    ),
    **dict.fromkeys((".pt", ".pth", ".pkl", ".pickle", ".h5", ".hdf5", ".mat", ".feather", ".arrow"), ""),
    **dict.fromkeys((".orc", ".avro", ".sqlite", ".db", ".tfrecord", ".rds", ".rdata", ".pdf", ".docx"), ""),
}
"""Suffixes of files that are not text, and for each how to make a readable file from it."""
_TABLES = {".csv": read_csv, ".tsv": read_csv, ".parquet": read_parquet}


@dataclass(frozen=True)
class SourceWish:
    """A request: `data` of a RUN.toml in the folder `base`, read according to `keys`.

    `test` and `validation` each name another source, or a share of the training samples. With `like`, the
    samples are new ones, read as described by that reading, and may have no labels. With `language`, the
    source is text that becomes tokens.
    """

    data: str
    base: Path
    keys: DataTable
    test: str | float = ""
    validation: str | float = ""
    like: SourceReading | None = None
    language: Language | None = None


@dataclass
class SampleParts:
    """The result of a reading: the arrays of each part, the reading, and for each part the number of each
    sample in the source."""

    parts: Parts
    reading: SourceReading
    origins: dict[PartName, Array] = field(default_factory=dict)


def is_source(data: str, base: Path) -> bool:
    """Return whether `data` of a RUN.toml in the folder `base` must be converted first. Raises UsageError for
    a URL of an unsupported kind."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", data):
        _check_scheme(data)
        return True
    path = base / Path(data).expanduser()
    if path.is_dir():
        return not (path / "train.npz").exists()
    return path.suffix.lower() in {*_TABLES, *_ARCHIVES}


def is_table(data: str) -> bool:
    """Return whether the name of `data` is that of a table."""
    return Path(data).suffix.lower() in _TABLES


def is_archive(data: str) -> bool:
    """Return whether the name of `data` is that of a file of arrays."""
    return Path(data).suffix.lower() in _ARCHIVES


def is_table_by_keys(keys: DataTable) -> bool:
    """Return whether these keys make any file a text table, whatever its name, such as iris.data."""
    return keys.form == "table" or any(
        getattr(keys, name) not in ("", (), None) for name in ("label", *_TABLE_KEYS)
    )


def check_form(path: Path, keys: DataTable) -> None:
    """Refuse a file if its name or bytes show that it is not text, or that it may be a table. Raises
    UsageError."""
    if keys.form == "bytes":
        return
    suffix = path.suffix.lower()
    if suffix in _OTHER_FORMS and path.is_file():
        raise UsageError(
            f"{path}: {suffix} files are not read; readable: {', '.join(sorted({*_TABLES, *_ARCHIVES}))}, a"
            " folder, or a text",
            _OTHER_FORMS[suffix] or 'or give a function that reads it: data = "FILE.py:FUNCTION"',
        )
    if path.is_file() and not is_table_by_keys(keys):
        try:
            check_text(path, keys)
        except OSError as error:
            raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def convert(
    data: str,
    base: Path,
    folder: Path,
    *,
    test: str | float = "",
    validation: str | float = "",
    keys: DataTable | None = None,
) -> SourceReading:
    """Write `train.npz`, `test.npz`, `validation.npz` if there is one, and the reading into an existing
    folder. The source is read in this process; `node.content.fenced_reading` starts a sandboxed one.

    Raises:
        UsageError: a file is missing, cannot be read or does not match; the error names it.
    """
    wish = SourceWish(data, base, keys or DataTable(data), test, validation)
    with downloaded(wish, folder) as (here, names), called(names):
        samples = read(here)
    samples.reading.source = data
    return write(samples, folder)


def write(samples: SampleParts, folder: Path) -> SourceReading:
    """Write samples into `folder`, in the form that a run reads. Raises UsageError."""
    try:
        for name, arrays in samples.parts.items():
            np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]  # numpy's own
        if len(samples.origins) > 1:
            np.savez(folder / ORIGINS_NAME, **samples.origins)  # type: ignore[arg-type]  # numpy's own
        write_reading(samples.reading, folder)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from None
    return samples.reading


def read(wish: SourceWish, tell: Tell = lambda _: None) -> SampleParts:
    """Read a request's sources, which are local files. Raises UsageError."""
    reading = SourceReading(wish.data)
    if wish.like is not None:
        schema = replace(schema_from(wish.like), needs_labels=False)
        parts = _read_source(wish.data, wish, schema, reading, tell)
        new = parts.get("test", parts["train"])
        schema.state(reading)
        describe(reading, {"train": new})
        return SampleParts({"train": new}, reading)
    schema = Schema()
    parts = _read_source(wish.data, wish, schema, reading, tell)
    whole = np.arange(len(next(iter(parts["train"].values()))))
    wanted: tuple[tuple[PartName, str | float], ...] = (("test", wish.test), ("validation", wish.validation))
    for part, source in wanted:
        if source and part in parts:
            raise UsageError(
                f"splits.{part}: {wish.data} already has {part} samples", f"leave splits.{part} out"
            )
        if isinstance(source, str) and source:
            of_other = SourceReading(source)
            other = _read_source(source, wish, schema, of_other, tell, part=part)
            if len(other) > 1:
                raise UsageError(f"splits.{part}: {source} itself has several parts")
            parts[part] = other["train"]
            reading.notes += [f"{part}: {source}: {of_other.form}", *(f"{part}: {e}" for e in of_other.notes)]
            reading.skipped += [f"{part}: {each}" for each in of_other.skipped]
    parts["train"][_NUMBER] = whole
    for part, source in wanted:
        if isinstance(source, float) and source:
            parts["train"], parts[part] = hold_out(parts["train"], source, wish.data, part)
            reading.notes.append(f"{part}: {source:g} of the training samples, dealt by a fixed seed")
    if "test" not in parts:
        parts["train"], parts["test"] = hold_out(parts["train"], 1 / HELD_OUT, wish.data, "test")
        reading.notes.append(f"test: one sample in {HELD_OUT}, dealt by a fixed seed")
    origins = {name: arrays.pop(_NUMBER) for name, arrays in parts.items() if _NUMBER in arrays}
    _check_parts(parts, wish.data)
    schema.state(reading)
    _note_untrained(parts, reading)
    describe(reading, parts)
    return SampleParts({part: parts[part] for part in PARTS if part in parts}, reading, origins)


def _check_scheme(url: str) -> None:
    """Refuse a URL of an unsupported kind. Raises UsageError."""
    if not url.startswith(SCHEMES):
        kind = url.partition("://")[0]
        raise UsageError(
            f"{url[:200]}: {kind}:// is not read; what is: {', '.join(SCHEMES)}",
            "copy it to this machine, and give the file's path",
        )


def _read_source(
    data: str, wish: SourceWish, schema: Schema, reading: SourceReading, tell: Tell, *, part: str = ""
) -> Parts:
    path = wish.base / Path(data).expanduser()
    if not path.exists():
        where = f"splits.{part}: " if part else ""
        raise UsageError(
            f"{where}{path}: no such file", "for data and for the entries of [splits], give files or folders"
        )
    if wish.language is not None:
        parts = _read_language(path, wish, wish.language, schema, reading, tell)
    else:
        parts = _read(path, wish.keys, schema, reading, tell)
    for name, arrays in parts.items():
        _count(arrays, path if len(parts) == 1 else path / name)
    return parts


def _read(path: Path, keys: DataTable, schema: Schema, reading: SourceReading, tell: Tell) -> Parts:
    """Return arrays by name for each part."""
    suffix = path.suffix.lower()
    _check_keys(path, keys)
    try:
        if path.is_dir():
            if (path / "train.npz").exists():
                reading.form = "a folder of npz files"
                return {
                    name: read_npz(path / f"{name}.npz")
                    for name in PARTS
                    if name == "train" or (path / f"{name}.npz").exists()
                }
            if is_cifar(path):
                return read_cifar(path, schema.words, reading)
            return read_images(path, schema.words, reading, keys, needs_labels=schema.needs_labels, tell=tell)
        if suffix in _ARCHIVES:
            parts = parts_of(_ARCHIVES[suffix](path), path, keys, reading)
            channels_first(parts, keys, reading)
            check_numbers(path, parts)
            return parts
        if suffix not in _TABLES and is_table_by_keys(keys):
            check_form(path, keys)
            return {"train": read_csv(path, keys, schema, reading, tell)}
        if suffix not in _TABLES:
            raise UsageError(f"{path}: want {', '.join(sorted({*_TABLES, *_ARCHIVES}))}, or a folder")
        return {"train": _TABLES[suffix](path, keys, schema, reading, tell)}
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _read_language(
    path: Path, wish: SourceWish, language: Language, schema: Schema, reading: SourceReading, tell: Tell
) -> Parts:
    """Read text that becomes tokens: records, or one text in windows. Raises UsageError."""
    model = read_model_folder(Path(language.folder)) if language.folder else None
    is_of_records = model is not None and path.suffix.lower() in SUFFIXES
    _check_language_keys(path, wish.keys, is_of_records=is_of_records)
    known = Tokens(Path(language.tokenizer), model)
    window = language.window or schema.window
    if wish.like is not None:  # prompts are never cut; labelled texts are cut like those in training
        window = 0 if is_of_records and model is not None and model.kind == "causal" else wish.like.window
    try:
        if model is not None and is_of_records:
            arrays = read_records(path, model, known, window, wish.keys, schema, reading, tell)
            schema.window = reading.window
            return {"train": arrays}
        if model is not None and model.kind != "causal":
            raise UsageError(
                f"{path}: the model in {model.path} does not continue texts",
                "give records for this kind of model, such as JSON lines of text and label (docs/data.md)",
            )
        return dict(read_windows(path, known, window, reading, tell))
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _note_untrained(parts: Parts, reading: SourceReading) -> None:
    """State in the reading which classes have no training sample."""
    labels = parts["train"].get("y", parts["train"].get("labels"))
    if not reading.words or labels is None:
        return
    trained = set(np.unique(labels).tolist())
    missing = [word for number, word in enumerate(reading.words) if number not in trained]
    if missing:
        told = ", ".join(map(shown, missing[:8])) + (" ..." if len(missing) > 8 else "")
        reading.notes.append(f"no training sample is of the class {told}")


_TABLE_KEYS = ("features", "separator", "decimal", "encoding", "header")
_LANGUAGE_KEYS = ("prompt", "completion", "messages", "text", "loss")


def _check_language_keys(path: Path, keys: DataTable, *, is_of_records: bool) -> None:
    """Refuse keys that do not apply to text that becomes tokens. Raises UsageError."""
    useless: tuple[str, ...] = ("features", "decimal", "header", "channels", "form")
    if path.suffix.lower() in LINES or path.suffix.lower() == ".parquet":
        useless += ("separator", "encoding")
    if not is_of_records:
        useless += ("label", "ignore", "classes", "separator", "encoding", *_LANGUAGE_KEYS)
    _refuse_keys(path, keys, useless)


def _refuse_keys(path: Path, keys: DataTable, useless: tuple[str, ...]) -> None:
    for name in useless:
        if getattr(keys, name) not in ("", (), None):
            raise UsageError(f"{path}: {name} does not apply to such a source", f"leave {name} out of [data]")


def _check_keys(path: Path, keys: DataTable) -> None:
    """Refuse keys that do not apply to a source of this form. Raises UsageError."""
    suffix = path.suffix.lower()
    if path.is_dir():
        useless: tuple[str, ...] = (*_TABLE_KEYS, "label", "channels")
    elif suffix in _ARCHIVES:
        useless = (*_TABLE_KEYS, "classes")
    elif suffix == ".parquet":
        useless = ("separator", "decimal", "encoding", "header", "channels")
    else:
        useless = ("channels",)
    _refuse_keys(path, keys, (*useless, *_LANGUAGE_KEYS))
    if isinstance(keys.classes, str) and keys.classes and path.is_dir():
        raise UsageError(f"{path}: classes: want a list of its folders in the order of their numbers")


def _check_parts(parts: Parts, where: str) -> None:
    train = parts["train"]
    for name, arrays in parts.items():
        if arrays.keys() != train.keys():
            raise UsageError(f"{where}: train has {', '.join(train)}; {name} has {', '.join(arrays)}")
        for array in arrays:
            shapes = [each[array].shape[1:] for each in (train, arrays)]
            if shapes[0] != shapes[1]:
                raise UsageError(
                    f"{where}: {array} of train holds samples of {shapes[0]}, but {name} of {shapes[1]}"
                )
            kinds = [each[array].dtype for each in (train, arrays)]
            if kinds[0] != kinds[1] and not np.can_cast(kinds[1], kinds[0], "same_kind"):
                raise UsageError(f"{where}: {array} of train is {kinds[0]}, but of {name} {kinds[1]}")


def hold_out(arrays: Arrays, share: float, where: str, part: str) -> tuple[Arrays, Arrays]:
    """Hold out a fixed share. Return the remaining and the held-out samples, both in the memory of `arrays`,
    whose samples are reordered. Raises UsageError if there are too few samples."""
    count = len(next(iter(arrays.values())))
    if count < SAMPLES_MIN:
        raise UsageError(f"{where}: {count} samples; want at least {SAMPLES_MIN}, one of them to hold out")
    seed = _VALIDATION_SEED if part == "validation" else _SPLIT_SEED
    order = np.random.default_rng(seed).permutation(count)
    held_out = max(1, int(count * share + 1e-9))
    if held_out >= count:
        raise UsageError(f"{where}: {count} samples are too few to hold out {share:g} of them")
    dealt = {}
    for name, array in arrays.items():
        shared = any(np.may_share_memory(array, other) for each, other in arrays.items() if each != name)
        dealt[name] = array[order] if shared else _reordered(array, order)
    return {name: array[held_out:] for name, array in dealt.items()}, {
        name: array[:held_out] for name, array in dealt.items()
    }


def _reordered(array: Array, order: Array) -> Array:
    """Return the samples in this order, in the memory of `array` if it is writable."""
    if not array.flags.c_contiguous or not array.flags.writeable:
        return array[order]
    rows = array.reshape(len(array), -1)
    width = max(1, _REORDERED_BYTES // max(1, len(rows) * rows.itemsize))
    for first in range(0, rows.shape[1], width):
        rows[:, first : first + width] = rows[order, first : first + width]
    return array


def _count(arrays: Arrays, path: Path) -> int:
    """Return the number of samples. Raises UsageError if the arrays differ in length, or there are none."""
    lengths = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    told = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:8])
    if len(set(lengths.values())) != 1:
        raise UsageError(f"{path}: arrays of different lengths: {told}")
    if not next(iter(lengths.values())):
        raise UsageError(f"{path}: no samples: {told}")
    return next(iter(lengths.values()))


# Downloads


@contextmanager
def downloaded(wish: SourceWish, folder: Path) -> Iterator[tuple[SourceWish, dict[str, str]]]:
    """Yield the request with URLs replaced by files, and the user's names of these. Raises UsageError."""
    names: dict[str, str] = {}
    with ExitStack() as stack:

        def here(source: str) -> str:
            if "://" not in source:
                return source
            _check_scheme(source)
            into = stack.enter_context(tempfile.TemporaryDirectory(prefix="download-", dir=folder))
            path = str(_download(source, Path(into)))
            names[path] = source
            return path

        data = here(wish.data)
        others = [here(each) if isinstance(each, str) else each for each in (wish.test, wish.validation)]
        yield replace(wish, data=data, test=others[0], validation=others[1]), names


@contextmanager
def called(names: dict[str, str]) -> Iterator[None]:
    """In errors raised inside, replace the names of files by the names that the user knows."""
    try:
        yield
    except UsageError as error:
        raise renamed(error, names) from None


def data_names(folder: str, source: str) -> dict[str, str]:
    """Return the names by which the user knows the parts that were made from a source in a hidden folder."""
    parts = {f"{folder}/{part}.npz": f"{source} ({part})" for part in PARTS}
    return parts | {folder: source}


def renamed(error: UsageError, names: dict[str, str]) -> UsageError:
    """Return a copy of an error with files renamed."""
    texts = [text and _replaced(text, names) for text in error.written]
    return UsageError(texts[0] or "", texts[1])


def _replaced(text: str, names: dict[str, str]) -> str:
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def _download(url: str, folder: Path) -> Path:
    """Download a file of a known form into `folder`. Raises UsageError."""
    is_bucket = url.startswith(BUCKET_SCHEMES)
    suffix = Path(urllib.parse.urlsplit(url).path).suffix.lower()
    if suffix not in {*_TABLES, *_ARCHIVES}:
        raise UsageError(f"{url}: want a file that ends in {', '.join(sorted({*_TABLES, *_ARCHIVES}))}")
    path = folder / f"download{suffix}"
    try:
        with (
            open_bucket(url) if is_bucket else urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as reply,  # noqa: S310 - http(s) alone
            path.open("wb") as out,
        ):
            while chunk := reply.read(_CHUNK_BYTES):
                out.write(chunk)
                if out.tell() > DOWNLOAD_BYTES_MAX:
                    raise UsageError(f"{url}: more than {DOWNLOAD_BYTES_MAX >> 30} GiB")
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UsageError(f"{url}: {reason}") from None
    return path
