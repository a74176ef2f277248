"""Lives of members that newer ones displaced, to be told to whichever process answers as that member.

A member list holds one alive fact of each peer, the newest. Those of a few lives before are kept here, and
told for a while: so a copy of a data folder hears of its original, and the original of the copy. A process
that was started again hears of its own past, where nobody is any more. Not here: what it makes of that
(`gossip.other_lives`).
"""

from collections.abc import Mapping

from crypto.facts import Fact
from crypto.identity import PeerId
from crypto.token_buckets import TokenBucket
from gossip.messages import FACT_BYTES_MAX, LIFE_BYTES, AliveBody, AliveFact, Gossip, fact_bytes, read_body
from gossip.table import MemberRow

DISPLACED_MAX = 64
"""Members of which displaced lives are kept."""
DISPLACED_LIVES_MAX = 4
"""Displaced lives of one member, the latest. An original displaces each copy, and so remains among them."""
TOLD_INTERVALS = 10
"""Probe intervals for which displaced lives are told: any one message may be lost, or go to the wrong
process."""

WRITTEN_MAX = 6.0
WRITTEN_INTERVALS = 3.0
"""Messages about lives sent at once, and then one in this many probe intervals: a peer that changes its life
with each message would make all others write to it. Beyond them lives are told with messages that are sent
anyway."""


class DisplacedLives:
    """Facts of displaced lives, and for how long they are told; `waits` says whether any are."""

    __slots__ = ("_facts", "_left", "_met", "_turn", "_written", "waits")

    def __init__(self, interval_seconds: float, now: float) -> None:
        self._written = TokenBucket(1 / (WRITTEN_INTERVALS * interval_seconds), WRITTEN_MAX, WRITTEN_MAX, now)
        self._facts: dict[PeerId, dict[bytes, Fact]] = {}
        # Probe intervals for which those of a peer are told.
        self._left: dict[PeerId, int] = {}
        # Those that have spoken to this peer itself: it writes to them. Others are told where there is a
        # message for them anyway, or each life would hear from a whole swarm.
        self._met: set[PeerId] = set()
        self._turn = 0
        self.waits = False

    def note(self, held: AliveFact, said: AliveFact, *, speaks: bool) -> None:
        """Note the life in which a member speaks, new or the one held: to this peer itself (`speaks`), or
        through others."""
        before, now = read_body(held.fact), read_body(said.fact)
        if not (isinstance(before, AliveBody) and isinstance(now, AliveBody)) or before.life == now.life:
            return
        if len(before.life) != LIFE_BYTES or len(now.life) != LIFE_BYTES:
            return  # a fact that names no life tells nobody of another one
        facts = self._facts.pop(said.peer, {})
        for life in (before.life, now.life):
            facts.pop(life, None)
        facts[before.life] = held.fact
        if len(facts) > DISPLACED_LIVES_MAX:
            del facts[next(iter(facts))]
        self._facts[said.peer] = facts
        self._left[said.peer] = TOLD_INTERVALS
        self.waits = True
        if speaks:
            self._met.add(said.peer)
        if len(self._facts) > DISPLACED_MAX:
            self.forget(next(iter(self._facts)))

    def of(self, peer: PeerId) -> tuple[Fact, ...]:
        """Return the facts to tell `peer`; usually none."""
        return tuple(self._facts[peer].values()) if peer in self._left else ()

    def next(self, held: AliveFact) -> Fact | None:
        """Return one fact for a message to the peer whose fact `held` is: each of its lives in turn, since it
        is unknown which of them will read it."""
        facts = self.of(held.peer)
        if not facts:
            return None
        self._turn += 1
        return (*facts, held.fact)[self._turn % (len(facts) + 1)]

    def next_interval(self, now: float, rows: Mapping[PeerId, MemberRow]) -> list[tuple[PeerId, Gossip]]:
        """Begin a probe interval; return the messages to send."""
        if not self.waits:
            return []
        self._left = {peer: left - 1 for peer, left in self._left.items() if left > 1}
        self._met.intersection_update(self._left)
        self.waits = bool(self._left)
        # Those that have just begun first: the others were written to before.
        met = sorted((peer for peer in self._left if peer in self._met), key=lambda peer: -self._left[peer])
        return [(peer, Gossip(self._message(rows[peer]))) for peer in met if self._written.take(now)]

    def _message(self, row: MemberRow) -> tuple[Fact, ...]:
        """Return as many lives of a peer as fit a message, the present one first."""
        held = row.said.fact
        facts, room = [held], FACT_BYTES_MAX - fact_bytes(held)
        for fact in reversed(self.of(row.peer)):
            if fact_bytes(fact) <= room:
                room -= fact_bytes(fact)
                facts.append(fact)
        return tuple(facts)

    def forget(self, peer: PeerId) -> None:
        """Drop what is kept of `peer`."""
        self._facts.pop(peer, None)
        self._left.pop(peer, None)
        self._met.discard(peer)
        self.waits = bool(self._left)
