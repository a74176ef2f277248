"""One peer's slots for stages, and the promises of slots.

A run has at most one slot on a peer. A promise ends by itself unless its stage is opened in time. It ends
early if its plan can no longer be decided, because the planner is gone, has a different plan, or was
outvoted. A first plan may be in force at other members when its planner is gone, so promises for a first plan
are held for ORPHAN_SECONDS longer.
"""

from collections.abc import Callable, Collection
from typing import Annotated

import msgspec
from msgspec.structs import replace

from crypto.identity import PeerId
from partition.plan.plan import Hash, Height, Peer, StageNumber

ORPHAN_SECONDS = 10.0
"""How long a promise for a first plan outlasts its planner. Within some seconds, members that have begun
learn that the requester is gone, and bring its plan."""


class Promise(msgspec.Struct, frozen=True, array_like=True):
    """A slot promised to a stage of `planner`'s plan at a height. `until` is in the clock of `Slots`."""

    run: Hash
    plan: Hash
    stage: StageNumber | None
    planner: Peer
    until: Annotated[float, msgspec.Meta(ge=0, lt=2**53)]
    height: Height


class Slots:
    """The `count` slots of one peer. `hosted` returns the runs whose stages are open, or being opened."""

    def __init__(
        self, count: int, hosted: Callable[[], Collection[bytes]], promises: tuple[Promise, ...] = ()
    ) -> None:
        self.count = count
        self.promises = promises
        self._hosted = hosted

    def live(self, now: float) -> tuple[Promise, ...]:
        """Return the promises that have not ended."""
        return tuple(row for row in self.promises if now < row.until)

    def taken(self, now: float) -> set[bytes]:
        """Return the runs that have a slot or the promise of one."""
        return {row.run for row in self.live(now)} | set(self._hosted())

    def free(self, now: float) -> int:
        """Return the number of slots that are free: neither taken nor promised."""
        return max(0, self.count - len(self.taken(now)))

    def lapsing(self, now: float) -> dict[bytes, float]:
        """Return the runs whose promise will end within ORPHAN_SECONDS unless their stage is opened, with the
        remaining seconds."""
        begun = set(self._hosted())
        left = {row.run: row.until - now for row in self.live(now) if row.run not in begun}
        return {run: seconds for run, seconds in left.items() if seconds <= ORPHAN_SECONDS}

    def hosts(self, run: bytes) -> bool:
        """Return whether a stage of this run is open here, or being opened."""
        return run in self._hosted()

    def is_free_for(self, now: float, run: bytes) -> bool:
        """Return whether a stage of this run may be placed here."""
        return run not in self.taken(now) and self.free(now) > 0

    def promise(self, now: float, promise: Promise) -> None:
        """Hold a slot. The caller ensures that one is free."""
        self.promises = (*self.live(now), promise)

    def holds(self, now: float, run: bytes, plan: bytes, stage: int) -> bool:
        """Return whether a slot is promised to exactly this stage."""
        wanted = run, plan, stage
        return any((row.run, row.plan, row.stage) == wanted for row in self.live(now))

    # Each method returns whether a promise was forgotten

    def release(self, plan: bytes, planner: PeerId) -> bool:
        """Forget the promise to `planner` for `plan`."""
        return self._keep(lambda row: row.plan != plan or row.planner != planner)

    def release_run(self, run: bytes) -> bool:
        """Forget the promises for all plans of this run, because one plan is in force or the run is over."""
        return self._keep(lambda row: row.run != run)

    def supersede(self, run: bytes, planner: PeerId, height: int) -> tuple[Promise, ...]:
        """Forget the promises for plans of this run that can no longer be decided, because `planner` asks for
        a slot for its plan at `height`. These are earlier plans of this planner, which proposes one plan at a
        time, and plans of lower heights, at which other plans were decided. Return the forgotten promises."""
        gone = tuple(
            row for row in self.promises if row.run == run and (row.planner == planner or row.height < height)
        )
        self._keep(lambda row: row not in gone)
        return gone

    def release_all(self, now: float, planner: PeerId) -> bool:
        """Forget the promises to a lost peer, but those for a first plan only after ORPHAN_SECONDS. Promises
        to others stay. Return whether any changed."""
        had = self.promises
        until = now + ORPHAN_SECONDS
        self.promises = tuple(
            row if row.planner != planner else replace(row, until=min(row.until, until))
            for row in had
            if row.planner != planner or not row.height
        )
        return self.promises != had

    def take_back(self, promise: Promise) -> bool:
        """Forget one promise that could not be delivered."""
        return self._keep(lambda row: row is not promise)

    def _keep(self, keeps: Callable[[Promise], bool]) -> bool:
        kept = tuple(row for row in self.promises if keeps(row))
        had, self.promises = self.promises, kept
        return kept != had
