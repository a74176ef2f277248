"""The signed statements of an attempt's members, by purpose and author, and the proofs that a member made two
different ones."""

from collections.abc import Collection, Sequence

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip.averaging.outcome import Equivocation


class Statements:
    """All statements of one attempt. `peers` are the members in the order of their places; `place` is this
    member's."""

    def __init__(self, signer: Signer, peers: Sequence[PeerId], place: int) -> None:
        self._signer = signer
        self._peers = peers
        self._place = place
        self.facts: dict[tuple[str, int], Fact] = {}
        self.equivocations: dict[tuple[str, int], Equivocation] = {}
        """Proofs of lies, keyed by purpose and author's place; one of each kind."""

    def make(self, purpose: str, body: bytes) -> Fact:
        """Sign a statement as this member."""
        fact = self.facts[purpose, self._place] = self._signer.sign(purpose, body)
        return fact

    def author_of(self, purpose: str, fact: Fact) -> int:
        """Return the place of the author of a fact. The signature is checked unless the fact is already
        known. Raises RemoteProtocolError if the signature is wrong, or if the author is this member or
        outside the group."""
        author = self._peers.index(PeerId(fact.author)) if fact.author in self._peers else -1
        if author < 0 or self.facts.get((purpose, author)) != fact:
            self._signer.check(purpose, fact)
            if author in (-1, self._place):
                raise RemoteProtocolError("a peer from outside the group")
        return author

    def is_new(self, purpose: str, author: int, fact: Fact) -> bool:
        """Return whether this is the author's first statement. A second, different statement proves that its
        author lied; it proves nothing about the sender."""
        first = self.facts.setdefault((purpose, author), fact)
        if first.body != fact.body and (purpose, author) not in self.equivocations:
            self.equivocations[purpose, author] = Equivocation(self._peers[author], purpose, first, fact)
        return first is fact

    def of_others_than(self, place: int, purposes: Collection[str]) -> list[tuple[str, Fact]]:
        """Return the known statements with these purposes, except those of the member at `place`."""
        return [
            (purpose, fact)
            for (purpose, author), fact in self.facts.items()
            if purpose in purposes and author != place
        ]
