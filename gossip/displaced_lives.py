"""Facts of member lives that were displaced by newer lives, to be sent to the processes that answer as that
member.

A life is one start of a process with an identity. A member list holds one alive fact of each peer, the
newest. Facts of a few earlier lives are kept here and sent for a while, so that a copy of a data folder
learns of its original, and the original of the copy. A restarted process also receives facts of its own past
lives, which have ended. Not here: what the process concludes from them (`gossip.other_lives`).
"""

from collections.abc import Mapping

from crypto.facts import Fact
from crypto.identity import PeerId
from crypto.token_buckets import TokenBucket
from gossip.messages import FACT_BYTES_MAX, LIFE_BYTES, AliveBody, AliveFact, Gossip, fact_bytes, read_body
from gossip.table import MemberRow

DISPLACED_MAX = 64
"""Maximum number of members whose displaced lives are kept."""
DISPLACED_LIVES_MAX = 4
"""Maximum number of displaced lives kept per member, the latest ones. An original displaces each of its
copies, so it stays among them."""
TOLD_INTERVALS = 10
"""Number of probe intervals during which displaced lives are sent: a message may be lost, or reach the wrong
process."""

WRITTEN_MAX = 6.0
WRITTEN_INTERVALS = 3.0
"""Limit on extra messages about lives: the burst size, and the number of probe intervals after which one more
is allowed. Otherwise a peer that changes its life with each message would make all others write to it. Beyond
the limit, lives are sent only along with other messages."""


class DisplacedLives:
    """Facts of displaced lives, and how long to send them; `waits` says whether there are any to send."""

    __slots__ = ("_facts", "_left", "_met", "_turn", "_written", "waits")

    def __init__(self, interval_seconds: float, now: float) -> None:
        self._written = TokenBucket(1 / (WRITTEN_INTERVALS * interval_seconds), WRITTEN_MAX, WRITTEN_MAX, now)
        self._facts: dict[PeerId, dict[bytes, Fact]] = {}
        # Remaining probe intervals by peer.
        self._left: dict[PeerId, int] = {}
        # Peers that have contacted this peer directly. Only to these does it send extra messages about lives;
        # other peers receive facts only with other messages. Otherwise the whole swarm would write to each
        # life.
        self._met: set[PeerId] = set()
        self._turn = 0
        self.waits = False

    def note(self, held: AliveFact, said: AliveFact, *, speaks: bool) -> None:
        """Compare the life in a member's new fact `said` with that in the fact `held`, and keep the held fact
        if the lives differ. `speaks`: the member sent the fact directly to this peer."""
        before, now = read_body(held.fact), read_body(said.fact)
        if not (isinstance(before, AliveBody) and isinstance(now, AliveBody)) or before.life == now.life:
            return
        if len(before.life) != LIFE_BYTES or len(now.life) != LIFE_BYTES:
            return  # a fact without a life says nothing about other lives
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
        """Return the facts to send to `peer`; usually none."""
        return tuple(self._facts[peer].values()) if peer in self._left else ()

    def next(self, held: AliveFact) -> Fact | None:
        """Return one fact to add to a message to the peer that `held` describes. The lives take turns,
        because any of them may receive the message."""
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
        # Members with the newest displaced lives first: this peer has already written to the others.
        met = sorted((peer for peer in self._left if peer in self._met), key=lambda peer: -self._left[peer])
        return [(peer, Gossip(self._message(rows[peer]))) for peer in met if self._written.take(now)]

    def _message(self, row: MemberRow) -> tuple[Fact, ...]:
        """Return as many life facts of a peer as fit into a message, the current one first."""
        held = row.said.fact
        facts, room = [held], FACT_BYTES_MAX - fact_bytes(held)
        for fact in reversed(self.of(row.peer)):
            if fact_bytes(fact) <= room:
                room -= fact_bytes(fact)
                facts.append(fact)
        return tuple(facts)

    def forget(self, peer: PeerId) -> None:
        """Discard the facts about `peer`."""
        self._facts.pop(peer, None)
        self._left.pop(peer, None)
        self._met.discard(peer)
        self.waits = bool(self._left)
