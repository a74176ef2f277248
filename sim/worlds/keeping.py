"""Disks and requests of `partition.run.checkpoint_rounds` in a world of cores: stages are copied to other
members, and put back."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, assert_never

from crypto.identity import PeerId
from node.checkpoints.replication import CONCLUDE_SECONDS_MAX
from node.content.blobs import HEDGE_SECONDS
from node.runs.checkpointing import RESTORE_AGAIN_SECONDS
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import Done
from partition.run.checkpoint_rounds import (
    CheckpointRounds,
    CheckpointWhole,
    NewestChanged,
    SealWanted,
    SpreadWanted,
)
from partition.run.messages import Checkpointed
from sim.worlds.integer_stage import IntegerState, joined, parted, units_of
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import Disk, FetchCopy, KeepCopy, Saved, checkpoint_name

KEPT_MAX = 2
"""Checkpoints whose copies stay on a disk."""
FETCH_SECONDS_MAX = 30.0

Ask = Callable[[PeerId, Any, float, Callable[[Any], None]], None]


class SimCheckpointKeeper:
    """One member's part. `live` are those that could hand something over; `learned` is told that a newer
    checkpoint is whole."""

    def __init__(
        self,
        setting: Setting,
        me: PeerId,
        disk: Disk,
        *,
        live: Callable[[], Sequence[PeerId]],
        ask: Ask,
        send: Callable[[PeerId, Any], None],
        later: Callable[[float, Callable[[], None]], None],
        learned: Callable[[], None],
    ) -> None:
        self._setting = setting
        self._me = me
        self._disk = disk
        self._live = live
        self._ask = ask
        self._send = send
        self._later = later
        self._learned = learned
        self._units = setting.training.stages
        self._rounds = self._make_rounds()

    def _make_rounds(self) -> CheckpointRounds[None]:
        return CheckpointRounds(self._setting.run, self._me, self._live, self._disk.newest)

    @property
    def restorable(self) -> tuple[bytes, int] | None:
        """The newest checkpoint that is whole, and its step."""
        return self._rounds.newest

    def can_restore(self) -> bool:
        """Return whether copies of it are here, or may be at another that lives."""
        newest = self.restorable
        is_here = newest is not None and self._held(newest[1], range(self._units)) is not None
        return is_here or any(peer != self._me for peer in self._live())

    def forget(self) -> None:
        """Begin as a member that knows of no checkpoint; copies on the disk stay."""
        self._disk.forget_chain()
        self._rounds = self._make_rounds()

    # A replica's side

    def save(self, plan: Plan, stage: int, state: IntegerState) -> None:
        """Put a copy away, if that is for this replica to do."""
        if self._rounds.saves(plan, stage):
            self.put(units_of(plan, stage, self._units), state)
            self._send(plan.committer, Saved(plan_hash(plan), state.step, stage))

    def put(self, units: Sequence[int], state: IntegerState) -> None:
        """On this disk, each of the stages that it is made of; the oldest go."""
        copies = self._disk.copies
        for unit, part in zip(units, parted(state), strict=True):
            copies[state.step, unit] = part
        steps = sorted({step for step, _ in copies})
        for key in [key for key in copies if key[0] in steps[:-KEPT_MAX]]:
            del copies[key]

    def copy(self, step: int, unit: int) -> IntegerState | None:
        """Return what is here of one."""
        found = self._disk.copies.get((step, unit))
        return found if isinstance(found, IntegerState) else None

    def _held(self, step: int, units: Sequence[int]) -> IntegerState | None:
        """Return the state of a stage that is made of these; None where one is not here."""
        found = [self.copy(step, unit) for unit in units]
        states = [state for state in found if state is not None]
        return joined(states) if len(states) == len(found) else None

    def keep(self, wanted: KeepCopy, answer: Callable[[Any], None]) -> None:
        """Hold what another has put away; answered once it is here."""
        missing = [unit for unit in wanted.units if self.copy(wanted.step, unit) is None]
        if not missing:
            answer(Done())
            return

        def take(state: Any) -> None:
            if isinstance(state, IntegerState):
                self.put(missing[:1], state)
                self.keep(wanted, answer)
            else:
                answer(None)

        self._ask(wanted.holder, FetchCopy(wanted.step, missing[0]), FETCH_SECONDS_MAX, take)

    def restore(
        self, name: bytes, units: Sequence[int], step: int, then: Callable[[IntegerState | None], None]
    ) -> None:
        """Bring a copy of a stage that is made of these here; while nobody has one, whoever has may come
        back."""
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

    # The committer's side

    def saved(self, plan: Plan, sender: PeerId, message: Saved) -> None:
        """A stage is put away at one of its replicas. Raises RemoteProtocolError."""
        self._rounds.saved(plan, sender, message.step, message.stage, None)
        self._follow()

    def learn(self, step: int, name: bytes) -> None:
        """A checkpoint is whole: whoever plans next may go back to it."""
        self._rounds.learn(step, name)
        self._follow()

    def _follow(self) -> None:
        """Do what the rounds ask for."""
        events, self._rounds.events[:] = list(self._rounds.events), []
        for event in events:
            match event:
                case SpreadWanted():
                    self._spread(event)
                case SealWanted():
                    self._rounds.sealed(checkpoint_name(self._setting.run, event.step), event.keepers)
                    self._follow()
                case NewestChanged():
                    self._disk.newest = event.name, event.step
                    self._learned()
                case CheckpointWhole():
                    for peer in event.audience:
                        self._send(peer, Checkpointed(plan_hash(event.plan), event.step, event.name))
                case _:
                    assert_never(event)

    def _spread(self, wanted: SpreadWanted[None]) -> None:
        have: list[list[PeerId]] = [[] for _ in wanted.keepers]
        open_count = sum(map(len, wanted.keepers))

        def kept(stage: int, peer: PeerId, reply: Any) -> None:
            nonlocal open_count
            open_count -= 1
            if isinstance(reply, Done):
                have[stage].append(peer)
            if not open_count:
                self._rounds.spread(have)
                self._follow()

        for stage, (saver, peers) in enumerate(zip(wanted.savers, wanted.keepers, strict=True)):
            for peer in peers:
                units = tuple(units_of(wanted.plan, stage, self._units))
                question = KeepCopy(wanted.step, units, saver)
                self._ask(peer, question, CONCLUDE_SECONDS_MAX, partial(kept, stage, peer))


def fetch_from(
    ask: Ask,
    later: Callable[[float, Callable[[], None]], None],
    sources: Sequence[PeerId],
    question: Any,
    then: Callable[[IntegerState | None], None],
) -> None:
    """Ask one after another for a state, and another beside each that says nothing for long; None where
    nobody hands it over."""
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
