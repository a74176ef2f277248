"""A trainer's side of exact mode: which inputs and labels it sends, and to whom.

Every trainer of the plan feeds its own micro-batches (`partition.plan.assignment.feeder_of`), as the
committer's Open asks. The driver makes the frames; if it sends a frame again, it must be the same.
"""

from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.assignment import feeder_of
from partition.plan.plan import Plan, plan_hash
from partition.steps.messages import Open, Sends
from partition.steps.routes import Routes


@dataclass(frozen=True)
class FeedReady:
    """Send this micro-batch's inputs to `input_to` and its labels to `labels_to`; None if they need not be
    sent now.

    Once the held-out micro-batch n + `EVALUATIONS_IN_FLIGHT_MAX` was asked for, n is never asked for again.
    """

    step: int
    attempt: int
    microbatch: int
    train: bool
    input_to: PeerId | None
    labels_to: PeerId | None


@dataclass(frozen=True)
class FramesDone:
    """The frames of `step` and of all earlier ones are no longer needed."""

    step: int


class Feeder:
    """The feeder of one trainer under one plan."""

    deadline = inf

    def __init__(self, me: PeerId, plan: Plan) -> None:
        self.me = me
        self.plan = plan
        self.plan_hash = plan_hash(plan)
        self.events: list[FeedReady | FramesDone] = []
        self._last = len(plan.stages) - 1
        self._routes: Routes | None = None
        self._mine: list[int] = []
        self._sent: dict[tuple[int, Literal["input", "labels"]], PeerId] = {}

    def receive(self, now: float, sender: PeerId, message: Open) -> Sends:  # noqa: ARG002 - the shape of a core
        """Handle an Open of the committer. Nothing is returned to send: `events` has the frames that the
        driver must send."""
        if message.plan != self.plan_hash:
            return []
        if sender != self.plan.committer:
            raise RemoteProtocolError("an Open came from a peer that is not the committer")
        routes = Routes(self.plan, message)
        before = self._routes
        if before is not None:
            if (routes.step, routes.attempt) <= (before.step, before.attempt):
                return []
            if routes.step > before.step:
                self.events.append(FramesDone(before.step))
            if routes.step > before.step or routes.train != before.train:
                self._sent.clear()
        if before is None or routes.numbers != before.numbers or routes.train != before.train:
            self._mine = [
                number for number in routes.numbers if feeder_of(self.plan, routes.train, number) == self.me
            ]
        self._routes = routes
        for key in [key for key in self._sent if key[0] < routes.numbers.start]:
            del self._sent[key]
        for number in self._mine:
            self._feed(routes, number, again_to=None)
        return []

    def wake(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        """Do nothing, because no timer exists."""
        return []

    def reconnected(self, peer: PeerId) -> Sends:
        """Request the frames again that `peer` may have lost, because its stream broke and is open again."""
        if self._routes is not None:
            for number in self._mine:
                self._feed(self._routes, number, again_to=peer)
        return []

    def _feed(self, routes: Routes, number: int, *, again_to: PeerId | None) -> None:
        receivers: dict[str, PeerId | None] = {"input": None, "labels": None}
        for stage, direction in ((0, "input"), (self._last, "labels")):
            wanted = routes.wants(stage, number)
            key: Any = number, direction
            if wanted is not None and (self._sent.get(key) != wanted or wanted == again_to):
                self._sent[key] = wanted
                receivers[direction] = wanted
        if any(receivers.values()):
            self.events.append(
                FeedReady(
                    routes.step,
                    routes.attempt,
                    number,
                    routes.train,
                    receivers["input"],
                    receivers["labels"],
                )
            )
