"""The results that the members of an attempt say they hold."""

from collections.abc import Collection, Sequence
from math import inf

from crypto.errors import RemoteProtocolError


class Agreement:
    """What this member holds once it holds all parts, and what the others say that they hold.

    `others` are their places; nobody waits for those in `unawaited`. That a member says it holds something
    else proves nothing: what both go by does, which they send each other.
    """

    def __init__(self, others: Sequence[int], unawaited: Collection[int]) -> None:
        self._others = others
        self._unawaited = frozenset(unawaited)
        self._told: dict[int, bytes] = {}
        self._answered: set[int] = set()
        self.digest = b""
        """The digest of what this member holds; empty before it holds all."""
        self.until = inf
        """When to wait no longer for what others say."""

    def declare(self, digest: bytes, until: float) -> list[int]:
        """This member holds a result; return the places of those that said otherwise: each is to be sent what
        this one goes by, once."""
        self.digest, self.until = digest, until
        others = [place for place, told in self._told.items() if told != digest]
        self._answered.update(others)
        return others

    def take(self, place: int, digest: bytes) -> bool:
        """Keep what a member says; return whether it is to be sent what this one goes by, which holds
        something else.

        Raises RemoteProtocolError: it said something else before.
        """
        if self._told.setdefault(place, digest) != digest:
            raise RemoteProtocolError("two digests of one member's result")
        if not self.digest or digest == self.digest or place in self._answered:
            return False
        self._answered.add(place)
        return True

    def undeclared(self, lost: Collection[int]) -> list[int]:
        """The members, without the lost ones, that have not said that they hold the same."""
        return [
            place
            for place in self._others
            if place not in lost and (not self.digest or self._told.get(place) != self.digest)
        ]

    def awaited(self, lost: Collection[int]) -> list[int]:
        """Those of them that are waited for."""
        return [place for place in self.undeclared(lost) if place not in self._unawaited]
