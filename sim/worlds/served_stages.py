"""The stages of a service that one peer holds in a world of cores, driven by the cores of `partition.serve`.

A peer without a stage takes over a missing one. If there is no such peer, a member takes it in addition, as a
stopgap, and drops it once a new holder answers. A peer that leaves first makes another peer take over its
stage. Stages at one peer compute one at a time.

Not here: slots and memory (a peer has room for `stages_each`), and the start time of a process.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol

import numpy as np

from crypto.identity import PeerId
from partition.serve.messages import Answer, Roll, ServiceRow
from partition.serve.provider import ComputeBatch, ForgetSession, ForkSession, SessionProvider
from partition.serve.provider import Event as ProviderEvent
from partition.serve.taking import further_refusal, has_other, is_member, others, stopgaps
from partition.serve.timeouts import LEAVE_SECONDS_MAX
from partition.serve.upkeep import Recruit, Relieved, RosterChanged, ServiceUpkeep
from sim.network.instants import after, instant
from sim.scenario.model import ServedModel

READ_PART = 1 / 16
"""The cost of a prompt's token relative to a generated one."""
LOOK_SECONDS = 0.1

Sends = list[tuple[PeerId, Any]]


class StageOwner(Protocol):
    """The peer that holds stages, as this module uses it."""

    peer: PeerId
    provider: SessionProvider

    @property
    def now(self) -> float: ...
    @property
    def is_over(self) -> bool: ...
    @property
    def slowness(self) -> float: ...

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Act at this time, at the thaw if the peer is frozen, or never if it is gone."""

    def turn(self, sends: Sends) -> None: ...
    def count(self, what: str) -> None: ...
    def alive(self) -> list[PeerId]: ...

    def ask_to_host(
        self, peer: PeerId, stage: int, rows: Sequence[ServiceRow], answer: Callable[[bool], None]
    ) -> None:
        """Ask a peer, possibly this one, to hold a stage."""


class LoadedStage:
    """One held stage, with the tokens of each of its sessions."""

    def __init__(self, number: int, upkeep: ServiceUpkeep) -> None:
        self.number = number
        self.upkeep = upkeep
        self.kept: dict[bytes, list[int]] = {}
        self.roster: tuple[tuple[PeerId, ...], ...] = ()


class PlayedStages:
    """All stages that a peer holds between a start and a stop. `token_after` returns the true next token."""

    def __init__(
        self,
        owner: StageOwner,
        service: bytes,
        model: ServedModel,
        token_after: Callable[[Sequence[int]], int],
    ) -> None:
        self._owner = owner
        self._service = service
        self._model = model
        self._token_after = token_after
        self._stages: dict[int, LoadedStage] = {}
        self._computes_until = -inf
        self._is_leaving = False

    @property
    def held(self) -> list[LoadedStage]:
        """The stages, the permanent one first."""
        return sorted(self._stages.values(), key=lambda held: held.upkeep.is_stopgap)

    @property
    def deadline(self) -> float:
        return min((each.upkeep.deadline for each in self._stages.values()), default=inf)

    # Members' messages

    def wake(self, now: float) -> Sends:
        return [send for each in self.held for send in each.upkeep.wake(now)]

    def receive(self, now: float, sender: PeerId, message: Roll) -> Sends:
        return [send for each in self.held for send in each.upkeep.receive(now, sender, message)]

    def lost(self, now: float, peer: PeerId) -> Sends:
        return [send for each in self.held for send in each.upkeep.lost(now, peer)]

    def listing(self) -> list[tuple[int, bool, int]]:
        """Return for each stage its number, whether it answers, and the number of its sessions."""
        sessions = self._owner.provider.sessions_of(self._service)
        return [(each.number, each.upkeep.is_ready, sessions) for each in self.held]

    def act(self) -> None:
        """Carry out the output of the cores."""
        for each in self.held:
            events, each.upkeep.events = each.upkeep.events, []
            for event in events:
                match event:
                    case Recruit():
                        self._recruit(each, event)
                    case RosterChanged():
                        each.roster = event.ready
                    case Relieved():
                        self._owner.count("stopgaps relieved")
                        self._let_go(each)

    # Taking and dropping stages

    def take(self, asker: PeerId, stage: int, rows: Sequence[ServiceRow]) -> bool:
        """Start loading a stage for `asker`; return whether it is loading or loaded."""
        now, here = self._owner.now, self.held
        cores = [each.upkeep for each in here]
        is_owner = asker == self._owner.peer
        for core in cores if is_owner or is_member(cores, asker) else ():
            core.introduce(now, rows)
        if stage in self._stages:
            return True
        model = self._model
        if self._is_leaving:
            return False
        if here and further_refusal(cores, stage, asker, is_owner=is_owner, stages_max=model.stages_each):
            return False
        upkeep = ServiceUpkeep(
            now, self._owner.peer, self._service, model.stages, model.replicas, stage, rows,
            is_stopgap=bool(here),
        )  # fmt: skip
        if here:
            self._owner.count("stopgaps taken")
        held = self._stages[stage] = LoadedStage(stage, upkeep)
        self._owner.at(after(now, model.load_seconds), partial(self._loaded, held))
        self._owner.turn([])
        return True

    def _loaded(self, held: LoadedStage) -> None:
        if self._stages.get(held.number) is not held:
            return
        context = 4 * self._model.prompt + self._model.tokens
        self._owner.provider.hold(self._service, held.number, self._model.stages, context)
        self._owner.turn(list(held.upkeep.ready(self._owner.now)))

    def _let_go(self, held: LoadedStage) -> None:
        if self._stages.get(held.number) is not held:
            return
        del self._stages[held.number]
        sends: Sends = [*self._owner.provider.release(self._service, held.number, "leaving", "it is let go")]
        sends += held.upkeep.leave()
        left = self.held
        if left and left[0].upkeep.is_stopgap:
            left[0].upkeep.stay(self._owner.now)
        self._owner.turn(sends)

    def leave(self, then: Callable[[], None]) -> None:
        """Drop all stages. A stage whose sessions would have to wait is kept until another peer answers for
        it. `then` is called afterwards, or after a node's time limit."""
        self._is_leaving = True
        until = self._owner.now + LEAVE_SECONDS_MAX
        for each in self.held:
            self._hand_over(each, until)

        def look() -> None:
            if self._stages:
                self._owner.at(instant(self._owner.now + LOOK_SECONDS), look)
            else:
                then()

        look()

    def _hand_over(self, held: LoadedStage, until: float) -> None:
        owner = self._owner
        if not owner.provider.sessions_of(self._service) or self._has_other(held):
            self._let_go(held)
            return

        def found(peer: PeerId | None) -> None:
            if peer is not None:
                held.upkeep.introduce(owner.now, (ServiceRow(peer, held.number, False),))
                owner.turn([])
            look(peer)

        def look(peer: PeerId | None) -> None:
            if peer is None or self._has_other(held) or owner.now >= until:
                self._let_go(held)
            else:
                owner.at(instant(owner.now + LOOK_SECONDS), partial(look, peer))

        rows = held.upkeep.rows()
        self._place(held.number, rows, [*self._free(rows), *others(rows, owner.peer)], found)

    def _has_other(self, held: LoadedStage) -> bool:
        return has_other(held.roster, held.number, self._owner.peer)

    # Finding others

    def _recruit(self, held: LoadedStage, wanted: Recruit) -> None:
        """Ask live peers without a stage one by one; then ask members if none of these peers takes the
        stage."""
        rows = held.upkeep.rows()
        free = self._free((*rows, *(ServiceRow(peer, 0, False) for peer in wanted.members)))
        asked = [peer for peer in free if peer not in wanted.failed] + stopgaps(wanted, self._owner.peer)

        def found(peer: PeerId | None) -> None:
            held.upkeep.recruited(self._owner.now, wanted.stage, peer)
            self._owner.turn([])

        self._place(wanted.stage, rows, asked, found)

    def _free(self, rows: Iterable[ServiceRow]) -> list[PeerId]:
        taken = {self._owner.peer, *(row.peer for row in rows)}
        return [peer for peer in self._owner.alive() if peer not in taken]

    def _place(
        self,
        stage: int,
        rows: Sequence[ServiceRow],
        peers: list[PeerId],
        found: Callable[[PeerId | None], None],
    ) -> None:
        def go_on(peer: PeerId | None = None, takes: bool = False) -> None:
            if self._owner.is_over:
                return
            if takes or not peers:
                found(peer if takes else None)
                return
            other = peers.pop(0)
            self._owner.ask_to_host(other, stage, rows, partial(go_on, other))

        go_on()

    # Computing

    def do(self, event: ProviderEvent) -> None:
        """Carry out a provider's event about a stage."""
        held = self._stages.get(event.stage)
        if held is None:
            return
        match event:
            case ComputeBatch():
                begins = max(self._owner.now, self._computes_until)
                self._computes_until = instant(begins + self._seconds(event))
                self._owner.at(self._computes_until, partial(self._computed, held, event))
            case ForgetSession():
                held.kept.pop(event.session, None)
            case ForkSession():
                held.kept[event.session] = held.kept.get(event.base, [])[: event.tokens]

    def _seconds(self, asked: ComputeBatch) -> float:
        tokens = sum(1.0 if unit.work.tokens == 1 else READ_PART * unit.work.tokens for unit in asked.units)
        return float(self._model.pass_seconds * max(1.0, tokens**0.5) * self._owner.slowness)

    def _computed(self, held: LoadedStage, asked: ComputeBatch) -> None:
        if self._stages.get(held.number) is not held:
            return
        is_last = held.number == self._model.stages - 1
        answers: list[tuple[Answer | None, Any]] = []
        for unit in asked.units:
            work, ids = unit.work, unit.arrays[0][1]
            kept = held.kept.setdefault(unit.session, [])
            del kept[work.position :]
            kept += ids.tolist()
            if not is_last:
                answers.append((None, unit.arrays))
            elif not work.wanted:
                answers.append((Answer(work.session, work.number), ()))
            else:
                best = np.array([[self._token_after(kept)]], np.int64)
                rows = (("int64", best), ("float32", np.ones((1, 1), np.float32)))
                answers.append((Answer(work.session, work.number, work.best, (1.0,)), rows))
        self._owner.turn(self._owner.provider.computed(self._owner.now, asked.service, asked.batch, answers))
