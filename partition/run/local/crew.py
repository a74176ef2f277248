"""The members of a run in local mode, as one member knows them: its rosters, its column, and its seats."""

from collections.abc import Callable, Collection, Sequence

from crypto.identity import PeerId
from partition.run.ending import Ending
from partition.run.local.column import ColumnHolders
from partition.run.local.reports import Reports, training
from partition.run.local.seat import StageSeat


class MemberCrew:
    """The crew of one member: the other members it works with, and its own seats. Parts are added as the
    member opens them."""

    def __init__(
        self,
        me: PeerId,
        ending: Ending,
        *,
        replicas: int,
        is_training: bool,
        reports: Callable[[], Reports],
        admitted: Callable[[], Collection[PeerId]],
    ) -> None:
        """`replicas` is the wanted number of heads, 0 for as many as possible. `reports` returns the reports
        of the other holders of the same stage, `admitted` all known members."""
        self.is_training = is_training
        self.holders_of: ColumnHolders | None = None
        """The holders of the stages of this member's column; None if this member is not a head."""
        self.own_seat: StageSeat | None = None
        """The seat of this member's stage, if it works for the head of a column."""
        self.taken: set[int] = set()
        """The stages that this member holds in addition to its own, including those that are being opened."""
        self.awaits_head = False
        """Whether all earlier heads are gone, and no node here has a copy of their parameters."""
        self.agreed: set[PeerId] = set()
        """The nodes that agreed to be heads when this member asked."""
        self.has_asked = False
        """Whether this member has asked every possible node once."""
        self.me = me
        self.ending = ending
        self._replicas = replicas
        self._reports = reports
        self.admitted = admitted

    @property
    def reports(self) -> Reports:
        """Return the reports of the other holders of the same stage."""
        return self._reports()

    @property
    def others(self) -> tuple[PeerId, ...]:
        """Return the other holders of the same stage."""
        return tuple(self.reports)

    @property
    def training(self) -> list[PeerId]:
        """The other holders of the same stage that have a state."""
        return training(self.reports)

    @property
    def further_seats(self) -> Sequence[StageSeat]:
        """The seats of the stages that this member holds in addition to its own."""
        return ()

    @property
    def seats(self) -> list[StageSeat]:
        """The seats here that can work for heads, this member's own first; none if this member is a head."""
        return [] if self.own_seat is None else [self.own_seat, *self.further_seats]

    @property
    def head(self) -> PeerId | None:
        """The head that this member works for."""
        return next((seat.head for seat in self.seats if seat.head is not None), None)

    @property
    def column_peers(self) -> tuple[PeerId, ...]:
        """The other members of this member's column."""
        if self.holders_of is not None:
            return self.holders_of.peers
        return () if self.head is None else (self.head,)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages without a holder in this member's column."""
        return () if self.holders_of is None or self.ending.best is not None else self.holders_of.missing

    def wanted(self, free: int) -> int:
        """Return how many more heads the run can use, with `free` nodes to ask."""
        others = self.others
        is_first = self.ending.turns.is_first(others) or not self.training
        if not is_first or self.ending.best is not None or self.awaits_head:
            return 0
        return self._replicas - len(others) - self.is_training if self._replicas else free

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.is_training + len(self.training)

    @property
    def holders(self) -> list[PeerId]:
        """The members known to this head that are not heads."""
        reports = self.reports
        return [peer for peer in self.admitted() if peer not in reports]

    @property
    def known(self) -> set[PeerId]:
        """The nodes that this member need not ask."""
        return {self.me, *self.others, *self.column_peers}

    def joined(self, stage: int, peer: PeerId) -> None:
        """Note that a node has agreed to hold this stage."""
        if not stage:
            self.agreed.add(peer)
        elif self.holders_of is not None:
            self.holders_of.mates[stage][peer] = None

    def asked(self) -> None:
        """Note that all nodes that could take part have been asked once."""
        self.has_asked = True

    # The end of the run

    def judges(self, stage: int, stages: int, *, has_state: bool) -> bool:
        """Return whether this member, which holds `stage` of `stages`, tests a result before it accepts it. A
        head does so, but a head with a column only if the column is complete."""
        return self.is_training and not stage and (has_state or stages == 1)

    def trusts(self, stage: int) -> bool:
        """Return whether the preferred conclusion is held by this member's head or, if it has no head, by at
        least half of the training members. A member that does not train cannot test the conclusion itself."""
        if self.head is not None:
            return self.head in self.ending.holders
        return bool(stage) or 2 * len(self.ending.holders) >= len(self.training)

    def electorate(
        self, stage: int, stages: int, *, has_state: bool
    ) -> tuple[list[PeerId] | None, list[PeerId]]:
        """Return the members with a state (None if this member tests no result), and the known voters."""
        training = self.training
        trainers = [*training, *([self.me] * has_state)]
        voters = training if not stage else [] if self.head is None else [self.head]
        return (trainers if self.judges(stage, stages, has_state=has_state) else None), voters
