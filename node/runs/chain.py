"""The shell around a `partition.plan.agreement.Agreement`: one run's chain of plans on this node.

Its promises are on disk before anybody hears of them. One task takes what comes in, strictly in order.
"""

from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.seams import Seams, own_rng
from partition.plan.agreement import Agreement, PlanDecided
from partition.plan.change import Change
from partition.plan.plan import NOTHING, Plan
from partition.plan.votes import Head

QUEUE_MAX = 4_096
"""Messages that wait for the disk; what comes on top is dropped, as a lossy network would."""

Send = Callable[[PeerId, Any], None]


def chain_name(run: str) -> str:
    """Where a node keeps what it has promised in a run, in its storage."""
    return f"runs/{run}/chain"


class ChainShell:
    """Agrees on plans; `on_event` hears of each that was decided, after it is on disk here."""

    def __init__(
        self,
        me: PeerId,
        run: str,
        plan: Plan,
        seams: Seams,
        *,
        durable: bytes = b"",
        may_fork: bool,
        send: Send,
        on_event: Callable[[Any], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        self.core = Agreement(me, plan, own_rng(seams.rng), durable=durable, may_fork=may_fork)
        self._name = chain_name(run)
        self._seams = seams
        self._send = send
        self._on_event = on_event
        self._refuse = refuse
        self._waiting: deque[Callable[[float], list[tuple[PeerId, Any]]]] = deque()
        self._more = trio.Event()
        self._step = 0
        self._forked_step: int | None = None

    @property
    def head(self) -> Plan:
        """The newest plan that is known to be decided."""
        return self.core.head

    def receive(self, sender: PeerId, message: Any) -> None:
        """A message about the chain, from anybody: it is checked, or refused, when it is its turn."""
        self._do(lambda now: self._checked(now, sender, message))

    def _checked(self, now: float, sender: PeerId, message: Any) -> list[tuple[PeerId, Any]]:
        try:
            return list(self.core.receive(now, sender, message))
        except RemoteProtocolError as error:
            self._refuse(sender, error)
            return []

    def wish(self, change: Change | None, parent: bytes) -> None:
        """What this member would have decided after the plan `parent`; None for nothing."""
        self._do(lambda now: self.core.wish(now, change, parent=parent))

    def reach(self, live: Collection[PeerId]) -> None:
        """Who is believed to be alive has changed."""
        self._do(lambda now: self.core.reach(now, live))

    def tell(self, peer: PeerId) -> None:
        """Make a peer say what of the chain is missing here, and ask for what it lacks."""
        for receiver, message in self.core.tell(peer):
            self._send(receiver, message)

    def say(self, step: int, samples: int, *, hosts: bool) -> None:
        """How far this member is: by that it judges which of two branches survives."""
        plan, self._step = self.core.head, step
        self.core.say(
            Head(
                run=plan.run,
                parent=self.core.head_hash,
                fork=plan.fork,
                height=plan.height,
                step=step,
                samples=samples,
                hosts=hosts,
            )
        )

    def parting(self, step: int) -> str:
        """What it costs to give this branch up after so many steps, for a person."""
        reason = "another branch of the run goes on"
        if self._forked_step is None:
            return reason
        return f"{reason}: {step - self._forked_step} steps that were committed here are discarded"

    async def run(self) -> None:
        """Keep promises until cancelled."""
        if self.core.unsaved:
            await self._save()
        while True:
            while self._waiting:
                await self._take(self._waiting.popleft())
            self._more = trio.Event()
            due = self.core.deadline
            with trio.move_on_at(due):
                await self._more.wait()
            if not self._more.is_set():
                # Whatever the clock rounds to, the time has come.
                await self._take(partial(self._wake, due))

    def _wake(self, due: float, now: float) -> list[tuple[PeerId, Any]]:
        return list(self.core.wake(max(now, due)))

    def _do(self, call: Callable[[float], list[tuple[PeerId, Any]]]) -> None:
        if len(self._waiting) < QUEUE_MAX:
            self._waiting.append(call)
            self._more.set()

    async def _take(self, call: Callable[[float], list[tuple[PeerId, Any]]]) -> None:
        try:
            sends = call(self._seams.clock.monotonic())
        except RemoteProtocolError:
            sends = []  # a wish of our own that does not fit any more
        if self.core.unsaved:
            await self._save()
        for peer, message in sends:
            self._send(peer, message)
        events, self.core.events[:] = list(self.core.events), []
        for event in events:
            if isinstance(event, PlanDecided) and event.plan.fork != NOTHING and self._forked_step is None:
                self._forked_step = self._step  # nothing was committed since the others were lost
            self._on_event(event)

    async def _save(self) -> None:
        self.core.unsaved = False
        await self._seams.executor.run(partial(self._seams.storage.write, self._name, self.core.durable))
