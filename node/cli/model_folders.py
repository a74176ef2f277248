"""A run's result as a Hugging Face folder for `from_pretrained` of transformers.

The weights are copied range by range into safetensors files of at most 5 GB, with an index. The folder also
gets the other files of the model's original folder. It gets its name only when it is complete.
"""

import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from node.cli.client import ask
from node.cli.outputs import output_path
from node.cli.render import bytes_text, show
from node.content.model_folder import (
    CONFIG,
    CONFIG_BYTES_MAX,
    FOLDER_FILES,
    is_model_folder,
    read_model_folder,
    read_table,
)
from node.errors import UsageError

SHARD_BYTES_MAX = 5_000_000_000
"""Maximum size of a file on the hub. Larger models are split."""
HEADER_BYTES_MAX = 100_000_000
"""Maximum size of a header, according to safetensors."""
_CHUNK_BYTES = 1 << 24
_ALIGNMENT = 8
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

Header = Mapping[str, Mapping[str, Any]]


def is_folder_path(text: str) -> bool:
    """Return whether a path means a folder: it ends in a slash, or a folder exists there."""
    return text.endswith(("/", os.sep)) or Path(text).expanduser().is_dir()


def check_folder(out: str) -> Path:
    """Return the absolute path for a new folder. Raises UsageError if something exists there already, or the
    folder cannot be written."""
    target = Path(out.rstrip(f"/{os.sep}") or out).expanduser().absolute()
    if not target.is_dir():
        return output_path(str(target))
    if any(target.iterdir()):
        raise UsageError(
            f"--out {out}: is a folder that is not empty",
            f"give a new folder, --out {target}-2{os.sep}, or a file in it",
        )
    output_path(str(target / "FILE"))
    return target


def fetch_folder(data_dir: Path, run: str, out: str, model: str = "") -> dict[str, Any]:
    """Write a run's result as a folder, and report it on stderr. The other files come from the node, which
    keeps them for the run, or from the folder `model`. Raises UsageError."""
    if model and not is_model_folder(Path(model).expanduser()):
        raise UsageError(f"--model {model}: is not a folder with a {CONFIG}")
    with _made_whole(out) as (target, half):
        weights = half / ".weights"
        arguments = {"run": run, "out": str(weights)} | ({} if model else {"folder": str(half)})
        result: dict[str, Any] = ask(data_dir, "runs.fetch", arguments, seconds=None)
        for name in FOLDER_FILES if model else ():
            if (Path(model).expanduser() / name).is_file():
                shutil.copyfile(Path(model).expanduser() / name, half / name)
        reading = ask(data_dir, "runs.show", {"run": run}).get("reading") or {}
        files = write_model_folder(weights, half, reading.get("words") or ())
        weights.unlink()
    told = f"{len(files)} files of weights" if len(files) > 1 else files[0]
    show([f"model in {target}{os.sep}, {told}, {bytes_text(result['size_bytes'])}"], sys.stderr)
    return {"schema": "peerloom/fetch/1", "run": run} | result | {"out": str(target)}


def write_model_folder(
    weights: Path, folder: Path, words: Sequence[str] = (), *, shard_bytes_max: int = SHARD_BYTES_MAX
) -> list[str]:
    """Put the weights of a safetensors file into a folder that already has the model's other files. Write
    their type and the classes' `words` into its configuration. Return the names of the weights' files. Raises
    UsageError."""
    try:
        with weights.open("rb") as file:
            header, begin = _read_header(file, weights)
            shards = _shards(header, shard_bytes_max)
            names = [
                _WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
                for number in range(1, len(shards) + 1)
            ]
            for name, tensors in zip(names, shards, strict=True):
                _write_shard(file, begin, header, tensors, folder / name)
            if len(shards) > 1:
                _write_index(header, dict(zip(names, shards, strict=True)), folder / _INDEX)
        _write_config(folder, header, words)
    except OSError as error:
        raise UsageError(f"{folder}: {(error.strerror or str(error)).lower()}") from None
    return names


@contextmanager
def _made_whole(out: str) -> Iterator[tuple[Path, Path]]:
    """Yield a path, and a temporary folder that is renamed to that path at the end."""
    target = check_folder(out)
    half = target.with_name(f".{target.name}.{os.getpid()}.half")
    try:
        half.mkdir()
        yield target, half
        if target.is_dir():
            target.rmdir()
        half.rename(target)
    except OSError as error:
        raise UsageError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _read_header(file: IO[bytes], path: Path) -> tuple[Header, int]:
    length = struct.unpack("<Q", file.read(8))[0]
    if length > HEADER_BYTES_MAX:
        raise UsageError(f"{path}: no safetensors file")
    try:
        found = json.loads(file.read(length))
    except (ValueError, RecursionError):
        raise UsageError(f"{path}: no safetensors file") from None
    return {name: row for name, row in found.items() if name != "__metadata__"}, 8 + length


def _shards(header: Header, bytes_max: int) -> list[list[str]]:
    """Return the names of the tensors for each file, in the order of their data."""
    found: list[list[str]] = [[]]
    size = 0
    for name in sorted(header, key=lambda name: header[name]["data_offsets"][0]):
        more = _size(header[name])
        if found[-1] and size + more > bytes_max:
            found.append([])
            size = 0
        found[-1].append(name)
        size += more
    return found


def _size(row: Mapping[str, Any]) -> int:
    begin, end = row["data_offsets"]
    return int(end) - int(begin)


def _write_shard(file: IO[bytes], begin: int, header: Header, names: Sequence[str], path: Path) -> None:
    rows: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in names:
        rows[name] = {**header[name], "data_offsets": [place, place + _size(header[name])]}
        place += _size(header[name])
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.seek(begin + header[name]["data_offsets"][0])
            left = _size(header[name])
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise UsageError(f"{path}: the weights end before {name} does")
                out.write(chunk)
                left -= len(chunk)


def _write_index(header: Header, shards: Mapping[str, Sequence[str]], path: Path) -> None:
    index = {
        "metadata": {"total_size": sum(map(_size, header.values()))},
        "weight_map": {name: file for file, names in shards.items() for name in sorted(names)},
    }
    path.write_text(json.dumps(index, indent=2) + "\n")


def _write_config(folder: Path, header: Header, words: Sequence[str]) -> None:
    """Write the type of the weights and the names of the classes into the configuration."""
    config = read_table(folder / CONFIG, CONFIG_BYTES_MAX)
    kinds = {_DTYPES[row["dtype"]] for row in header.values() if row["dtype"] in _DTYPES}
    if len(kinds) == 1:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = kinds.pop()
    model = read_model_folder(folder)
    if len(words) == model.classes and not model.words and model.kind in ("classes", "images"):
        config["id2label"] = {str(number): word for number, word in enumerate(words)}
        config["label2id"] = {word: number for number, word in enumerate(words)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
