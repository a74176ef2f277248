"""The text files of a served model: tokenizer, chat template and sampling settings.

The files are identified by the hash of a list of chunks. The list and the chunks are blobs and are fetched as
such, and any peer with the service's manifest can verify every byte. Their content is untrusted, and only
`node.content.fenced_text` reads it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.content.model_folder import READ_FILES, TOKENIZER
from node.errors import UsageError
from node.storage.blobs import HASH_BYTES, hash_of

GENERATION_CONFIG = "generation_config.json"
TEXT_FILES = (*READ_FILES, GENERATION_CONFIG)
FILES_BYTES_MAX = 1 << 26
"""Maximum size of all files together. A tokenizer of 256,000 tokens takes 35 MB, plus its configuration."""
CHUNK_BYTES = 1 << 20
CHUNKS_MAX = FILES_BYTES_MAX // CHUNK_BYTES
LIST_BYTES_MAX = HASH_BYTES * CHUNKS_MAX + 64
_TOO_LARGE = f"more than {FILES_BYTES_MAX >> 20} MiB of tokenizer and configuration"


class TextChunks(msgspec.Struct, frozen=True, array_like=True):
    """The list of chunks: their hashes, and the total size of the files."""

    hashes: Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES * CHUNKS_MAX)]
    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=FILES_BYTES_MAX)]

    def __post_init__(self) -> None:
        if len(self.hashes) != HASH_BYTES * -(-self.size_bytes // CHUNK_BYTES):
            raise ValueError("the number of chunks does not match their size")

    @property
    def sizes(self) -> dict[bytes, int]:
        """Return the size of each chunk, by its hash."""
        return {
            self.hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]: min(
                CHUNK_BYTES, self.size_bytes - number * CHUNK_BYTES
            )
            for number in range(len(self.hashes) // HASH_BYTES)
        }


def collect(path: Path) -> bytes:
    """Return the files of a model's folder, or a single tokenizer.json, as one byte string; empty if there is
    no tokenizer. Raises UsageError if they are too large or unreadable."""
    places = {name: path / name for name in TEXT_FILES} if path.is_dir() else {TOKENIZER: path}
    files: dict[str, bytes] = {}
    left = FILES_BYTES_MAX
    try:
        for name, place in places.items():
            if path.is_dir() and not place.is_file():
                continue
            with place.open("rb") as file:
                files[name] = file.read(left + 1)
            left -= len(files[name])
            if left < 0:
                raise UsageError(f"{path}: {_TOO_LARGE}")
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {(error.strerror or str(error)).lower()}") from None
    if TOKENIZER not in files:
        return b""
    data = msgspec.msgpack.encode(files)
    if len(data) > FILES_BYTES_MAX:
        raise UsageError(f"{path}: {_TOO_LARGE}")
    return data


def keep(data: bytes, put: Callable[[memoryview], bytes]) -> tuple[bytes, dict[bytes, int]]:
    """Store files as blobs; return the hash of their list, and all blobs with their sizes."""
    view = memoryview(data)
    hashes = b"".join(put(view[begin : begin + CHUNK_BYTES]) for begin in range(0, len(view), CHUNK_BYTES))
    listed = TextChunks(hashes, len(data))
    text = encode(listed)
    return put(memoryview(text)), {hash_of(text): len(text), **listed.sizes}


def read_list(data: bytes) -> TextChunks:
    """Return a list of chunks. Raises RemoteProtocolError."""
    found: TextChunks = decode(data, TextChunks, bytes_max=LIST_BYTES_MAX)
    return found


def read_files(data: bytes) -> dict[str, bytes]:
    """Return files by name. Raises RemoteProtocolError if they are malformed or have unknown names."""
    found: dict[str, bytes] = decode(data, dict[str, bytes], bytes_max=FILES_BYTES_MAX)
    if TOKENIZER not in found or not found.keys() <= set(TEXT_FILES):
        raise RemoteProtocolError("text files without a tokenizer, or with unknown names")
    return found
