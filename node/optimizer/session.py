"""A training thread's view of its part in a run: every call returns immediately, and none raises.

The training loop runs in one thread and the node's event loop in another (`node.portal`). The node's thread
carries out the training thread's requests, and the training thread reads the results between two steps.
"""

from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from crypto.identity import PeerId
from gossip.averaging.robust.reduction import Vector
from gossip.averaging.strategies import Mean, Strategy, damped
from gossip.claims import LikelySteps
from node.averaging.offered import SNAPSHOT_SECONDS
from node.averaging.participation import Participation
from node.averaging.rounds import RosterView, Round, RoundWish
from node.averaging.snapshot import Array, Snapshot, make_snapshot
from node.containment import contain
from node.portal import LoopCall, Portal, PortalClosed

T = TypeVar("T")

CLOSED = "closed"
"""The error text of a session that was closed on purpose."""


@dataclass(frozen=True)
class Exchanged:
    """A finished round, and the change that it makes to the sent vector; None if it makes none."""

    round: Round
    difference: Vector | None
    taken: Vector | None
    """The new values of the tensors if nothing was added to them meanwhile."""


class TrainingSession:
    """One run, for one training thread."""

    def __init__(self, portal: Portal[Any], run: Participation) -> None:
        self._portal = portal
        self._run = run
        self._error = ""

    @property
    def error(self) -> str:
        """Return why this session has stopped; empty while it works."""
        return self._error or self._run.ended

    @property
    def peer(self) -> PeerId:
        """Return this peer's id."""
        return self._run.peer

    @property
    def view(self) -> RosterView:
        """Return the run's participants and their progress."""
        return RosterView() if self.error else self._run.view

    @property
    def status(self) -> str:
        """Return what the node does for this run now, as text."""
        return self.error or self._run.status

    @property
    def look_seconds(self) -> float | None:
        """Return the time limit of the search for a round's group, counted from the round's beginning, or
        None if there is no search now. Leaving a search costs other peers nothing."""
        return self._run.look_seconds

    @property
    def is_receiving(self) -> bool:
        """Return whether another peer's state is on its way here."""
        return self._run.states.is_receiving

    def wants_state(self, step: int) -> bool:
        """Return whether a peer waits for a copy of this peer's state, which is at `step`."""
        return self._run.states.wants_state(step) and not self.error

    def refuse_in_child(self) -> None:
        """Raise ForkedChild if this is a forked child of the training process."""
        if self.error != CLOSED:
            self._portal.refuse_in_child()

    def tell(
        self,
        *,
        step: int,
        samples: int,
        rounds: int,
        lineage: bytes,
        has_state: bool,
        settings: bytes = b"",
    ) -> None:
        """Report this peer's progress, and the settings of its latest step."""
        said = partial(
            self._run.tell,
            step=step,
            samples=samples,
            rounds=rounds,
            lineage=lineage,
            has_state=has_state,
            settings=settings,
        )
        self._post(said)

    def average(self, vector: Vector, weight: float, wanted: RoundWish) -> "Pending[Round]":
        """Begin a round. The vector must not change until the round is over."""
        return Pending(self._begin(self._run.average, vector, weight, wanted), self._portal)

    def exchange(
        self,
        vector: Vector,
        weight: float,
        wanted: RoundWish,
        strategy: Strategy | None,
        stale_steps: Callable[[], int],
        damping: float = 1.0,
    ) -> "Pending[Exchanged]":
        """Begin a round in the background; its result is written into the vector's memory.

        Without a `strategy`, the result is the plain mean. `stale_steps` counts the local steps since now.
        `damping` is the share of the result that is taken.
        """
        begin = self._begin(self._exchange, vector, weight, wanted, strategy, stale_steps, damping)
        return Pending(begin, self._portal)

    async def _exchange(
        self,
        vector: Vector,
        weight: float,
        wanted: RoundWish,
        strategy: Strategy | None,
        stale_steps: Callable[[], int],
        damping: float,
    ) -> "Exchanged":
        compute = self._run.compute
        offered = vector if strategy is None else await compute(partial(strategy.offer, vector))
        made = await self._run.average(offered, weight, wanted)
        taken: Vector | None = made.vector
        if strategy is not None:
            mean = None
            if made.vector is not None:
                is_in = self._run.peer in made.shares
                mean = Mean(made.vector, is_included=is_in, stale_steps=stale_steps())
            kept = await compute(partial(strategy.take, vector, mean))
            taken = None if mean is None else kept
        if taken is None:
            return Exchanged(made, None, None)
        taken = await compute(partial(damped, vector, taken, damping))
        return Exchanged(made, await compute(partial(np.subtract, taken, vector, out=vector)), taken)

    def stepped(self, step: int, samples: int) -> None:
        """Report a global step, for screens."""
        self._post(partial(self._run.stepped, step, samples))

    def fetch(
        self,
        likely: LikelySteps,
        *,
        bytes_max: int,
        check: Callable[[Snapshot], str],
        passed_over: frozenset[PeerId] = frozenset(),
    ) -> "Pending[Snapshot]":
        """Begin to fetch the run's state, of a likely step, from any peers except those `passed_over`.
        `check` runs in another thread and returns a state's fault."""
        fetch = partial(
            self._run.states.fetch,
            likely.first,
            bytes_max=bytes_max,
            likely=likely,
            check=check,
            passed_over=passed_over,
        )
        return Pending(self._begin(fetch), self._portal)

    def offer(
        self,
        step: int,
        rounds: int,
        lineage: bytes,
        arrays: dict[str, tuple[str, tuple[int, ...], Array]],
        good_seconds: float = SNAPSHOT_SECONDS,
    ) -> None:
        """Hand out this state, an immutable copy, to late peers. Continue for `good_seconds` after its step
        is over."""
        self._begin(partial(self._offer, step, rounds, lineage, arrays, good_seconds))

    async def _offer(
        self,
        step: int,
        rounds: int,
        lineage: bytes,
        arrays: dict[str, tuple[str, tuple[int, ...], Array]],
        good_seconds: float,
    ) -> None:
        made = await self._run.compute(partial(make_snapshot, step, rounds, lineage, arrays))
        self._run.states.offer(made, good_seconds)

    def close(self) -> None:
        """Leave the run."""
        if self._error:
            return
        self._post(self._run.close)
        self._error = CLOSED

    def _post(self, function: Callable[[], object]) -> None:
        """Call a function in the node's thread. Calls keep their order."""
        if self.error:
            return
        try:
            self._portal.post(_contained, function)
        except PortalClosed as error:
            self._error = f"the node has ended: {error}"

    def _begin(self, function: Callable[..., Any], *arguments: Any) -> "LoopCall[Any] | None":
        if self.error:
            return None
        try:
            return self._portal.begin(function, *arguments)
        except PortalClosed as error:
            self._error = f"the node has ended: {error}"
            return None


class Pending(Generic[T]):
    """A call in the node's thread. `poll` returns whether it has finished; it never raises."""

    def __init__(self, call: "LoopCall[T] | None", portal: Portal[Any]) -> None:
        self._call = call
        self._portal = portal

    @property
    def is_over(self) -> bool:
        return self._call is None or self._call.future.done()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; return whether the call has finished."""
        if self._call is not None:
            futures.wait([self._call.future], seconds)
        return self.is_over

    def outcome(self) -> T | str:
        """Return the result of the finished call, or the reason for its failure."""
        if self._call is None:
            return "the node has ended"
        try:
            return self._call.future.result(0)
        except futures.CancelledError:
            return "the node has ended"
        except Exception as error:
            return str(error) or type(error).__name__

    def cancel(self) -> None:
        """Cancel the call."""
        if self._call is not None:
            self._portal.cancel(self._call)


def _contained(function: Callable[[], object]) -> None:
    with contain("optimizer's session"):
        function()
