"""The two keys of a node, kept from its first start: identity (Ed25519) and static (X25519).

They are raw 32-byte files with mode 0600 in the data folder. They cannot be replaced, since a node without
its identity is a different peer. So an invalid file is refused with a remedy, never overwritten.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from crypto.identity import SEED_BYTES, Identity
from dht.work import find_seed, has_work, work_of
from node.errors import UsageError
from node.paths import short_path
from node.seams import Storage
from node.storage.folder import IDENTITY_NAME, FolderStorage
from node.storage.ownership import check_file, open_own

STATIC_NAME = "static.key"
STATIC_BYTES = 32


@dataclass(frozen=True)
class NodeKeys:
    """The node's keys. `static` is the private X25519 key (32 bytes); `is_new`: the identity was created
    now."""

    identity: Identity
    static: bytes = field(repr=False)
    is_new: bool


def load_keys(storage: FolderStorage, entropy: Callable[[int], bytes], work_bits: int = 0) -> NodeKeys:
    """Return the keys in the data folder; missing keys are made from `entropy` (the seam) and stored. A new
    identity has `work_bits` of proof of work, which takes 2^work_bits tries of about 30 us.

    Raises:
        UsageError: a key file is readable by others, has a wrong size, or is not a file.
    """
    seed = read_key(storage, IDENTITY_NAME, SEED_BYTES)
    static = read_key(storage, STATIC_NAME, STATIC_BYTES)
    is_new = seed is None
    if seed is None:
        seed = find_seed(entropy, work_bits)
        storage.write(IDENTITY_NAME, seed)
    if static is None:
        static = entropy(STATIC_BYTES)
        storage.write(STATIC_NAME, static)
    return NodeKeys(Identity(seed), static, is_new)


def keys_of(storage: Storage, entropy: Callable[[int], bytes], work_bits: int = 0) -> NodeKeys:
    """Return the keys in any storage: a data folder's modes are checked, other storage is just read.

    Raises UsageError as `load_keys` does, or if the identity has less work than its swarm requires.
    """
    keys = _keys_of(storage, entropy, work_bits)
    if not has_work(keys.identity.peer, work_bits):
        found = work_of(keys.identity.peer)
        raise UsageError(
            f"this node's identity has {found} bits of work; swarm.work_bits requires {work_bits}",
            f"move {IDENTITY_NAME} away from its data folder to start as a new peer, or use another data_dir",
        )
    return keys


def _keys_of(storage: Storage, entropy: Callable[[int], bytes], work_bits: int) -> NodeKeys:
    if isinstance(storage, FolderStorage):
        return load_keys(storage, entropy, work_bits)
    seed, static = storage.read(IDENTITY_NAME), storage.read(STATIC_NAME)
    is_new = seed is None
    if seed is None or static is None:
        seed, static = find_seed(entropy, work_bits), entropy(STATIC_BYTES)
        storage.write(IDENTITY_NAME, seed)
        storage.write(STATIC_NAME, static)
    return NodeKeys(Identity(seed), static, is_new)


def read_key(storage: FolderStorage, name: str, size_bytes: int) -> bytes | None:
    """Return a secret of `size_bytes`; None if it does not exist. Raises UsageError."""
    path = storage.file(name)
    data = read_secret(path, size_bytes, _RESTORE, follow=False)
    if data is not None and len(data) != size_bytes:
        found = f"{len(data)} bytes" if len(data) <= size_bytes else f"more than {size_bytes} bytes"
        raise UsageError(f"key file {short_path(path)} has {found}; a key has {size_bytes}", _RESTORE)
    return data


def read_secret(path: Path, bytes_max: int, remedy: str, *, follow: bool = True) -> bytes | None:
    """Return the content of a file that only its owner may read, or its first `bytes_max` + 1 bytes; None if
    it does not exist.

    The file may belong to this user or root. With `follow` the path may be a link, like a container's
    secrets.

    Raises:
        UsageError: others may read it, or it is another user's, or not a file; `remedy` says what to do.
    """
    what = f"key file {short_path(path)}"
    try:
        if follow:
            # opening a pipe must not block
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        else:
            descriptor = open_own(path, os.O_RDONLY, "key file")
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{what}: {reason}", f"chmod 600 {short_path(path)}") from None
    try:
        # The opened file is examined, not its path, so that nothing can be swapped in between.
        mode = stat.S_IMODE(check_file(descriptor, what, remedy).st_mode)
        if mode & 0o077:
            raise UsageError(f"{what} is open to others (mode {mode:04o})", f"chmod 600 {short_path(path)}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(bytes_max + 1)
    finally:
        os.close(descriptor)


_RESTORE = "restore it from a backup, or move it away to start as a new peer"
