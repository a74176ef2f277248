"""Names of protocols as they travel: versioned paths such as `/peerloom/swim/1`.

Not here: which handlers a node has for them (`node.transport.router`).
"""

import re
from functools import lru_cache

from crypto.errors import LocalProtocolError

PROTOCOL_BYTES_MAX = 64
NAMES_MAX = 256
"""Names whose parsed form is cached: a node speaks a dozen."""

_NAME = re.compile(rb"/[!-~]{1,%d}" % (PROTOCOL_BYTES_MAX - 1))


@lru_cache(maxsize=NAMES_MAX)
def protocol_bytes(protocol: str) -> bytes:
    """Return a protocol name as it is sent: printable ASCII behind a slash; LocalProtocolError for any
    other."""
    name = protocol.encode()
    if _NAME.fullmatch(name) is None:
        raise LocalProtocolError(f"'{protocol[:80]}' is not a protocol name")
    return name


@lru_cache(maxsize=NAMES_MAX)
def read_protocol(name: bytes) -> str | None:
    """Return the protocol of a name, None for an invalid name."""
    return name.decode() if _NAME.fullmatch(name) is not None else None
