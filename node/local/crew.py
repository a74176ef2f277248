"""The members of a run in local mode as one member knows them, together with the parts that this member
drives under trio."""

from collections.abc import Mapping
from functools import partial

from crypto.identity import PeerId
from gossip.roster import Report
from node.averaging.participation import Participation
from node.local.column import ColumnStage
from node.local.context import LocalRunsService
from node.local.holder import ColumnHolder
from node.local.stage_server import StageServer
from node.protocols.manifest import Run
from node.seams import Stage
from partition.plan.plan import Plan
from partition.run.admission import Admission
from partition.run.ending import Ending
from partition.run.local.crew import MemberCrew
from partition.run.local.seat import StageSeat


class Crew(MemberCrew):
    """The crew of one member."""

    def __init__(
        self, me: PeerId, run: Run, ending: Ending, admission: Admission, *, is_training: bool
    ) -> None:
        super().__init__(
            me,
            ending,
            replicas=run.manifest.replicas,
            is_training=is_training,
            reports=self._rostered,
            admitted=lambda: admission.admitted,
        )
        self.part: Participation | None = None
        self.column: ColumnStage | None = None
        self.server: StageServer | None = None
        """This member's own stage, if it works for the head of a column."""
        self.further: dict[int, ColumnHolder] = {}
        """The further stages of this member."""
        self._run = run

    def _rostered(self) -> Mapping[PeerId, Report]:
        return {} if self.part is None else self.part.roster.reports

    def open_column(self, service: LocalRunsService, plan: Plan, own: Stage, bytes_max: int) -> ColumnStage:
        """Make the column that this member heads, with the stages of `plan`."""
        self.column = ColumnStage(
            self._run.id,
            own,
            len(plan.stages),
            service.seams.network,
            metrics=len(self._run.manifest.metrics),
            payload_bytes_max=bytes_max,
        )
        self.holders_of = self.column.holders
        self.column.computed = partial(service.receipts.computed_stage, self._run, plan)
        return self.column

    def open_server(self, server: StageServer) -> None:
        """Let this member's own stage work for heads."""
        self.server, self.own_seat = server, server.seat

    def close(self) -> None:
        """Stop taking part."""
        if self.server is not None:
            self.server.close()
        self.part = self.column = self.server = self.holders_of = self.own_seat = None

    @property
    def parts(self) -> list[Participation]:
        """The rosters that this member is in, with its own stage's first."""
        own = [] if self.part is None else [self.part]
        return own + [holder.held.part for holder in self.further.values()]

    @property
    def further_seats(self) -> list[StageSeat]:
        return [holder.server.seat for holder in self.further.values()]

    def serving(self, stage: int) -> StageServer | None:
        """Return the stage with this number, if it can work for heads."""
        return next((server for server in self.servers if server.number == stage), None)

    @property
    def servers(self) -> list[StageServer]:
        """The stages here that can work for heads, this member's own first."""
        own = [] if self.server is None else [self.server]
        return own + [holder.server for holder in self.further.values()]
