"""Regrouping of a head's column: nodes take stages whose machines are gone, and give them to newcomers.

A move has to gain as much as one of an exact run (`node.runs.splitting`). Not here: which node is asked, and
when (`partition.run.local.regrouping`), finding free nodes (`recruiter`), the stages (`further`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.errors import Unreachable
from node.local.column import ColumnStage
from node.local.context import LocalRunsService
from node.local.crew import Crew
from node.local.further import FurtherStages
from node.local.recruiter import JOIN_SECONDS_MAX, Recruiter
from node.placement.leases import Offer, problem_of, rounded
from node.protocols.manifest import Run
from node.protocols.runs import Join
from node.runs.rebalancing import ASSUMED_LINK, PAUSE_NANOSECONDS
from partition.model.graph import Graph
from partition.plan.columns import Takers, moves_that_pay
from partition.plan.observed import Knowledge
from partition.plan.plan import Plan
from partition.plan.problem import Problem
from partition.run.asks import Done
from partition.run.local.regrouping import (
    LOOK_SECONDS,
    RENEW_LOOK_SECONDS,
    AskPromised,
    ColumnRegrouping,
    FindMoves,
)
from partition.run.pauses import GAIN_PERCENT_MIN

MEMORY_BYTES = 1 << 60
"""A node's present holdings always fit, as they were admitted before, whatever it offers by now."""


def column_problem(
    run: Run, graph: Graph, holders: Sequence[Offer], free: Sequence[Offer], knowledge: Knowledge
) -> Problem:
    """Return the planner's problem of a column and free nodes. Raises ValueError, RemoteProtocolError: sizes
    that do not fit."""
    held = [replace(offer, memory_bytes=MEMORY_BYTES) for offer in holders]
    problem = problem_of(run, graph, [*held, *free], knowledge)
    return replace(problem, objective="throughput", default_link=ASSUMED_LINK, hides_links=True)


class Regrouping:
    """The regrouping of a head's column. `run` watches it, `hand_over` is called between two steps."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
        door: TicketGate,
        crew: Crew,
        further: FurtherStages,
        recruiter: Recruiter,
        graph: Graph,
        plan: Plan,
        *,
        step: Callable[[], int],
        tell: Callable[[str], None],
        patience_seconds: float | None,
    ) -> None:
        """Prepare regrouping. `patience_seconds`: how long a stage may have no holder before the column was
        first complete; None for any time. `tell` reports the state of the run."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._door = door
        self._crew = crew
        self._further = further
        self._recruiter = recruiter
        self._graph = graph
        self._plan = plan
        self._step = step
        self._seconds = 0.0
        self._rules = ColumnRegrouping(
            self._now(),
            service.signer.peer,
            plan,
            crew,
            recruiter.choice,
            live=lambda: service.live(),
            further=lambda: further.stages,
            tell=tell,
            patience_seconds=patience_seconds,
        )

    def stepped(self, seconds: float) -> None:
        """Add the duration of a step."""
        self._seconds = seconds if not self._seconds else 0.8 * self._seconds + 0.2 * seconds

    @property
    def _column(self) -> ColumnStage:
        assert self._crew.column is not None, "a head has a column"
        return self._crew.column

    async def run(self) -> None:
        """Regroup the column until cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            deed = self._rules.look(self._now(), self._rates)
            if isinstance(deed, AskPromised):
                if await self._ask(deed.stages[0], deed.peer, is_beside=True):
                    self._rules.expect(self._now(), deed.stages, deed.peer)
                    continue
                deed = self._rules.look(self._now(), self._rates)
            if isinstance(deed, Takers):
                await self._merge(deed)
            elif isinstance(deed, FindMoves):
                await self._move(deed)

    def _rates(self) -> dict[PeerId, int]:
        return {peer: rounded(offer.flops_per_second) for peer, offer in self._offers().items()}

    def _offers(self) -> dict[PeerId, Offer]:
        return {offer.peer: offer for offer in self._service.offers()}

    async def _merge(self, takers: Takers) -> None:
        """Have nodes of this column take the stages that nobody holds."""
        for stage, peer in takers.by_stage.items():
            if not await self._ask(stage, peer, is_beside=True):
                self._rules.refused(self._now(), stage, peer)
                return
            self._rules.taken(self._now(), stage, peer)
        self._rules.merged(takers)

    async def _ask(self, stage: int, peer: PeerId, *, is_beside: bool) -> bool:
        """Ask a node to hold this stage, with `is_beside` in addition to its own; return whether it will."""
        if peer == self._service.signer.peer:
            if await self._further.refusal(stage):
                return False
            self._further.hold(stage)
            return True
        chain = self._door.chain_for(peer)
        if chain is None:
            return False
        try:
            request = Join(self._run.fact, chain, stage, is_beside=is_beside)
            answer = await self._service.ask(peer, request, JOIN_SECONDS_MAX)
        except Unreachable:
            return False
        if isinstance(answer, Done):
            self._column.holders.agreed(stage, peer)
            return True
        return False

    async def _move(self, deed: FindMoves) -> None:
        """Give a stage to a node that could make the column faster, if there is one."""
        moves = await self._moves(deed.column, [*deed.free, *deed.spare])
        if moves is not None and not moves:
            self._rules.useless(deed)
        for stages, peer in moves or ():
            if peer in deed.spare or await self._ask(stages[0], peer, is_beside=False):
                self._rules.expect(self._now(), stages, peer)
                return
            self._recruiter.choice.asking(self._now(), peer)

    async def _moves(
        self, column: Sequence[PeerId], peers: Sequence[PeerId]
    ) -> list[tuple[tuple[int, ...], PeerId]] | None:
        """Return which stages of the `column` could go to which of these peers, the best first; None where
        too little is known of them."""
        offers = self._offers()
        others = [offers[peer] for peer in peers if peer in offers]
        mine = [offers[peer] for peer in dict.fromkeys(column) if peer in offers]
        if not others or len(mine) < len(set(column)):
            return None
        knowledge = await self._service.measurements.learn([offer.peer for offer in (*mine, *others)])
        steps_left = self._run.manifest.steps - self._step()

        def work() -> list[tuple[tuple[int, ...], PeerId]]:
            problem = column_problem(self._run, self._graph, mine, others, knowledge)
            return moves_that_pay(
                problem,
                self._plan,
                column,
                [offer.peer for offer in others],
                steps_left=steps_left,
                seconds=self._seconds,
                gain_percent_min=GAIN_PERCENT_MIN,
                pause_nanoseconds=PAUSE_NANOSECONDS,
            )

        try:
            return await self._service.seams.executor.run(work, apart=True)
        except (RemoteProtocolError, ValueError):
            return None

    async def hand_over(self) -> None:
        """Between two steps: replace a node that stood in by the node that has come for its stage."""
        now = self._now()
        arriving = self._rules.arriving(now)
        if arriving is None:
            return
        stage, peer = arriving
        attach = partial(
            self._column.attach, stage, peer, self._step(), self._door.admission.chain, self._door.check
        )
        while await attach():
            if not self._rules.awaits_arrival(self._now(), now):
                self._rules.not_arrived(peer)
                return
            await trio.sleep(RENEW_LOOK_SECONDS)
        self._rules.arrived()
        self._further.release(stage)
