"""The regrouping of a head's column: nodes take stages whose machines are gone, and give them up to
newcomers.

`partition.plan.columns` assigns the stages. A head runs the course `regroup` at the same time as its
training, and `hand_over` between two steps. Not here: free nodes (`partition.run.local.recruiting`), and the
cost of a move.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from crypto.identity import PeerId
from partition.plan.columns import Takers, find_takers
from partition.plan.plan import Plan
from partition.run.local.courses import AskToHold, AttachTo, Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.due import Due
from partition.run.local.recruiting import COMING_SECONDS, UNANSWERED_SECONDS, Recruitment
from partition.run.pauses import stages_fewer

LOOK_SECONDS = 0.5
MERGE_SECONDS = 2.0
"""How long a column waits for a free holder, or for a lost holder's node to offer its slot again, before its
own nodes take the stage."""
RESUMED_SECONDS = 20.0
"""The same for the column of a head that has just restarted, because its other machines may be starting
too."""
SPLIT_SECONDS = 5.0
"""Seconds between two checks whether a stage should move to another machine."""
RENEW_SECONDS = 10.0
"""How long a column pauses while a newcomer takes over the newest state of a stage."""
RENEW_LOOK_SECONDS = 0.2
IDLE_MAX = 3
"""Maximum number of free nodes, and of free members, that one check considers, the best first."""
REFUSED_SECONDS = 60.0
"""How long to wait before a node that could not hold a further stage is asked again."""


@dataclass(frozen=True)
class FindMoves:
    """Find the stages of the column that should move to other nodes: to `free` nodes, or to `spare` members
    without a head. `column` are the present holders. The answer lists the stages and the node of each move,
    the best first; None if too little is known."""

    column: tuple[PeerId, ...]
    free: tuple[PeerId, ...]
    spare: tuple[PeerId, ...]


Moves = Sequence[tuple[tuple[int, ...], PeerId]]


@dataclass(frozen=True)
class DropFurther:
    """Stop holding this stage, if it is a further stage of this node. No answer."""

    stage: int


@dataclass(frozen=True)
class _Promised:
    """A node that has come for one stage should hold these stages too."""

    stages: tuple[int, ...]
    peer: PeerId


class ColumnRegrouping:
    """The regrouping of one head's column, for the stages of `plan`."""

    def __init__(
        self,
        now: Callable[[], float],
        me: PeerId,
        plan: Plan,
        crew: MemberCrew,
        recruitment: Recruitment,
        *,
        live: Callable[[], Collection[PeerId]],
        rates: Callable[[], Mapping[PeerId, int]],
        tell: Callable[[str], None],
        patience_seconds: float | None,
    ) -> None:
        """`rates` returns the rates of nodes with an offer. `tell` reports the state of the run.
        `patience_seconds` is how long a stage may lack a holder before the column has been complete once;
        None if unlimited."""
        self._now = now
        self._me = me
        self._plan = plan
        self._crew = crew
        self._recruitment = recruitment
        self._live = live
        self._rates = rates
        self._tell = tell
        self._patience = patience_seconds
        self._due = Due()
        self._refused: dict[tuple[bytes, int, int], float] = {}
        self._coming: dict[int, tuple[PeerId, float]] = {}
        self._arriving: tuple[int, PeerId, float] | None = None
        self._promised: tuple[tuple[int, ...], PeerId] | None = None
        self._said = ""
        self._slower = Fraction(1)
        """The expected slowdown of steps when nodes last took further stages."""
        self._looked_at = now()

    def regroup(self) -> Course[None]:
        """Regroup the column, endlessly."""
        while True:
            yield Sleep(LOOK_SECONDS)
            deed = self._look(self._now())
            if isinstance(deed, _Promised):
                if (yield from self._ask(deed.stages[0], deed.peer, is_beside=True)):
                    self._expect(deed.stages, deed.peer)
                    continue
                deed = self._look(self._now())
            if isinstance(deed, Takers):
                yield from self._merge(deed)
            elif isinstance(deed, FindMoves):
                yield from self._move(deed)

    def _look(self, now: float) -> Takers | _Promised | FindMoves | None:
        """Return the next action."""
        column = self._crew.holders_of
        if column is None:
            return None
        is_missing = bool(self._crew.missing) and column.has_looked
        waited = self._due.waited(now, "a stage", is_missing)
        if not column.missing:
            self._patience = MERGE_SECONDS
            self._coming.clear()
            return self._look_further(now)
        is_time = self._patience is not None and waited >= self._patience
        if is_time and not self._recruitment.is_hopeful(now):
            return self._takers(now, self._rates())
        return None

    def _ask(self, stage: int, peer: PeerId, *, is_beside: bool) -> Course[bool | None]:
        """Ask a node to hold a stage; return whether it will, None if it gave no answer."""
        will: bool | None = yield AskToHold(stage, peer, is_beside)
        if will and peer != self._me and self._crew.holders_of is not None:
            self._crew.holders_of.agreed(stage, peer)
        return will

    def _holders(self, now: float) -> dict[int, PeerId]:
        """Return the holder of each stage, including nodes that have agreed to hold one."""
        column, live = self._crew.holders_of, self._live()
        assert column is not None, "a head must have a column"
        self._coming = {
            stage: (peer, until)
            for stage, (peer, until) in self._coming.items()
            if now < until and (peer == self._me or peer in live)
        }
        found = {stage: peer for stage, (peer, _) in self._coming.items()} | {0: self._me}
        found |= dict.fromkeys(self._crew.taken, self._me)
        return found | column.attached

    # Fewer nodes

    def _takers(self, now: float, rates: Mapping[PeerId, int]) -> Takers | None:
        """Return the nodes of this column that should take the stages without a holder."""
        holders = self._holders(now)
        count = len(self._plan.stages)
        if len(holders) == count:
            return None  # nodes that agreed are opening their stages
        self._refused = {row: until for row, until in self._refused.items() if now < until}
        found = find_takers(self._plan, holders, rates, list(self._refused))
        if found is None:
            number = next(stage for stage in range(count) if stage not in holders)
            self._say(f"stage {number + 1} of {count} has no holder, and no node has room for it")
        return found

    def _merge(self, takers: Takers) -> Course[None]:
        """Ask nodes of this column to take the stages without a holder."""
        for stage, peer in takers.by_stage.items():
            if not (will := (yield from self._ask(stage, peer, is_beside=True))):
                row, pause = self._plan.stages[stage], UNANSWERED_SECONDS if will is None else REFUSED_SECONDS
                self._refused[peer, row.first_layer, row.last_layer] = self._now() + pause
                return  # the next check tries a different assignment
            self._coming[stage] = peer, self._now() + COMING_SECONDS
        self._slower = takers.slower
        self._say(stages_fewer(takers.nodes, len(self._plan.stages), takers.slower))

    def _say(self, text: str) -> None:
        """Display how many nodes hold the column, if this has changed."""
        if text != self._said:
            self._said = text
            self._tell(text)

    # More nodes

    def _look_further(self, now: float) -> _Promised | FindMoves | None:
        """Return the next action to give a stage to a node that could make the column faster; None if there
        is none."""
        column = self._crew.holders_of
        assert column is not None, "a head must have a column"
        if self._arriving is not None:
            if now < self._arriving[2]:
                return None
            self._arriving = self._promised = None  # the node did not come
        if self._promised is not None:
            stages, peer = self._promised
            self._promised = None
            if stages:
                return _Promised(stages, peer)
        holders = self._holders(now)
        rows = tuple(holders[stage] for stage in range(len(self._plan.stages)))
        if len(set(rows)) == len(rows):
            self._say("")
            return None
        if now < self._looked_at + SPLIT_SECONDS:
            return None
        self._looked_at = now
        live = self._live()
        spare = [peer for peer in self._crew.holders if peer in live and peer not in rows]
        free = self._recruitment.free(now)
        return FindMoves(rows, tuple(free[:IDLE_MAX]), tuple(spare[:IDLE_MAX]))

    def _move(self, deed: FindMoves) -> Course[None]:
        """Give a stage to a node that makes the column faster, if there is one."""
        moves: Moves | None = yield deed
        if moves is not None and not moves:
            looked, fewer = len(deed.free) + len(deed.spare), len(set(deed.column))
            self._say(stages_fewer(fewer, len(deed.column), self._slower, useless=looked))
        for stages, peer in moves or ():
            will = peer in deed.spare or (yield from self._ask(stages[0], peer, is_beside=False))
            if will:
                self._expect(stages, peer)
                return
            self._recruitment.asking(self._now(), peer)
            self._recruitment.answered(self._now(), peer, will)

    def _expect(self, stages: Sequence[int], peer: PeerId) -> None:
        """Note that a node is opening the first of these stages. It is asked for the other stages
        afterwards."""
        self._arriving = stages[0], peer, self._now() + COMING_SECONDS
        self._promised = tuple(stages[1:]), peer

    # Between two steps

    def hand_over(self) -> Course[None]:
        """Replace the present holder of a stage by the node that has come for it, once that node is ready."""
        begun = self._now()
        if self._arriving is None or self._due.waited(begun, "an arrival", True) < LOOK_SECONDS:
            return
        self._due.waited(begun, "an arrival", False)
        stage, peer, _ = self._arriving
        while not (yield AttachTo(stage, peer)):
            if not self._awaits_arrival(begun):
                if peer not in self._live():
                    self._arriving = self._promised = None
                return
            yield Sleep(RENEW_LOOK_SECONDS)
        self._arriving = None
        yield DropFurther(stage)

    def _awaits_arrival(self, begun: float) -> bool:
        """Return whether the column is paused, since `begun`, for a node that is fetching a newer state."""
        column = self._crew.holders_of
        if self._arriving is None or column is None or not column.is_older:
            return False
        return self._now() < min(begun + RENEW_SECONDS, self._arriving[2])
