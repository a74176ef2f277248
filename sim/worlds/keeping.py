"""Checkpoints of a run in a world of cores: stages copied to other members, and put back. As
`node.runs.checkpointing`."""

from collections.abc import Callable, Sequence
from typing import Any

from crypto.identity import PeerId
from node.checkpoints.replication import CONCLUDE_SECONDS_MAX, checkpoint_holders
from node.runs.checkpointing import COPIES_MIN, RESTORE_AGAIN_SECONDS
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import Done
from partition.run.messages import Checkpointed
from sim.worlds.integer_stage import State
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import Disk, FetchCopy, KeepCopy, Saved, checkpoint_name

KEPT_MAX = 2
"""Checkpoints whose copies stay on a disk."""
FETCH_SECONDS_MAX = 30.0

Ask = Callable[[PeerId, Any, float, Callable[[Any], None]], None]


class Keeping:
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
        self._saving = -1, -1
        self._saved: dict[int, PeerId] = {}
        self._is_spreading = False

    @property
    def restorable(self) -> tuple[bytes, int] | None:
        """The newest checkpoint that is whole, and its step."""
        return self._disk.newest

    # A replica's side

    def save(self, plan: Plan, stage: int, state: State) -> None:
        """Put a copy away, if that is for this replica to do."""
        if plan.stages[stage].replicas[0] == self._me:
            self.put(stage, state)
            self._send(plan.committer, Saved(plan_hash(plan), state.step, stage))

    def put(self, stage: int, state: State) -> None:
        """On this disk; the oldest go."""
        copies = self._disk.copies
        copies[state.step, stage] = state
        steps = sorted({step for step, _ in copies})
        for key in [key for key in copies if key[0] in steps[:-KEPT_MAX]]:
            del copies[key]

    def copy(self, step: int, stage: int) -> State | None:
        """Return what is here of it."""
        found = self._disk.copies.get((step, stage))
        return found if isinstance(found, State) else None

    def keep(self, wanted: KeepCopy, answer: Callable[[Any], None]) -> None:
        """Hold what another has put away; answered once it is here."""
        if self.copy(wanted.step, wanted.stage) is not None:
            answer(Done())
            return

        def take(state: Any) -> None:
            if isinstance(state, State):
                self.put(wanted.stage, state)
                answer(Done())
            else:
                answer(None)

        self._ask(wanted.holder, FetchCopy(wanted.step, wanted.stage), FETCH_SECONDS_MAX, take)

    def restore(self, name: bytes, stage: int, step: int, then: Callable[[State | None], None]) -> None:
        """Bring a stage's copy here; while nobody has it, whoever has may come back."""
        mine = self.copy(step, stage)
        if name != checkpoint_name(self._setting.run, step) or mine is not None:
            then(mine)
            return

        def take(state: State | None) -> None:
            if state is not None:
                then(state)
            else:
                self._later(RESTORE_AGAIN_SECONDS, lambda: self.restore(name, stage, step, then))

        others = [peer for peer in self._live() if peer != self._me]
        fetch_from(self._ask, others, FetchCopy(step, stage), take)

    # The committer's side

    def saved(self, plan: Plan, sender: PeerId, message: Saved) -> None:
        """A stage is put away at one of its replicas; once all are, they are copied to others."""
        saving = plan.height, message.step
        if saving > self._saving:
            self._saving, self._saved = saving, {}
        if saving == self._saving:
            self._saved[message.stage] = sender
            self._spread_next(plan)

    def _spread_next(self, plan: Plan) -> None:
        """Spread what all stages have saved, one checkpoint after the other."""
        height, step = self._saving
        if len(self._saved) == len(plan.stages) and height == plan.height and not self._is_spreading:
            self._is_spreading = True
            savers, self._saved = self._saved, {}
            self._spread(plan, step, savers)

    def _spread(self, plan: Plan, step: int, savers: dict[int, PeerId]) -> None:
        live = {self._me, *self._live()}
        roster = [peer for peer in plan.members if peer in live]
        wanted = [
            checkpoint_holders(self._setting.run, number, roster, [PeerId(peer) for peer in stage.replicas])
            for number, stage in enumerate(plan.stages)
        ]
        have: list[list[PeerId]] = [[] for _ in plan.stages]
        open_count = sum(map(len, wanted))

        def kept(stage: int, peer: PeerId, reply: Any) -> None:
            nonlocal open_count
            open_count -= 1
            if isinstance(reply, Done):
                have[stage].append(peer)
            if not open_count:
                self._is_spreading = False
                if all(
                    len(mine) >= min(COPIES_MIN, len(most)) for mine, most in zip(have, wanted, strict=True)
                ):
                    self._conclude(plan, step)  # else the checkpoint before stays the newest
                self._spread_next(plan)

        for stage, peers in enumerate(wanted):
            for peer in peers:
                question = KeepCopy(step, stage, savers[stage])

                def done(reply: Any, stage: int = stage, peer: PeerId = peer) -> None:
                    kept(stage, peer, reply)

                self._ask(peer, question, CONCLUDE_SECONDS_MAX, done)

    def _conclude(self, plan: Plan, step: int) -> None:
        name = checkpoint_name(self._setting.run, step)
        self.learn(step, name)
        live = self._live()
        for peer in plan.members:
            if peer != self._me and peer in live:
                self._send(peer, Checkpointed(plan_hash(plan), step, name))

    def learn(self, step: int, name: bytes) -> None:
        """A checkpoint is whole: whoever plans next may go back to it."""
        if self._disk.newest is None or step > self._disk.newest[1]:
            self._disk.newest = name, step
            self._learned()


def fetch_from(
    ask: Ask, sources: Sequence[PeerId], question: Any, then: Callable[[State | None], None]
) -> None:
    """Ask one after another for a state; None where nobody hands it over."""
    left = list(sources)

    def next_one(state: Any) -> None:
        if isinstance(state, State):
            then(state)
        elif left:
            ask(left.pop(0), question, FETCH_SECONDS_MAX, next_one)
        else:
            then(None)

    next_one(None)
