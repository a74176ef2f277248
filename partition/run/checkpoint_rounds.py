"""Checkpoints of a run as its members agree on them: the savers, the keepers of copies, and when one is
whole.

After steps that the manifest determines, the first replica of each stage saves a copy of its state and
reports that. The committer gathers these. Once all stages are there it has each copied to other members
(`SpreadWanted`), then gives the checkpoint its name at its keepers (`SealWanted`), and once enough have taken
the name it tells everybody (`CheckpointWhole`). One checkpoint is spread after the other; where one fails,
the one before stays the newest. `S` is the type of a replica's description of its saved state, which is
passed on.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan

COPIES = 3
"""Peers that keep each stage: two may fail in the same hour."""
COPIES_MIN = 2
"""The least copies of each stage: a copy on one disk only is lost with the replica it is meant to replace."""

S = TypeVar("S")
Rows = tuple[tuple[PeerId, ...], ...]
"""For each stage, peers."""


@dataclass(frozen=True)
class SpreadWanted(Generic[S]):
    """Have `keepers` of each stage copy its state from its saver; then call `spread`."""

    plan: Plan
    step: int
    states: tuple[S, ...]
    savers: tuple[PeerId, ...]
    keepers: Rows


@dataclass(frozen=True)
class SealWanted(Generic[S]):
    """Name the checkpoint of these states and tell its `keepers` the name; then call `sealed`."""

    plan: Plan
    step: int
    states: tuple[S, ...]
    keepers: Rows


@dataclass(frozen=True)
class CheckpointWhole(Generic[S]):
    """A checkpoint has its name at `copies` keepers of each stage or more: tell it to `audience`."""

    plan: Plan
    step: int
    states: tuple[S, ...]
    name: bytes
    copies: int
    audience: tuple[PeerId, ...]


@dataclass(frozen=True)
class NewestChanged:
    """This member knows of a newer checkpoint: write it down."""

    step: int
    name: bytes


Event = SpreadWanted[S] | SealWanted[S] | CheckpointWhole[S] | NewestChanged


def checkpoint_holders(
    run: bytes, stage: int, roster: Collection[PeerId], replicas: Collection[PeerId], count: int = COPIES
) -> tuple[PeerId, ...]:
    """Return the keepers of a stage's chunks: `count` of the roster by rendezvous hashing (Thaler and
    Ravishankar 1998).

    A peer that comes or goes moves only its own share. They are never all replicas of the stage, if the
    roster has others: a failure of the replicas would take the copies too. Fewer where the roster is smaller.
    """

    def weight(peer: PeerId) -> bytes:
        return blake3(run + stage.to_bytes(4, "big") + peer).digest()

    order = sorted(set(roster), key=weight)
    chosen = order[:count]
    others = [peer for peer in order if peer not in replicas]
    if chosen and others and not set(chosen) & set(others):
        chosen[-1] = others[0]
    return tuple(chosen)


@dataclass
class _Gathering(Generic[S]):
    """The saved stages of one step, by number: their savers and states."""

    plan: Plan
    step: int
    rows: dict[int, tuple[PeerId, S]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == len(self.plan.stages)


class CheckpointRounds(Generic[S]):
    """One member's part. The driver takes `events` after each call and answers each *Wanted* with its call or
    with `failed`."""

    def __init__(
        self,
        run: bytes,
        me: PeerId,
        live: Callable[[], Collection[PeerId]],
        newest: tuple[bytes, int] | None = None,
    ) -> None:
        """`run` is the run's id, 32 bytes. `live` are the other members that answer. `newest` is the name and
        the step of the newest whole checkpoint, as this member wrote them down in an earlier life."""
        self.events: list[Event[S]] = []
        self.best_step: int | None = None
        """The step of the best state so far, where the run keeps that one."""
        self._run = run
        self._me = me
        self._live = live
        self._newest = newest
        self._gathering: dict[bool, _Gathering[S]] = {}
        self._spreading: SpreadWanted[S] | None = None

    @property
    def newest(self) -> tuple[bytes, int] | None:
        """The newest checkpoint that is whole somewhere, and its step."""
        return self._newest

    @property
    def is_spreading(self) -> bool:
        """Whether a checkpoint is being copied or named."""
        return self._spreading is not None

    def saves(self, plan: Plan, stage: int) -> bool:
        """Return whether this member has to save its copy of a stage: one replica of each does."""
        return plan.stages[stage].replicas[0] == self._me

    # The committer's side

    def saved(self, plan: Plan, sender: PeerId, step: int, stage: int, state: S) -> None:
        """Record that a stage after `step` steps was saved at one of its replicas.

        Raises:
            RemoteProtocolError: `sender` does not hold this stage.
        """
        if not 0 <= stage < len(plan.stages) or sender not in plan.stages[stage].replicas:
            raise RemoteProtocolError("a stage was saved by a peer that does not hold it")
        # The best state so far waits for its turn; any other gives way to a newer one.
        is_best, mine = step == self.best_step, self._gathering.get(step == self.best_step)
        if mine is None or (plan.height, step) > (mine.plan.height, mine.step):
            mine = self._gathering[is_best] = _Gathering(plan, step)
        if (plan.height, step) == (mine.plan.height, mine.step):
            mine.rows[stage] = sender, state
            self._spread_next()

    def _spread_next(self) -> None:
        """Spread the checkpoint that all stages have saved, one after the other."""
        whole = {key: each for key, each in self._gathering.items() if each.is_whole}
        if self._spreading is not None or not whole:
            return
        oldest = min(whole, key=lambda key: whole[key].step)
        gathered = self._gathering[oldest]  # it stays: what is saved late for an earlier plan is too late
        plan, step = gathered.plan, gathered.step
        rows = [gathered.rows.pop(number) for number in range(len(plan.stages))]
        live = {self._me, *self._live()}
        roster = [peer for peer in plan.members if peer in live]
        keepers = tuple(
            checkpoint_holders(self._run, number, roster, [PeerId(peer) for peer in stage.replicas])
            for number, stage in enumerate(plan.stages)
        )
        savers, states = (tuple(each) for each in zip(*rows, strict=True))
        self._spreading = SpreadWanted(plan, step, states, savers, keepers)
        self.events.append(self._spreading)

    def spread(self, kept: Sequence[Collection[PeerId]]) -> None:
        """Go on with the checkpoint that is spread: `kept` has the holders of each stage."""
        wanted = self._spreading
        if wanted is None:
            return
        if not _are_enough(kept, wanted.keepers):
            self.failed()  # the checkpoint before stays the newest
            return
        rows = tuple(tuple(dict.fromkeys(each)) for each in kept)
        self.events.append(SealWanted(wanted.plan, wanted.step, wanted.states, rows))

    def sealed(self, name: bytes, kept: Sequence[Collection[PeerId]]) -> None:
        """Finish the checkpoint that is spread: its name, and the holders of state and name of each stage."""
        wanted = self._spreading
        if wanted is None:
            return
        if _are_enough(kept, wanted.keepers):
            self.learn(wanted.step, name)
            live = set(self._live())
            audience = tuple(peer for peer in wanted.plan.members if peer != self._me and peer in live)
            copies = min(len(set(each)) for each in kept)
            whole = CheckpointWhole(wanted.plan, wanted.step, wanted.states, name, copies, audience)
            self.events.append(whole)
        self.failed()

    def failed(self) -> None:
        """End the checkpoint that is spread, whole or not, and take up the next."""
        self._spreading = None
        self._spread_next()

    # Everybody's

    def learn(self, step: int, name: bytes) -> None:
        """Remember a whole checkpoint: the next planner may go back to it."""
        if self._newest is None or step > self._newest[1]:
            self._newest = name, step
            self.events.append(NewestChanged(step, name))

    def forget_after(self, step: int) -> None:
        """Forget the newest checkpoint where it is of more than `step` steps: it is of a branch that was
        given up, and the run must not go back to it."""
        if self._newest is not None and self._newest[1] > step:
            self._newest = None


def _are_enough(have: Sequence[Collection[PeerId]], wanted: Rows) -> bool:
    """Return whether each stage is on enough disks to survive the next loss."""
    return all(len(set(each)) >= min(COPIES_MIN, len(most)) for each, most in zip(have, wanted, strict=True))
