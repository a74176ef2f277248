"""Suites of a cipher and a key agreement: names, wire numbers, and an order of preference.

All use X25519 and SHA-256. Peers settle on one suite in `negotiation`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from crypto.errors import LocalProtocolError
from crypto.noise import kem


@dataclass(frozen=True)
class Suite:
    """A cipher and key agreement. `number` identifies the suite on the wire and is never reused; `hybrid`
    adds ML-KEM-768."""

    number: int
    name: str
    cipher: str
    hybrid: bool

    def pattern(self, *, private: bool) -> str:
        """Return the suite's handshake pattern in an open or a private swarm."""
        if self.hybrid:
            return "XXhfs+psk3" if private else "XXhfs"
        return "XXpsk3" if private else "XX"


SUITES = (
    Suite(1, "AESGCM", "AESGCM", hybrid=False),
    Suite(2, "ChaChaPoly", "ChaChaPoly", hybrid=False),
    Suite(3, "MLKEM768-AESGCM", "AESGCM", hybrid=True),
    Suite(4, "MLKEM768-ChaChaPoly", "ChaChaPoly", hybrid=True),
)


def _working(has_kem: bool | None) -> list[Suite]:
    has_kem = kem.is_offered() if has_kem is None else has_kem
    return [suite for suite in SUITES if has_kem or not suite.hybrid]


def preferred(*, has_aes: bool, has_kem: bool | None = None) -> tuple[Suite, ...]:
    """Return all suites that work here, best first: first those with the longest-lasting secrecy, then those
    that are fastest on this CPU.

    `has_aes`: the CPU has AES instructions. With them AES is several times as fast as ChaCha; without them it
    is several times as slow. `has_kem`: the library has ML-KEM; None checks the library.
    """
    first = "AESGCM" if has_aes else "ChaChaPoly"
    return tuple(sorted(_working(has_kem), key=lambda suite: (not suite.hybrid, suite.cipher != first)))


def suites_named(names: Iterable[str], *, has_kem: bool | None = None) -> tuple[Suite, ...]:
    """Return the suites with these names, in that order. Raises LocalProtocolError for a suite that does not
    exist or does not work here. `has_kem` is as in `preferred`."""
    by_name = {suite.name: suite for suite in _working(has_kem)}
    try:
        return tuple(by_name[name] for name in names)
    except KeyError as unknown:
        raise LocalProtocolError(
            f"suite {unknown} does not exist or does not work here; available: {', '.join(by_name)}"
        ) from None
