"""What a run averages, as one hash: peers whose tensors differ in name, shape or type never meet in a
group."""

from collections.abc import Iterable

from blake3 import blake3

from crypto.encoding import encode

RUN_PURPOSE = b"peerloom averaging run\0"
TENSORS_MAX = 1 << 17
"""Tensors of one run: some ten for each of ten thousand layers."""

Row = tuple[str, tuple[int, ...], str]
"""Name, shape, type."""


def run_key(name: str) -> bytes:
    """The 32 bytes by which a run's name is known on the wire."""
    return blake3(RUN_PURPOSE + name.encode()).digest()


def signature_of(kind: str, rows: Iterable[Row]) -> bytes:
    """The hash of what is averaged: `kind` says of what the tensors are, and how they are used."""
    listed = [[name, list(shape), dtype] for name, shape, dtype in rows]
    return blake3(encode([kind, listed])).digest()
