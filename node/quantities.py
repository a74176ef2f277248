"""Quantities and their readers: durations, amounts of memory, data rates and computing rates. No I/O.

All share one grammar: a number, an optional blank, and a unit in any case. Every flag and key that takes a
quantity uses one of these readers, directly or through another reader. Each raises ValueError with a
description of valid texts.
"""

import re
from dataclasses import dataclass

_NUMBER = r"(\d{1,20}(?:\.\d{1,20})?)"
AMOUNT_MAX = (1 << 63) - 1
"""The largest integer in documents that a node reads."""
_TIME = re.compile(_NUMBER + r" *(us|ms|s|min|m|h|d)?", re.ASCII | re.IGNORECASE)
_AMOUNT = re.compile(_NUMBER + r" *([kmgtp]i?)?b", re.ASCII | re.IGNORECASE)
_FLOPS = re.compile(_NUMBER + r" *([kmgtpe])?flop(?:s|/s)", re.ASCII | re.IGNORECASE)
_BIT_RATE = re.compile(_NUMBER + r" *([kmgtp])?(?:bit(?:/s|ps)?|bps)", re.ASCII | re.IGNORECASE)
_BYTE_RATE = re.compile(_NUMBER + r" *([kmgtpKMGTP]i?)?(?:B|[Bb]yte)(?:/s|ps)?", re.ASCII)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_EXPONENTS = {letter: number for number, letter in enumerate("_kmgtpe")}


def read_duration(text: str) -> float:
    """Return `500ms`, `30s`, `2m`, `1h` or `2d` in seconds; a bare number is seconds."""
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError("want a time such as 500ms, 30s, 10m, 12h or 2d")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def read_bytes(text: str) -> int:
    """Return `8GB` (units of 1000), `512MiB` (units of 1024) or `100B` in bytes."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not (found := _scaled(match)):
        raise ValueError("want an amount such as 12GB, 8GiB or 800MiB")
    return found


def read_flops(text: str) -> int:
    """Return `50GFLOPS` or `50 GFLOP/s` in operations per second."""
    match = _FLOPS.fullmatch(text.strip())
    if match is None or not (found := _scaled(match)):
        raise ValueError("want a rate of computing such as 50GFLOPS")
    return found


def read_rate(text: str) -> int:
    """Return `100Mbit`, `10Mbit/s`, `10Mbps` or `12.5MB/s` in bytes per second.

    A lone small `b` is refused, because it may mean bits or bytes.
    """
    text = text.strip()
    if match := _BIT_RATE.fullmatch(text):
        found = _scaled(match, divided_by=8)
    else:
        match = _BYTE_RATE.fullmatch(text)
        found = _scaled(match) if match else 0
    if not found:
        raise ValueError("want a rate such as 10Mbit/s or 1.5MB/s")
    return found


def _scaled(match: "re.Match[str]", divided_by: int = 1) -> int:
    prefix = (match[2] or "_").lower()
    found = float(match[1]) * (1024 if prefix.endswith("i") else 1000) ** _EXPONENTS[prefix[0]] / divided_by
    return int(found) if found <= AMOUNT_MAX else 0


@dataclass(frozen=True)
class Memory:
    """An amount of memory: bytes, or a fraction of the device's memory."""

    bytes: int = 0
    fraction: float = 0.0

    def of(self, total_bytes: int) -> int:
        """Return the amount in bytes on a device with `total_bytes`, at most `total_bytes`."""
        return min(self.bytes or int(self.fraction * total_bytes), total_bytes)

    def __str__(self) -> str:
        """Return the amount as a person writes it: `16GiB`, `12GB`, `80%`."""
        if not self.bytes:
            return f"{self.fraction * 100:g}%"
        for power, letter in zip((4, 3, 2, 1), "TGMK", strict=True):
            for base, unit in ((1024, "iB"), (1000, "B")):
                if self.bytes % base**power == 0:
                    return f"{self.bytes // base**power}{letter}{unit}"
        return f"{self.bytes / 1e9:.3g} GB"


def read_memory(text: str) -> Memory:
    """Read `12GB`, `800 MiB` or `80%`."""
    if match := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?) ?%", text.strip()):
        if 0 < float(match[1]) <= 100:
            return Memory(fraction=float(match[1]) / 100)
        raise ValueError("want an amount, or a share of at most 100%, such as 80%")
    try:
        return Memory(bytes=read_bytes(text))
    except ValueError as error:
        raise ValueError(f"{error}, or 80%") from None
