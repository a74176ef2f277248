"""Protocol names in their wire form: versioned paths such as `/peerloom/swim/1`.

Not here: which handlers a node has for them (`node.transport.router`).
"""

import re
from functools import lru_cache

from crypto.errors import LocalProtocolError

PROTOCOL_BYTES_MAX = 64
NAMES_MAX = 256
"""Number of names whose parsed form is cached; a node uses about a dozen."""

_NAME = re.compile(rb"/[!-~]{1,%d}" % (PROTOCOL_BYTES_MAX - 1))


@lru_cache(maxsize=NAMES_MAX)
def protocol_bytes(protocol: str) -> bytes:
    """Return a protocol name in its wire form, printable ASCII that begins with a slash. Raises
    LocalProtocolError for an invalid name."""
    name = protocol.encode()
    if _NAME.fullmatch(name) is None:
        raise LocalProtocolError(f"'{protocol[:80]}' is not a protocol name")
    return name


@lru_cache(maxsize=NAMES_MAX)
def read_protocol(name: bytes) -> str | None:
    """Return the protocol that `name` encodes; None for an invalid name."""
    return name.decode() if _NAME.fullmatch(name) is not None else None
