"""The key file of a private swarm: a text that people copy from machine to machine, one key per line.

    # since March
    1f0c...64 hex digits...9a
    kq3V...44 base64 characters...Yk=     # the previous key, until all members have the new one

The first key is used for outgoing connections; all are accepted. The file must be readable only by its owner,
like the identity. `crypto.swarm` uses the keys. No message here shows a key, not even an invalid one.
"""

import base64
import binascii
import shlex
from pathlib import Path

from crypto.swarm import SWARM_KEY_BYTES, SWARM_KEYS_MAX
from node.errors import UsageError
from node.paths import short_path
from node.storage.keys import read_secret

KEY_FILE_BYTES_MAX = 16_384
"""Maximum size of a key file: enough for four keys and many comments."""


def load_swarm_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys in a file, in order; at least one.

    Raises:
        UsageError: there is no such file, others may read it, or a line is not a key.
    """
    shown = short_path(path)
    make = f"(umask 077; openssl rand -hex {SWARM_KEY_BYTES} > {shlex.quote(str(path))})"
    data = read_secret(path, KEY_FILE_BYTES_MAX, "key_file must name a text file, with one key per line")
    if data is None:
        raise UsageError(
            f"swarm key file {shown} does not exist", f"make one, and copy it to every member: {make}"
        )
    if len(data) > KEY_FILE_BYTES_MAX:
        raise UsageError(f"swarm key file {shown} has more than {KEY_FILE_BYTES_MAX} bytes")
    keys: dict[bytes, int] = {}
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            key = read_swarm_key(text)
        except ValueError as error:
            raise UsageError(
                f"{shown}:{number}: {error}", f"to make a new key: openssl rand -hex {SWARM_KEY_BYTES}"
            ) from None
        if key in keys:
            raise UsageError(f"{shown}:{number}: this is the key of line {keys[key]} again")
        keys[key] = number
    if not keys:
        raise UsageError(f"swarm key file {shown} has no key", f"make one: {make}")
    if len(keys) > SWARM_KEYS_MAX:
        raise UsageError(f"swarm key file {shown} has {len(keys)} keys; at most {SWARM_KEYS_MAX} are allowed")
    return tuple(keys)


def read_swarm_key(text: str) -> bytes:
    """Parse a key as a person copies it, in hex or base64. Raises ValueError, which does not show the key."""
    try:
        is_hex = len(text) == 2 * SWARM_KEY_BYTES
        key = bytes.fromhex(text) if is_hex else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if len(key) != SWARM_KEY_BYTES:
        raise ValueError(f"not a key; want {SWARM_KEY_BYTES} bytes, as 64 hex digits or 44 base64 characters")
    if len(set(key)) == 1:
        raise ValueError("all bytes of this key are the same, which anybody would try")
    return key
