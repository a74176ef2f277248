"""The regrouping of a head's column: nodes take stages whose machines are gone, and give them to newcomers.

`partition.plan.columns` chooses which stage goes where. A driver calls `look` often, does the one thing that
it returns, and says what came of it. Not here: free nodes (`partition.run.local.recruiting`), and what a move
costs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from crypto.identity import PeerId
from partition.plan.columns import Takers, find_takers
from partition.plan.plan import Plan
from partition.run.local.crew import MemberCrew
from partition.run.local.due import Due
from partition.run.local.recruiting import COMING_SECONDS, Recruitment
from partition.run.pauses import stages_fewer

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
IDLE_MAX = 3
"""How many free nodes, and how many spare members, one look considers, the best first."""
REFUSED_SECONDS = 60.0
"""The interval before a node that could not hold another stage is asked again."""


@dataclass(frozen=True)
class AskPromised:
    """Have a node that came for other stages hold this one too."""

    stages: tuple[int, ...]
    peer: PeerId


@dataclass(frozen=True)
class FindMoves:
    """Find out which stages of the column, held by these, should go to other nodes: `free` ones, or `spare`
    members that hold a stage for nobody."""

    column: tuple[PeerId, ...]
    free: tuple[PeerId, ...]
    spare: tuple[PeerId, ...]


Deed = Takers | AskPromised | FindMoves
"""Takers: ask these nodes, one after another, to hold a stage beside their own."""


class ColumnRegrouping:
    """The regrouping of one head's column, in the stages of `plan`."""

    def __init__(
        self,
        now: float,
        me: PeerId,
        plan: Plan,
        crew: MemberCrew,
        recruitment: Recruitment,
        *,
        live: Callable[[], Collection[PeerId]],
        further: Callable[[], Collection[int]],
        tell: Callable[[str], None],
        patience_seconds: float | None,
    ) -> None:
        """`further` returns the stages that this node holds beside the first, or is opening. `tell` reports
        the state of the run. `patience_seconds`: how long a stage may have no holder before the column was
        first complete; None for any time."""
        self._me = me
        self._plan = plan
        self._crew = crew
        self._recruitment = recruitment
        self._live = live
        self._further = further
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
        self._looked_at = now

    def look(self, now: float, rates: Callable[[], Mapping[PeerId, int]]) -> Deed | None:
        """Return what to do now. `rates` returns how fast the nodes are that offer anything."""
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
            return self._takers(now, rates())
        return None

    def _holders(self, now: float) -> dict[int, PeerId]:
        """Return the holder of each stage, including one that is about to be its holder."""
        column, live = self._crew.holders_of, self._live()
        assert column is not None, "a head has a column"
        self._coming = {
            stage: (peer, until)
            for stage, (peer, until) in self._coming.items()
            if now < until and (peer == self._me or peer in live)
        }
        found = {stage: peer for stage, (peer, _) in self._coming.items()} | {0: self._me}
        found |= dict.fromkeys(self._further(), self._me)
        return found | column.attached

    # Fewer nodes

    def _takers(self, now: float, rates: Mapping[PeerId, int]) -> Takers | None:
        """Return the nodes of this column that take the stages that nobody holds."""
        holders = self._holders(now)
        count = len(self._plan.stages)
        if len(holders) == count:
            return None  # those that agreed are opening theirs
        self._refused = {row: until for row, until in self._refused.items() if now < until}
        found = find_takers(self._plan, holders, rates, list(self._refused))
        if found is None:
            number = next(stage for stage in range(count) if stage not in holders)
            self.say(f"stage {number + 1} of {count} has nobody, and no node has room for it")
        return found

    def taken(self, now: float, stage: int, peer: PeerId) -> None:
        """Note that a node will hold a stage beside its own."""
        self._coming[stage] = peer, now + COMING_SECONDS

    def refused(self, now: float, stage: int, peer: PeerId) -> None:
        """Note that a node does not hold a stage beside its own: another way is looked for."""
        row = self._plan.stages[stage]
        self._refused[peer, row.first_layer, row.last_layer] = now + REFUSED_SECONDS

    def merged(self, takers: Takers) -> None:
        """Note that all of these agreed."""
        self._slower = takers.slower
        self.say(stages_fewer(takers.nodes, len(self._plan.stages), takers.slower))

    def say(self, text: str) -> None:
        """Tell a person how many nodes hold the column, where that has changed."""
        if text != self._said:
            self._said = text
            self._tell(text)

    # More nodes

    def _look_further(self, now: float) -> Deed | None:
        """Return how a node that could make the column faster gets a stage, if there may be one."""
        column = self._crew.holders_of
        assert column is not None, "a head has a column"
        if self._arriving is not None:
            if now < self._arriving[2]:
                return None
            self._arriving = self._promised = None  # it did not come
        if self._promised is not None:
            stages, peer = self._promised
            self._promised = None
            if stages:
                return AskPromised(stages, peer)
        holders = self._holders(now)
        rows = tuple(holders[stage] for stage in range(len(self._plan.stages)))
        if len(set(rows)) == len(rows):
            self.say("")
            return None
        if now < self._looked_at + SPLIT_SECONDS:
            return None
        self._looked_at = now
        live = self._live()
        spare = [peer for peer in self._crew.holders if peer in live and peer not in rows]
        free = self._recruitment.free(now)
        return FindMoves(rows, tuple(free[:IDLE_MAX]), tuple(spare[:IDLE_MAX]))

    def useless(self, deed: FindMoves) -> None:
        """Note that no move pays."""
        looked = len(deed.free) + len(deed.spare)
        fewer = len(set(deed.column))
        self.say(stages_fewer(fewer, len(deed.column), self._slower, useless=looked))

    def expect(self, now: float, stages: Sequence[int], peer: PeerId) -> None:
        """Note that a node is opening the first of these stages; it will be asked for the others then."""
        self._arriving = stages[0], peer, now + COMING_SECONDS
        self._promised = tuple(stages[1:]), peer

    # Between two steps

    def arriving(self, now: float) -> tuple[int, PeerId] | None:
        """Return the stage and the node that is to take it over from one that stood in, where it is time to
        ask whether it is ready."""
        if self._arriving is None:
            return None
        if self._due.waited(now, "an arrival", True) < LOOK_SECONDS:
            return None
        self._due.waited(now, "an arrival", False)
        return self._arriving[:2]

    def awaits_arrival(self, now: float, begun: float) -> bool:
        """Return whether the column stands still, since `begun`, for a node that fetches a newer state."""
        column = self._crew.holders_of
        if self._arriving is None or column is None or not column.is_older:
            return False
        return now < min(begun + RENEW_SECONDS, self._arriving[2])

    def not_arrived(self, peer: PeerId) -> None:
        """Note that the node is not ready yet."""
        if peer not in self._live():
            self._arriving = self._promised = None

    def arrived(self) -> None:
        """Note that the node has taken its stage over."""
        self._arriving = None
