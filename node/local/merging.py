"""Regrouping of a head's column: nodes take stages whose machines are gone, and give them to newcomers.

The planner chooses which stage goes where (`partition.plan.columns`); a move has to gain as much as one of an
exact run (`node.runs.splitting`). Not here: finding free nodes (`recruiter`), the stages (`further`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.averaging.door import Door
from node.errors import Unreachable
from node.local.column import ColumnStage
from node.local.context import Service
from node.local.crew import Crew
from node.local.due import Due
from node.local.further import FurtherStages
from node.local.recruiter import COMING_SECONDS, JOIN_SECONDS_MAX, Recruiter
from node.placement.leases import Offer, problem_of, rounded
from node.protocols.manifest import Run
from node.protocols.runs import Join
from node.runs.rebalancing import ASSUMED_LINK, PAUSE_NANOSECONDS
from node.runs.splitting import IDLE_MAX
from partition.model.graph import Graph
from partition.plan.columns import find_takers, moves_that_pay
from partition.plan.observed import Knowledge
from partition.plan.plan import Plan
from partition.plan.problem import Problem
from partition.run.asks import Done
from partition.run.pauses import GAIN_PERCENT_MIN, stages_fewer

LOOK_SECONDS = 0.5
MERGE_SECONDS = 2.0
"""How long a column waits for a left-over holder, or for a holder's node to offer its slot again."""
RESUMED_SECONDS = 20.0
"""The same for the column of a head that has just restarted: its other machines may be starting too."""
SPLIT_SECONDS = 5.0
"""The interval between two checks whether a stage should move to another machine."""
RENEW_SECONDS = 10.0
"""How long a column stands still for a newcomer to take over the newest state of a stage."""
RENEW_LOOK_SECONDS = 0.2
REFUSED_SECONDS = 60.0
"""The interval before a node that could not hold another stage is asked again."""
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
        service: Service,
        run: Run,
        door: Door,
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
        self._run = run
        self._door = door
        self._crew = crew
        self._further = further
        self._recruiter = recruiter
        self._graph = graph
        self._plan = plan
        self._step = step
        self._tell = tell
        self._patience = patience_seconds
        self._due = Due()
        self._refused: dict[tuple[bytes, int, int], float] = {}
        self._coming: dict[int, tuple[PeerId, float]] = {}
        self._arriving: tuple[int, PeerId, float] | None = None
        self._promised: tuple[tuple[int, ...], PeerId] | None = None
        self._said = ""
        self._slower = Fraction(1)
        """The expected slowdown of steps when stages were last merged."""
        self._seconds = 0.0
        self._looked_at = trio.current_time()

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
            missing = self._crew.missing
            waited = self._due.waited("a stage", bool(missing) and self._column.has_looked)
            if not self._column.missing:
                self._patience = MERGE_SECONDS
                self._coming.clear()
                await self._look()
            elif self._may_merge(waited):
                await self._merge()

    def _may_merge(self, waited: float) -> bool:
        """Return whether a stage has been missing for `waited` seconds, and no free node may come for it."""
        is_time = self._patience is not None and waited >= self._patience
        return is_time and not self._recruiter.is_hopeful

    def _holders(self) -> dict[int, PeerId]:
        """Return the holder of each stage, including one that is about to be its holder."""
        me, now, live = self._service.signer.peer, trio.current_time(), self._service.live()
        self._coming = {
            stage: (peer, until)
            for stage, (peer, until) in self._coming.items()
            if now < until and (peer == me or peer in live)
        }
        found = {stage: peer for stage, (peer, _) in self._coming.items()} | {0: me}
        found |= dict.fromkeys(self._further.stages, me)
        for stage in range(1, len(self._plan.stages)):
            if (holder := self._column.holder(stage)) is not None:
                found[stage] = holder
        return found

    def _offers(self) -> dict[PeerId, Offer]:
        return {offer.peer: offer for offer in self._service.offers()}

    # Fewer nodes

    async def _merge(self) -> None:
        """Have nodes of this column take the stages that nobody holds."""
        holders, now = self._holders(), trio.current_time()
        if len(holders) == len(self._plan.stages):
            return  # those that agreed are opening theirs
        rates = {peer: rounded(offer.flops_per_second) for peer, offer in self._offers().items()}
        self._refused = {row: until for row, until in self._refused.items() if now < until}
        found = find_takers(self._plan, holders, rates, list(self._refused))
        if found is None:
            number = next(stage for stage in range(len(self._plan.stages)) if stage not in holders)
            self._say(
                f"stage {number + 1} of {len(self._plan.stages)} has nobody, and no node has room for it"
            )
            return
        for stage, peer in found.by_stage.items():
            if await self._ask(stage, peer, is_beside=True):
                self._coming[stage] = peer, trio.current_time() + COMING_SECONDS
            else:
                row = self._plan.stages[stage]
                key = (peer, row.first_layer, row.last_layer)
                self._refused[key] = trio.current_time() + REFUSED_SECONDS
                return  # another way is looked for
        self._slower = found.slower
        self._say(stages_fewer(found.nodes, len(self._plan.stages), found.slower))

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
            self._column.agreed(stage, peer)
            return True
        return False

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._tell(text)

    # More nodes

    async def _look(self) -> None:
        """Give a stage to a node that could make the column faster, if there is one."""
        now = trio.current_time()
        if self._arriving is not None and now < self._arriving[2]:
            return
        if self._arriving is not None:
            self._arriving = self._promised = None  # it did not come
        if self._promised is not None:
            stages, peer = self._promised
            self._promised = None
            if stages and await self._ask(stages[0], peer, is_beside=True):
                self._expect(stages, peer)
                return
        holders = self._holders()
        column = [holders[stage] for stage in range(len(self._plan.stages))]
        if len(set(column)) == len(column):
            self._say("")
            return
        if now < self._looked_at + SPLIT_SECONDS:
            return
        self._looked_at = now
        spare = [peer for peer in self._crew.holders if peer in self._service.live() and peer not in column]
        peers = [*self._recruiter.free()[:IDLE_MAX], *spare[:IDLE_MAX]]
        moves = await self._moves(column, peers)
        if moves is not None and not moves:
            self._say(stages_fewer(len(set(column)), len(column), self._slower, useless=len(peers)))
        for stages, peer in moves or ():
            if peer in spare or await self._ask(stages[0], peer, is_beside=False):
                self._expect(stages, peer)
                return
            self._recruiter.declined(peer)

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

    def _expect(self, stages: Sequence[int], peer: PeerId) -> None:
        """Note that a node is opening the first of these stages; it will be asked for the others then."""
        self._arriving = stages[0], peer, trio.current_time() + COMING_SECONDS
        self._promised = tuple(stages[1:]), peer

    async def hand_over(self) -> None:
        """Between two steps: replace a node that stood in by the node that has come for its stage."""
        if self._arriving is None or not self._due_again():
            return
        stage, peer, until = self._arriving
        column, standing = self._column, trio.current_time() + RENEW_SECONDS
        attach = partial(
            column.attach, stage, peer, self._step(), self._door.admission.chain, self._door.check
        )
        while await attach():
            if not column.is_older or trio.current_time() >= min(standing, until):
                if peer not in self._service.live():
                    self._arriving = self._promised = None
                return
            await trio.sleep(RENEW_LOOK_SECONDS)
        self._arriving = None
        self._further.release(stage)

    def _due_again(self) -> bool:
        """Return whether to ask again: once in LOOK_SECONDS."""
        if self._due.waited("an arrival", True) < LOOK_SECONDS:
            return False
        self._due.waited("an arrival", False)
        return True
