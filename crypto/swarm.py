"""The data that members of a swarm share: its name and, if it is private, its keys.

The secret that handshakes mix in comes from here. In an open swarm it is derived from the name alone, so it
separates swarms but keeps nobody out. In a private swarm it is derived from the name and a key. Several keys
allow rotation: all are accepted, and the first is used towards others.

Not here: how keys are stored in a file or a config (`node.config`).
"""

import hashlib
import hmac
from dataclasses import dataclass

from crypto.errors import LocalProtocolError

SWARM_KEY_BYTES = 32
SWARM_KEYS_MAX = 4
"""Maximum number of keys of one swarm; a rotation needs two. Each key adds a MAC to the refusal of an
outsider's first packet."""
_PSK = b"peerloom/psk/1\0"


@dataclass(frozen=True)
class Swarm:
    """A swarm. `work_bits` is the proof of work that every member's id must have, as configured by the owner.

    Raises LocalProtocolError for keys of the wrong length, or for too many keys.
    """

    name: str
    keys: tuple[bytes, ...] = ()
    work_bits: int = 0

    def __post_init__(self) -> None:
        # A key of zeros would give the same secret as the open swarm.
        wrong = [key for key in self.keys if len(key) != SWARM_KEY_BYTES or not any(key)]
        if wrong or len(self.keys) > SWARM_KEYS_MAX:
            raise LocalProtocolError(f"a swarm has at most {SWARM_KEYS_MAX} keys of {SWARM_KEY_BYTES} bytes")

    @property
    def is_private(self) -> bool:
        return bool(self.keys)

    @property
    def prologue(self) -> bytes:
        """The prologue that both sides of a datagram session mix in. Peers whose `work_bits` differ get no
        session."""
        return self.name.encode() + (b"\0" + bytes((self.work_bits,)) if self.work_bits else b"")

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """Return 32 bytes for each key, in order; a single secret for an open swarm."""
        return tuple(
            hmac.digest(key or bytes(SWARM_KEY_BYTES), _PSK + self.name.encode(), hashlib.sha256)
            for key in self.keys or (b"",)
        )
