"""What a run averages, as one hash: peers whose tensors differ in name, shape or type never meet in a
group."""

from collections.abc import Iterable, Mapping
from typing import get_args

from blake3 import blake3

from crypto.encoding import encode
from crypto.identity import PeerId
from gossip.averaging.group import Aggregate

RUN_PURPOSE = b"peerloom averaging run\0"
OWNED_RUN_PURPOSE = b"peerloom averaging run of an owner\0"
TENSORS_MAX = 1 << 17
"""Tensors of one run: some ten for each of ten thousand layers."""

Row = tuple[str, tuple[int, ...], str]
"""Name, shape, type."""


def run_key(name: str) -> bytes:
    """The 32 bytes by which a run's name is known on the wire."""
    return blake3(RUN_PURPOSE + name.encode()).digest()


def owned_run_key(name: str, owner: PeerId) -> bytes:
    """The same of a run that not everybody may take part in: it is its owner's."""
    return blake3(OWNED_RUN_PURPOSE + owner + name.encode()).digest()


def signature_of(kind: str, rows: Iterable[Row]) -> bytes:
    """The hash of what is averaged: `kind` says of what the tensors are, and how they are used."""
    listed = [[name, list(shape), dtype] for name, shape, dtype in rows]
    return blake3(encode([kind, listed])).digest()


def signatures_of(kind: str, rows: Iterable[Row], aggregate: Aggregate) -> tuple[bytes, Mapping[bytes, str]]:
    """Return the hash of what is averaged by this rule, and those of the same by any other, which a peer
    that is met under another rule is known by."""
    listed = tuple(rows)
    found = {
        rule: signature_of(kind if rule == "mean" else f"{kind}, {rule}", listed)
        for rule in get_args(Aggregate)
    }
    return found.pop(aggregate), {signature: rule for rule, signature in found.items()}
