"""Regroups a head's column: nodes take over stages whose machines are gone, and give them to newcomers.

A move has to gain as much as a move in an exact run (`node.runs.splitting`). Not here: which node is asked,
and when (`partition.run.local.regrouping`), finding free nodes (`recruiter`), and the stages themselves
(`further`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.local.context import LocalRunsService
from node.local.courses import follow
from node.local.crew import Crew
from node.local.further import FurtherStages
from node.local.recruiter import Recruiter
from node.placement.leases import Offer, problem_of, rounded
from node.protocols.manifest import Run
from node.runs.rebalancing import ASSUMED_LINK, PAUSE_NANOSECONDS
from partition.model.graph import Graph
from partition.plan.columns import moves_that_pay
from partition.plan.observed import Knowledge
from partition.plan.plan import Plan
from partition.plan.problem import Problem
from partition.run.local.courses import AskToHold
from partition.run.local.regrouping import ColumnRegrouping, FindMoves
from partition.run.pauses import GAIN_PERCENT_MIN

MEMORY_BYTES = 1 << 60
"""Memory assumed for a node of the column. What it holds now always fits, whatever it offers now, because it
was admitted before."""


def column_problem(
    run: Run, graph: Graph, holders: Sequence[Offer], free: Sequence[Offer], knowledge: Knowledge
) -> Problem:
    """Return the planner's problem for a column and free nodes. Raises ValueError, RemoteProtocolError if
    sizes do not fit."""
    held = [replace(offer, memory_bytes=MEMORY_BYTES) for offer in holders]
    problem = problem_of(run, graph, [*held, *free], knowledge)
    return replace(problem, objective="throughput", default_link=ASSUMED_LINK, hides_links=True)


class Regrouping:
    """The regrouping of a head's column."""

    def __init__(
        self,
        service: LocalRunsService,
        run: Run,
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
        """Prepare regrouping. `patience_seconds` is how long a stage may lack a holder before the column is
        complete for the first time; None means without limit. `tell` reports the state of the run."""
        self._service = service
        self._now = service.seams.clock.monotonic
        self._run = run
        self._further = further
        self._recruiter = recruiter
        self._graph = graph
        self._plan = plan
        self._step = step
        self._seconds = 0.0
        self.rules = ColumnRegrouping(
            service.seams.clock.monotonic,
            service.signer.peer,
            plan,
            crew,
            recruiter.choice,
            live=lambda: service.live(),
            rates=self._rates,
            tell=tell,
            patience_seconds=patience_seconds,
        )

    def stepped(self, seconds: float) -> None:
        """Add the duration of a step."""
        self._seconds = seconds if not self._seconds else 0.8 * self._seconds + 0.2 * seconds

    async def run(self) -> None:
        """Regroup the column until cancelled."""
        await follow(self.rules.regroup(), self._do)

    async def _do(self, deed: AskToHold | FindMoves) -> object:
        if isinstance(deed, FindMoves):
            return await self._moves(deed.column, [*deed.free, *deed.spare])
        if deed.peer != self._service.signer.peer:
            return await self._recruiter.ask(deed)
        if await self._further.refusal(deed.stage):
            return False
        self._further.hold(deed.stage)
        return True

    def _rates(self) -> dict[PeerId, int]:
        return {peer: rounded(offer.flops_per_second) for peer, offer in self._offers().items()}

    def _offers(self) -> dict[PeerId, Offer]:
        return {offer.peer: offer for offer in self._service.offers()}

    async def _moves(
        self, column: Sequence[PeerId], peers: Sequence[PeerId]
    ) -> list[tuple[tuple[int, ...], PeerId]] | None:
        """Return the stages of the `column` that could move to these peers, the best move first. Return None
        if too little is known about them."""
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
