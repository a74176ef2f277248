"""The members of a run in local mode as one of them sees them, and the free nodes that it can use."""

from collections.abc import Mapping
from functools import partial

from crypto.identity import PeerId
from gossip.roster import Report
from node.averaging.participation import Participation
from node.local.column import ColumnStage, StageServer
from node.local.context import Service
from node.local.holder import ColumnHolder
from node.protocols.manifest import Run
from node.seams import Stage
from partition.plan.plan import Plan
from partition.run.admission import Admission
from partition.run.ending import Ending


class Crew:
    """The crew of one member: `node.local.recruiter.Asker`. Parts of the run are added as the member opens
    them."""

    def __init__(
        self, me: PeerId, run: Run, ending: Ending, admission: Admission, *, is_training: bool
    ) -> None:
        self.is_training = is_training
        self.part: Participation | None = None
        self.column: ColumnStage | None = None
        self.server: StageServer | None = None
        """This member's stage, where it works for the head of a column."""
        self.further: dict[int, ColumnHolder] = {}
        """The stages that this member holds beside its own."""
        self.taken: set[int] = set()
        """The numbers of `further` stages, including those being opened."""
        self.awaits_head = False
        """Whether all earlier heads are gone, and no node here has a copy of their numbers."""
        self.agreed: set[PeerId] = set()
        """The nodes that agreed to be heads when this member asked them."""
        self.has_asked = False
        """Whether this member has asked every node once that could take part."""
        self._me = me
        self._run = run
        self._ending = ending
        self._admission = admission

    def open_column(self, service: Service, plan: Plan, own: Stage, bytes_max: int) -> ColumnStage:
        """Make the column that this member is the head of, of the stages in `plan`."""
        self.column = ColumnStage(
            self._run.id,
            own,
            len(plan.stages),
            service.seams.network,
            metrics=len(self._run.manifest.metrics),
            payload_bytes_max=bytes_max,
        )
        self.column.computed = partial(service.receipts.computed_stage, self._run, plan)
        return self.column

    @property
    def reports(self) -> Mapping[PeerId, Report]:
        """Return the reports of the others that hold the same stage."""
        return {} if self.part is None else self.part.roster.reports

    @property
    def others(self) -> tuple[PeerId, ...]:
        """Return the others that hold the same stage."""
        return tuple(self.reports)

    @property
    def training(self) -> list[PeerId]:
        """Return the others that have a state."""
        return [peer for peer, report in self.reports.items() if report.has_state]

    @property
    def parts(self) -> list[Participation]:
        """Return the rosters that this member is in, its own stage's first."""
        own = [] if self.part is None else [self.part]
        return own + [holder.held.part for holder in self.further.values()]

    def serving(self, stage: int) -> StageServer | None:
        """Return the stage with this number, where it can work for heads."""
        return next((server for server in self.servers if server.number == stage), None)

    @property
    def head(self) -> PeerId | None:
        """The head that this member works for."""
        if self.server is None:
            return None
        return next((server.head for server in self.servers if server.head is not None), None)

    @property
    def servers(self) -> list[StageServer]:
        """The stages here that can work for heads, this member's own first."""
        own = [] if self.server is None else [self.server]
        return own + [holder.server for holder in self.further.values()]

    @property
    def column_peers(self) -> tuple[PeerId, ...]:
        """The other members of this one's column."""
        if self.column is not None:
            return self.column.peers
        return () if self.head is None else (self.head,)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that this member's column lacks."""
        return () if self.column is None or self._ending.best is not None else self.column.missing

    def wanted(self, free: int) -> int:
        """Return how many more heads the run can use, where `free` nodes can be asked."""
        others = self.others
        is_first = self._ending.turns.is_first(others) or not self.training
        if not is_first or self._ending.best is not None or self.awaits_head:
            return 0
        heads = self._run.manifest.replicas
        return heads - len(others) - self.is_training if heads else free

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return self.is_training + len(self.training)

    def joined(self, stage: int, peer: PeerId) -> None:
        """Note that a node will hold this stage."""
        if not stage:
            self.agreed.add(peer)
        if stage and self.column is not None:
            self.column.mates[stage][peer] = None

    def asked(self) -> None:
        """Note that all nodes that could take part have been asked once."""
        self.has_asked = True

    @property
    def holders(self) -> list[PeerId]:
        """Return the members known to this head that are not heads."""
        return [peer for peer in self._admission.admitted if peer not in self.reports]

    @property
    def known(self) -> set[PeerId]:
        """Return the nodes that need not be asked."""
        return {self._me, *self.others, *self.column_peers}
