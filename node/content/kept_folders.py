"""What a requester's node keeps of a Hugging Face folder that it trained: all but the weights, a few files.

With them and a run's result `runs fetch RUN --out FOLDER/` writes what `from_pretrained` reads. One folder
that many runs trained is kept once. Called in the executor's threads: it waits for the disk.
"""

from pathlib import Path

import msgspec
from blake3 import blake3

from node.content.model_folder import CONFIG, FOLDER_FILES
from node.seams import Storage

FILES_BYTES_MAX = 1 << 27
"""The files of one folder: a tokenizer of 256,000 tokens comes as 35 MB, in two forms."""
ALL_BYTES_MAX = 1 << 30
"""The files of all folders; what would be more is not kept, and `runs fetch` then wants the folder itself."""
_ROOM = "folders"


def keep_folder(storage: Storage, run: str, folder: Path) -> bool:
    """Keep the files of a folder for a run; returns whether there was room. Raises OSError."""
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


def write_kept_folder(storage: Storage, run: str, into: Path) -> bool:
    """Write what is kept for a run into a folder; returns whether there is something. Raises OSError."""
    digest = storage.read(_name_of(run))
    data = storage.read(f"{_ROOM}/{digest.decode()}") if digest else None
    if data is None:
        return False
    try:
        files = msgspec.msgpack.decode(data, type=dict[str, bytes])
    except msgspec.DecodeError:
        return False
    for name in FOLDER_FILES:
        if name in files:
            (into / name).write_bytes(files[name])
    return CONFIG in files


def _name_of(run: str) -> str:
    return f"folder-of/{run}"
