"""The disk of a member in a world of cores: saved stages, copies for other members, and restores."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from crypto.identity import PeerId
from node.content.blobs import HEDGE_SECONDS
from node.runs.checkpointing import RESTORE_AGAIN_SECONDS
from partition.plan.plan import Plan
from partition.run.asks import Declined, Done, KeepStage, NameCheckpoint
from partition.run.way_back import WayBack
from sim.worlds.integer_stage import IntegerState, joined, parted, units_of
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import Disk, FetchCopy, FetchState, checkpoint_name

KEPT_MAX = 2
"""Number of checkpoints whose copies are kept on a disk."""
FETCH_SECONDS_MAX = 30.0

Ask = Callable[[PeerId, Any, float, Callable[[Any], None]], None]


class SimCheckpointKeeper:
    """One member's disk. `live` are the peers that may hand over states."""

    def __init__(
        self,
        setting: Setting,
        me: PeerId,
        disk: Disk,
        *,
        live: Callable[[], Sequence[PeerId]],
        ask: Ask,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._setting = setting
        self._me = me
        self._disk = disk
        self._live = live
        self._ask = ask
        self._later = later
        self._units = setting.training.stages

    def holds(self, checkpoint: WayBack) -> bool:
        """Return whether copies of a checkpoint are here."""
        return self._held(checkpoint[1], range(self._units)) is not None

    def put_stage(self, plan: Plan, stage: int, state: IntegerState) -> None:
        """Save a copy of a stage."""
        self.put(units_of(plan, stage, self._units), state)

    def put(self, units: Sequence[int], state: IntegerState) -> None:
        """Save a state as its original stages, and drop the oldest copies."""
        copies = self._disk.copies
        for unit, part in zip(units, parted(state), strict=True):
            copies[state.step, unit] = part
        steps = sorted({step for step, _ in copies})
        for key in [key for key in copies if key[0] in steps[:-KEPT_MAX]]:
            del copies[key]

    def copy(self, step: int, unit: int) -> IntegerState | None:
        """Return the copy of an original stage, None if it is not here."""
        found = self._disk.copies.get((step, unit))
        return found if isinstance(found, IntegerState) else None

    def _held(self, step: int, units: Sequence[int]) -> IntegerState | None:
        """Return the state of a stage with these units; None if one of them is missing here."""
        found = [self.copy(step, unit) for unit in units]
        states = [state for state in found if state is not None]
        return joined(states) if len(states) == len(found) else None

    def keep(self, wanted: KeepStage, answer: Callable[[Any], None]) -> None:
        """Hold a copy of a stage that another member saved; answer once the copy is here."""
        units = units_of(wanted.plan, wanted.stage, self._units)
        missing = [unit for unit in units if self.copy(wanted.step, unit) is None]
        if not missing:
            answer(Done())
            return

        def take(state: Any) -> None:
            if isinstance(state, IntegerState):
                self.put(missing[:1], state)
                self.keep(wanted, answer)
            else:
                answer(None)

        self._ask(wanted.saver, FetchCopy(wanted.step, missing[0]), FETCH_SECONDS_MAX, take)

    def restore(
        self, name: bytes, units: Sequence[int], step: int, then: Callable[[IntegerState | None], None]
    ) -> None:
        """Fetch a copy of a stage with these units. If no peer has one, wait for a peer with one to
        return."""
        mine = self._held(step, units)
        if name != checkpoint_name(self._setting.run, step) or mine is not None:
            then(mine)
            return
        missing = next(unit for unit in units if self.copy(step, unit) is None)

        def take(state: IntegerState | None) -> None:
            if state is not None and len(units) == 1:
                then(state)
            elif state is not None:
                self.put([missing], state)
                self.restore(name, units, step, then)
            else:
                self._later(RESTORE_AGAIN_SECONDS, lambda: self.restore(name, units, step, then))

        others = [peer for peer in self._live() if peer != self._me]
        fetch_from(self._ask, self._later, others, FetchCopy(step, missing), take)

    def fetch_state(
        self, sources: Sequence[PeerId], plan: bytes, step: int, then: Callable[[IntegerState | None], None]
    ) -> None:
        """Fetch the state after `step` steps of a stage from its replicas under this plan."""
        fetch_from(self._ask, self._later, sources, FetchState(plan, step), then)

    def name(self, wanted: NameCheckpoint) -> Done | Declined:
        """Accept the name of a checkpoint, if a part of it is here."""
        is_here = any(self.copy(wanted.step, unit) is not None for unit in range(self._units))
        is_its_name = wanted.name == checkpoint_name(self._setting.run, wanted.step)
        return Done() if is_here and is_its_name else Declined("no part of the checkpoint is kept here")


def fetch_from(
    ask: Ask,
    later: Callable[[float, Callable[[], None]], None],
    sources: Sequence[PeerId],
    question: Any,
    then: Callable[[IntegerState | None], None],
) -> None:
    """Ask peers for a state one by one; after a long silence, ask the next one in parallel. The result is
    None if none hands it over."""
    left = deque(sources)
    silent: set[PeerId] = set()
    found: list[IntegerState | None] = []

    def ask_next() -> None:
        if found:
            return
        if not left:
            if not silent:
                found.append(None)
                then(None)
            return
        peer = left.popleft()
        silent.add(peer)
        ask(peer, question, FETCH_SECONDS_MAX, partial(take, peer))
        later(HEDGE_SECONDS, lambda: ask_next() if peer in silent and left else None)

    def take(peer: PeerId, state: Any) -> None:
        silent.discard(peer)
        if found or not isinstance(state, IntegerState):
            ask_next()
            return
        found.append(state)
        then(state)

    ask_next()
