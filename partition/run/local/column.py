"""The column of a head: the holder of each of its stages, and the peers to ask if a stage has no holder.

The loss of a holder breaks the column: the open step is dropped everywhere, and the head looks for a new
holder of that stage. The new holder may be one whose own head is gone, or a node with a free slot. Other
heads name the holders that they know, because a free holder may be unknown to the head that needs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from crypto.identity import PeerId
from partition.run.local.column_messages import MATES_MAX
from partition.run.local.courses import AttachTo, Course
from partition.run.local.seat import StageSeat

HEADS_ASKED = 2
"""Number of other heads asked per search while a stage is missing. All heads are asked in turn."""


@dataclass(frozen=True)
class WorkHere:
    """Start to use a stage that the head holds itself, if it is ready. No answer."""

    stage: int


class ColumnHolders:
    """The holders of a head's `count` stages, except the first, which the head holds itself."""

    def __init__(self, count: int) -> None:
        self.attached: dict[int, PeerId] = {}
        """The other nodes that work for this head, by stage."""
        self.here: dict[int, StageSeat] = {}
        """The stages that the head itself holds in addition to the first; some of them may work for it
        now."""
        self.mates: dict[int, dict[PeerId, None]] = {stage: {} for stage in range(1, count)}
        """The reported holders of each stage."""
        self.has_looked = False
        """Whether a search for holders has been made."""
        self.is_older = False
        """Whether the last peer asked is fetching a newer state."""
        self._count = count
        self._hosts: dict[int, PeerId] = {}
        """Peers that agreed to hold a stage in addition to the stage that they hold for this column."""
        self._heads_asked = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages without a holder in this column."""
        held = {*self.attached, *(stage for stage, seat in self.here.items() if seat.head is not None)}
        return tuple(stage for stage in range(1, self._count) if stage not in held)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The other nodes of this column."""
        return tuple(dict.fromkeys(self.attached.values()))

    def agreed(self, stage: int, peer: PeerId) -> None:
        """Note that a peer will hold this stage, possibly in addition to another one."""
        self._hosts[stage] = peer
        self.mates[stage] = {peer: None, **self.mates[stage]}

    # Looking for holders

    def mend(self, known: Sequence[PeerId], heads: Sequence[PeerId]) -> Course[None]:
        """Find holders for the missing stages: ask first their reported holders, then other members. If none
        agrees, ask some of the other `heads`, which may name holders to try next time."""
        for stage in self.missing:
            if stage in self.here:
                yield WorkHere(stage)
                continue
            for peer in self._candidates(stage, known):
                if (yield AttachTo(stage, peer)):
                    break
            else:
                for head in self._heads_to_ask(heads):
                    yield AttachTo(stage, head)
        self.has_looked = True

    def _candidates(self, stage: int, known: Sequence[PeerId]) -> list[PeerId]:
        """Return the peers to ask for a missing stage, in order: first its reported holders, then other
        `known` members."""
        taken = set(self.peers) - {self._hosts.get(stage)}
        return [peer for peer in dict.fromkeys((*self.mates[stage], *known)) if peer not in taken]

    def _heads_to_ask(self, heads: Sequence[PeerId]) -> list[PeerId]:
        """Return the heads to ask for names of holders if no candidate takes a stage."""
        first, self._heads_asked = self._heads_asked, self._heads_asked + HEADS_ASKED
        return [heads[number % len(heads)] for number in range(first, first + min(HEADS_ASKED, len(heads)))]

    def wants_copies(self, stage: int) -> bool:
        """Return whether the holder of a stage should keep copies of the first stage. One such holder
        suffices."""
        return not any(self.attached.keys() - {stage})

    def asking(self) -> None:
        """Note that a peer is being asked."""
        self.is_older = False

    def failed(self, stage: int, peer: PeerId) -> None:
        """Note that a peer did not answer, or could not prove its membership."""
        self.mates[stage].pop(peer, None)
        if self._hosts.get(stage) == peer:
            del self._hosts[stage]

    def refused(self, stage: int, peer: PeerId, named: Sequence[PeerId], *, is_older: bool) -> None:
        """Note that a peer refused to work for this head. The peers `named` may hold the stage."""
        self.is_older = is_older
        self._learn(stage, [mate for mate in named if mate != peer])

    def took(self, stage: int, peer: PeerId, named: Sequence[PeerId]) -> None:
        """Note that a peer works for this head. The peers `named` hold the same stage."""
        self._learn(stage, [peer, *named])
        self.attached[stage] = peer

    def _learn(self, stage: int, peers: Sequence[PeerId]) -> None:
        found = {**dict.fromkeys(peers), **self.mates[stage]}
        self.mates[stage] = dict(list(found.items())[:MATES_MAX])

    # Losing holders

    def lost(self, stage: int) -> None:
        """Note that the holder of a stage is gone, or was given up."""
        peer = self.attached.pop(stage, None)
        if peer is not None:
            self.mates[stage].pop(peer, None)

    def expel(self, peer: PeerId) -> list[int]:
        """Forget a peer that is no longer a member; return the stages that it holds for this head."""
        for mates in self.mates.values():
            mates.pop(peer, None)
        return [stage for stage, holder in self.attached.items() if holder == peer]
