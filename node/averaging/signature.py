"""The signature of a run's tensors as one hash, so that peers whose tensors differ in name, shape or type
never join the same group."""

from collections.abc import Iterable, Mapping
from typing import get_args

from blake3 import blake3

from crypto.encoding import encode
from crypto.identity import PeerId
from gossip.averaging.group import Aggregate

RUN_PURPOSE = b"peerloom averaging run\0"
OWNED_RUN_PURPOSE = b"peerloom averaging run of an owner\0"
TENSORS_MAX = 1 << 17
"""Maximum number of tensors in one run: about ten for each of ten thousand layers."""

Row = tuple[str, tuple[int, ...], str]
"""Name, shape, type."""


def run_key(name: str) -> bytes:
    """Return the 32 bytes that identify a run's name in messages."""
    return blake3(RUN_PURPOSE + name.encode()).digest()


def owned_run_key(name: str, owner: PeerId) -> bytes:
    """Return the key of a closed run, which depends on its owner and its name."""
    return blake3(OWNED_RUN_PURPOSE + owner + name.encode()).digest()


def signature_of(kind: str, rows: Iterable[Row]) -> bytes:
    """Return the hash of the averaged tensors; `kind` describes the tensors and their use."""
    listed = [[name, list(shape), dtype] for name, shape, dtype in rows]
    return blake3(encode([kind, listed])).digest()


def signatures_of(kind: str, rows: Iterable[Row], aggregate: Aggregate) -> tuple[bytes, Mapping[bytes, str]]:
    """Return the hash of the averaged tensors under this rule, and their hashes under every other rule, which
    are used to recognise peers with a different rule."""
    listed = tuple(rows)
    found = {
        rule: signature_of(kind if rule == "mean" else f"{kind}, {rule}", listed)
        for rule in get_args(Aggregate)
    }
    return found.pop(aggregate), {signature: rule for rule, signature in found.items()}
