"""The results that the members of an attempt declare."""

from collections.abc import Collection, Sequence
from math import inf

from crypto.errors import RemoteProtocolError


class Agreement:
    """This member's result, once it holds all parts, and the results that the others declare.

    `others` are the positions of the other members; members in `unawaited` are not waited for. A declared
    difference proves nothing. The facts behind a result can be proof, so two members that differ send each
    other their facts.
    """

    def __init__(self, others: Sequence[int], unawaited: Collection[int]) -> None:
        self._others = others
        self._unawaited = frozenset(unawaited)
        self._told: dict[int, bytes] = {}
        self._answered: set[int] = set()
        self.digest = b""
        """The digest of this member's result; empty until the member holds all parts."""
        self.until = inf
        """The time at which to stop waiting for other declarations."""

    def declare(self, digest: bytes, until: float) -> list[int]:
        """Declare this member's result. Return the positions of members that declared a different one: each
        of them must be sent, once, the facts behind this member's result."""
        self.digest, self.until = digest, until
        others = [place for place, told in self._told.items() if told != digest]
        self._answered.update(others)
        return others

    def take(self, place: int, digest: bytes) -> bool:
        """Keep a member's declared digest. Return whether it differs and the member must now be sent the
        facts behind this member's result.

        Raises RemoteProtocolError if the member declared a different digest before.
        """
        if self._told.setdefault(place, digest) != digest:
            raise RemoteProtocolError("two digests of one member's result")
        if not self.digest or digest == self.digest or place in self._answered:
            return False
        self._answered.add(place)
        return True

    def undeclared(self, lost: Collection[int]) -> list[int]:
        """Return the members, except lost ones, that have not declared the same result."""
        return [
            place
            for place in self._others
            if place not in lost and (not self.digest or self._told.get(place) != self.digest)
        ]

    def awaited(self, lost: Collection[int]) -> list[int]:
        """Return the undeclared members that are waited for."""
        return [place for place in self.undeclared(lost) if place not in self._unawaited]
