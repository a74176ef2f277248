"""The files of a Hugging Face folder that was trained, kept by the requester's node: all files except the
weights.

From these files and a run's result, `runs fetch RUN --out FOLDER/` writes a folder for `from_pretrained`. A
folder that several runs trained is kept once. These functions wait for the disk, so they are called in the
executor's threads.
"""

from functools import partial
from pathlib import Path

import msgspec
from blake3 import blake3

from node.content.model_folder import CONFIG, FOLDER_FILES
from node.errors import UsageError
from node.seams import Seams, Storage

FILES_BYTES_MAX = 1 << 27
"""Maximum size of the files of one folder. A tokenizer of 256,000 tokens takes 35 MB, in two forms."""
ALL_BYTES_MAX = 1 << 30
"""Maximum size of the files of all folders. Above it, no further folder is kept, and `runs fetch` needs the
original folder."""
_ROOM = "folders"


def keep_folder(storage: Storage, run: str, folder: Path) -> bool:
    """Keep the files of a folder for a run; return whether there was room. Raises OSError."""
    files: dict[str, bytes] = {}
    size = 0
    for name in FOLDER_FILES:
        path = folder / name
        if not path.is_file():
            continue
        size += path.stat().st_size
        if size > FILES_BYTES_MAX:
            return False
        files[name] = path.read_bytes()
    data = msgspec.msgpack.encode(files)
    digest = blake3(data).hexdigest()
    kept = storage.sizes(_ROOM)
    if f"{_ROOM}/{digest}" not in kept:
        if sum(kept.values()) + len(data) > ALL_BYTES_MAX:
            return False
        storage.write(f"{_ROOM}/{digest}", data)
    storage.write(_name_of(run), digest.encode())
    return True


async def put_kept_folder(seams: Seams, run: str, into: str) -> None:
    """Write the kept files of a run into the folder `into`, unless `into` is empty. Raises UsageError if
    nothing is kept; OSError."""
    if into:
        await seams.executor.run(partial(write_kept_folder, seams.storage, run, Path(into)))


def write_kept_folder(storage: Storage, run: str, into: Path) -> None:
    """Write the kept files of a run into a folder. Raises UsageError if nothing is kept; OSError."""
    digest = storage.read(_name_of(run))
    data = storage.read(f"{_ROOM}/{digest.decode()}") if digest else None
    try:
        files = msgspec.msgpack.decode(data or b"\x80", type=dict[str, bytes])
    except msgspec.DecodeError:
        files = {}
    if CONFIG not in files:
        raise UsageError(
            f"run {run[:8]}: this node keeps no Hugging Face folder for it: its model "
            "was not given as one, or another node requested the run",
            "give --model FOLDER, the folder that was trained; or --out FILE for the weights alone",
        )
    for name in FOLDER_FILES:
        if name in files:
            (into / name).write_bytes(files[name])


def _name_of(run: str) -> str:
    return f"folder-of/{run}"
