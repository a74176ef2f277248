"""Agreement of a run's members on checkpoints: the savers, the keepers of copies, and when a checkpoint is
whole.

After the steps that the manifest determines, the first replica of each stage saves a copy of its state and
reports it to the committer. Once all stages are saved, the committer asks the keepers to copy them; each
keeper is asked for one stage at a time (`KeepStage`). Then it has the checkpoint sealed (`SealWanted`), and
asks the keepers to record its name (`NameCheckpoint`). Once enough keepers have done so, and the name is on
this member's own disk (`NewestChanged`), the committer announces the checkpoint to all members. Only one
checkpoint is spread at a time. If spreading fails, the previous checkpoint stays the newest.

Not here: the meaning of a replica's description of its saved state, which is passed on unread.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import Asks, Done, KeepStage, NameCheckpoint, Reply
from partition.run.events import CheckpointEnded, CheckpointWhole, Event, NewestChanged, SealWanted
from partition.run.messages import Checkpointed
from partition.run.way_back import WayBack, WaysBack

COPIES = 3
"""Number of keepers of each stage. Two may fail within the same hour."""
COPIES_MIN = 2
"""Minimum number of copies of each stage. A single copy could be lost together with the replica that it must
replace."""
KEEP_SECONDS_MAX = 3_600.0
"""Time limit for copying one stage: enough for 12 GB at 30 Mbit/s."""
NAME_SECONDS_MAX = 90.0
"""Time limit for a keeper to record the name and the checkpoint's manifest."""


def checkpoint_holders(
    run: bytes, stage: int, roster: Collection[PeerId], replicas: Collection[PeerId], count: int = COPIES
) -> tuple[PeerId, ...]:
    """Return the keepers of a stage's chunks: `count` of the roster by rendezvous hashing (Thaler and
    Ravishankar 1998), or the whole roster if it is smaller.

    A peer that comes or goes moves only its own share. If the roster has a peer that is not a replica of the
    stage, the keepers include one, so that not all copies are lost if the replicas fail.
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
class _Gathering:
    """The stages saved after one step. `rows` maps a stage's number to its saver and state."""

    plan: Plan
    step: int
    rows: dict[int, tuple[PeerId, object]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == len(self.plan.stages)


@dataclass
class _Spread:
    """The checkpoint that is being spread. `left` has the stages that each keeper must still be asked for,
    `asked` the keeper and stage of each open request, `have` the keepers that have each stage, and `named`
    those that recorded the name."""

    plan: Plan
    step: int
    states: tuple[object, ...]
    savers: tuple[PeerId, ...]
    keepers: tuple[tuple[PeerId, ...], ...]
    left: dict[PeerId, list[int]] = field(default_factory=dict)
    asked: dict[int, tuple[PeerId, int]] = field(default_factory=dict)
    have: list[set[PeerId]] = field(default_factory=list)
    name: bytes = b""
    named: set[PeerId] = field(default_factory=set)

    @property
    def is_sealed(self) -> bool:
        return bool(self.name)


class CheckpointRounds:
    """One member's part in the rounds. It puts `asks`, adds to the member's `events`, and gets answers
    through `replied`. `tell` sends to peers; `learned` is called when this member learns of a newer
    checkpoint."""

    def __init__(
        self,
        me: PeerId,
        *,
        plan: Callable[[], Plan | None],
        ways_back: WaysBack,
        best: Callable[[], WayBack | None],
        asks: Asks,
        events: list[Event],
        live: Callable[[], Collection[PeerId]],
        tell: Callable[[Collection[PeerId], Checkpointed], None],
        learned: Callable[[float], None],
        newest: WayBack | None = None,
    ) -> None:
        """`plan` returns the plan in force; `live` the other present and former members that are reachable;
        `best` the checkpoint of the state with the best validation. `newest` is the newest whole checkpoint
        that was stored before a restart."""
        self.best_step: int | None = None
        """The step of the best state so far, if the run keeps its best state."""
        self._me = me
        self._plan = plan
        self._ways_back = ways_back
        self._best = best
        self._asks = asks
        self._events = events
        self._live = live
        self._tell = tell
        self._learned = learned
        self._newest = newest
        self._is_stored = True
        self._untold: list[CheckpointWhole] = []
        self._gathering: dict[bool, _Gathering] = {}
        self._spread: _Spread | None = None

    @property
    def newest(self) -> WayBack | None:
        """The name and step of the newest checkpoint that is whole somewhere."""
        return self._newest

    def saves(self, plan: Plan, stage: int) -> bool:
        """Return whether this member saves a stage. One replica of each stage does."""
        return plan.stages[stage].replicas[0] == self._me

    # The committer's side

    def saved(self, sender: PeerId, step: int, stage: int, state: object) -> None:
        """Record that the replica `sender` has saved a stage after `step` steps.

        Raises:
            RemoteProtocolError: `sender` does not hold this stage, or this member does not commit.
        """
        plan = self._plan()
        if plan is None:
            return
        if plan.committer != self._me:
            raise RemoteProtocolError("a saved stage was reported to a peer that is not the run's committer")
        if not 0 <= stage < len(plan.stages) or sender not in plan.stages[stage].replicas:
            raise RemoteProtocolError("a stage was saved by a peer that does not hold it")
        # The best state waits until it can be spread; any other state yields to a newer one.
        is_best, mine = step == self.best_step, self._gathering.get(step == self.best_step)
        if mine is None or (plan.height, step) > (mine.plan.height, mine.step):
            mine = self._gathering[is_best] = _Gathering(plan, step)
        if (plan.height, step) == (mine.plan.height, mine.step):
            mine.rows[stage] = sender, state
            self._spread_next()

    def _spread_next(self) -> None:
        """Spread the oldest checkpoint that all stages have saved."""
        whole = {key: each for key, each in self._gathering.items() if each.is_whole}
        if self._spread is not None or not whole:
            return
        oldest = min(whole, key=lambda key: whole[key].step)
        # the entry stays, so that a late save for an earlier plan is ignored
        gathered = self._gathering[oldest]
        plan = gathered.plan
        rows = [gathered.rows.pop(number) for number in range(len(plan.stages))]
        live = {self._me, *self._live()}
        roster = [peer for peer in plan.members if peer in live]
        keepers = tuple(
            checkpoint_holders(plan.run, number, roster, [PeerId(peer) for peer in stage.replicas])
            for number, stage in enumerate(plan.stages)
        )
        spread = self._spread = _Spread(
            plan, gathered.step, tuple(row[1] for row in rows), tuple(row[0] for row in rows), keepers
        )
        spread.have = [set() for _ in rows]
        for stage, peers in enumerate(keepers):
            for peer in peers:
                spread.left.setdefault(peer, []).append(stage)
        for peer in spread.left:
            self._ask_next(spread, peer)

    def _ask_next(self, spread: _Spread, peer: PeerId) -> None:
        """Ask a keeper to copy its next stage, if any is left; it copies one at a time."""
        if spread.left[peer]:
            stage = spread.left[peer].pop(0)
            request = KeepStage(spread.plan, spread.step, stage, spread.states[stage], spread.savers[stage])
            spread.asked[self._asks.put(peer, request, KEEP_SECONDS_MAX)] = peer, stage

    def replied(self, now: float, number: int, reply: Reply) -> None:
        """Handle the answer to one of `asks`."""
        spread = self._spread
        if spread is None or number not in spread.asked:
            return
        peer, stage = spread.asked.pop(number)
        if spread.is_sealed:
            spread.named |= {peer} if isinstance(reply, Done) else set()
            if not spread.asked:
                self._conclude(now, spread)
            return
        spread.have[stage] |= {peer} if isinstance(reply, Done) else set()
        self._ask_next(spread, peer)
        if spread.asked:
            return
        if _are_enough(spread.have, spread.keepers):
            self._events.append(SealWanted(spread.plan, spread.step, spread.states))
        else:
            self._end()  # the previous checkpoint stays the newest

    def sealed(self, now: float, step: int, name: bytes) -> None:
        """Continue with the checkpoint of `step`, which was sealed here under this name."""
        spread = self._spread
        if spread is None or spread.step != step or spread.asked or spread.is_sealed:
            return
        spread.name = name
        for peer in sorted(set().union(*spread.have) - {self._me}):
            asked = self._asks.put(peer, NameCheckpoint(spread.plan, step, name), NAME_SECONDS_MAX)
            spread.asked[asked] = peer, 0
        if not spread.asked:
            self._conclude(now, spread)

    def seal_failed(self, step: int) -> None:
        """Give up the checkpoint of `step`, which could not be sealed here."""
        if self._spread is not None and self._spread.step == step and not self._spread.is_sealed:
            self._end()

    def _conclude(self, now: float, spread: _Spread) -> None:
        """Finish a checkpoint after its keepers have answered whether they recorded its name."""
        kept = [each & {self._me, *spread.named} for each in spread.have]
        if _are_enough(kept, spread.keepers):
            self.learn(now, spread.step, spread.name)
            copies = min(map(len, kept))
            self._untold.append(CheckpointWhole(spread.plan, spread.step, spread.states, spread.name, copies))
            if self._is_stored:
                self._announce()
        self._end()

    def _end(self) -> None:
        """Stop spreading the current checkpoint, whether whole or failed, and start the next one."""
        self._spread = None
        self._spread_next()
        if self._spread is None:
            self._events.append(CheckpointEnded())

    # All members

    @property
    def restorable(self) -> WayBack | None:
        """The name and step of the newest checkpoint that is whole somewhere; under a final plan, of the
        checkpoint that is the result."""
        plan = self._plan()
        return self._best() if plan is not None and plan.is_final else self._newest

    def find_way_back(self, furthest: int) -> WayBack | None:
        """Return the state from which a stage without a replica can be restored; None if there is none. The
        run has committed at most `furthest` steps."""
        return self._ways_back.find(self.restorable, furthest)

    def entered(self, now: float, plan: Plan) -> None:
        """Note the plan that has come into force."""
        self._learn(now, self._ways_back.entered(plan))

    def told(self, now: float, message: Checkpointed) -> None:
        """Note a checkpoint that the committer announced. Raises RemoteProtocolError."""
        self._learn(now, self._ways_back.told(message))

    def tell(self, peers: Collection[PeerId]) -> None:
        """As the committer: announce the restorable checkpoint to these peers, because any of them may be the
        next proposer."""
        plan = self._plan()
        if plan is not None and plan.committer == self._me:
            news = self._ways_back.news(plan, self.restorable)
            if news is not None:
                self._tell(peers, news)

    def _learn(self, now: float, found: WayBack | None) -> None:
        if found is not None:
            self.learn(now, found[1], found[0])

    def learn(self, now: float, step: int, name: bytes) -> None:
        """Remember a whole checkpoint, to which a later plan may return."""
        if self._newest is None or step > self._newest[1]:
            self._change((name, step))
            self._learned(now)

    def forget_after(self, step: int) -> None:
        """Forget all checkpoints of more than `step` steps, including one that is being spread. They belong
        to a branch that was given up, so the run must not return to them."""
        for each in self._gathering.values():
            if each.step > step:
                each.rows.clear()
        if self._spread is not None and self._spread.step > step:
            self._end()
        if self._newest is not None and self._newest[1] > step:
            self._untold.clear()
            self._change(None)

    def _change(self, newest: WayBack | None) -> None:
        self._newest, self._is_stored = newest, False
        self._events.append(NewestChanged(newest))

    def stored(self, newest: WayBack | None) -> None:
        """Note that the newest checkpoint's name is stored, or cannot be stored. In both cases the checkpoint
        may be announced."""
        if newest == self._newest:
            self._is_stored = True
            self._announce()

    def _announce(self) -> None:
        untold, self._untold[:] = list(self._untold), []
        for whole in untold:
            plan, live = whole.plan, set(self._live())
            audience = [peer for peer in plan.members if peer != self._me and peer in live]
            self._tell(audience, Checkpointed(plan_hash(plan), whole.step, whole.name))
            self._events.append(whole)


def _are_enough(have: Sequence[Collection[PeerId]], wanted: Sequence[Collection[PeerId]]) -> bool:
    """Return whether each stage has enough copies to survive the loss of one."""
    return all(len(each) >= min(COPIES_MIN, len(most)) for each, most in zip(have, wanted, strict=True))
