"""What a replica has of the micro-batches of its open step, and which of them its stage computes next.

1F1B (Narayanan and others 2019, PipeDream): backward before forward, and a new forward only while few
micro-batches are between their two passes here, so a stage holds as many as there are stages from it to the
end and no more. GPipe (Huang and others 2019): all forwards first.

Neither can lock up: the last stage holds nothing, so whatever waits there gets through; by induction so does
whatever the stage before holds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal

from partition.codec import Payload
from partition.steps.frames import Direction
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX

Schedule = Literal["1f1b", "gpipe"]
Owned = Callable[[int], bool]
Result = tuple[int, float]
"""Samples, and the loss summed over them; zeros but on the last stage."""


@dataclass
class Microbatch:
    """What has arrived of one micro-batch, and how far it is here."""

    input: Payload | None = None
    labels: Payload | None = None
    gradient: Payload | None = None
    forward: Literal["waiting", "running", "done"] = "waiting"
    backward: Literal["waiting", "running", "done"] = "waiting"

    def put(self, direction: Direction, payload: Payload) -> None:
        """The first of each kind stays: what is summed must be what is taken out again."""
        match direction:
            case "input":
                self.input = self.input or payload
            case "labels":
                self.labels = self.labels or payload
            case "gradient":
                self.gradient = self.gradient or payload

    def may_forward(self, *, is_last: bool) -> bool:
        """Whether all that the forward pass needs is here."""
        complete = self.input is not None and (self.labels is not None or not is_last)
        return complete and self.forward == "waiting"

    def may_backward(self) -> bool:
        """Whether the pass back may run."""
        return self.gradient is not None and self.forward == "done" and self.backward == "waiting"


class StepOrder:
    """The open step of one replica. Bounded by its micro-batches; `clear` begins the next."""

    def __init__(self, schedule: Schedule, *, is_last: bool) -> None:
        self._schedule = schedule
        self._is_last = is_last
        self.microbatches: dict[int, Microbatch] = {}
        self.counted: dict[int, Result] = {}
        self.in_flight: set[int] = set()
        self._forwards: list[int] = []
        self._backwards: list[int] = []

    def clear(self) -> None:
        """Nothing of the step is left."""
        self.microbatches.clear()
        self.counted.clear()
        self.in_flight.clear()
        self._forwards.clear()
        self._backwards.clear()

    def put(self, number: int, direction: Direction, payload: Payload) -> None:
        """Something of a micro-batch has arrived."""
        self.microbatches.setdefault(number, Microbatch()).put(direction, payload)
        self.offer((number,))

    def offer(self, numbers: Iterable[int]) -> None:
        """Consider these again: more of them has arrived, or they may have become this replica's."""
        for number in numbers:
            state = self.microbatches[number]
            if state.may_forward(is_last=self._is_last):
                heappush(self._forwards, number)
            elif state.may_backward():
                heappush(self._backwards, number)

    # What comes next

    def not_owned(self, owned: Owned) -> int | None:
        """One that is between its passes here and is somebody else's by now."""
        return min((number for number in self.in_flight if not owned(number)), default=None)

    def next_pass(
        self, owned: Owned, in_flight_max: int
    ) -> tuple[Literal["forward", "backward"], int] | None:
        """The pass to run now, which counts as running from here on."""
        forwards_first = self._schedule == "gpipe"
        if forwards_first and (number := self._next_forward(owned, in_flight_max)) is not None:
            return "forward", number
        while self._backwards:
            number = heappop(self._backwards)
            state = self.microbatches[number]
            if owned(number) and state.may_backward():
                state.backward = "running"
                return "backward", number
        if not forwards_first and (number := self._next_forward(owned, in_flight_max)) is not None:
            return "forward", number
        return None

    def _next_forward(self, owned: Owned, in_flight_max: int) -> int | None:
        if len(self.in_flight) >= in_flight_max:
            return None
        while self._forwards:
            number = heappop(self._forwards)
            state = self.microbatches[number]
            if owned(number) and state.may_forward(is_last=self._is_last):
                state.forward = "running"
                return number
        return None

    # What has been done

    def hold(self, number: int) -> None:
        """The forward pass is done, and a gradient will come."""
        self.microbatches[number].forward = "done"
        self.in_flight.add(number)
        self.offer((number,))

    def count(self, number: int, samples: int = 0, loss: float = 0.0) -> None:
        """Its gradient is in the sums."""
        state = self.microbatches[number]
        state.forward = state.backward = "done"
        self.in_flight.discard(number)
        self.counted[number] = (samples, loss)

    def forget(self, number: int) -> None:
        """It is as if it had never been computed; what has arrived of it stays."""
        state = self.microbatches[number]
        state.forward = state.backward = "waiting"
        self.in_flight.discard(number)
        self.counted.pop(number, None)
        self.offer((number,))


class HeldOut:
    """The held-out micro-batches under way: few, for whoever is so far behind the newest is done."""

    def __init__(self) -> None:
        self.microbatches: dict[int, Microbatch] = {}
        self._newest = -1

    def clear(self) -> None:
        """Another plan evaluates anew."""
        self.microbatches.clear()
        self._newest = -1

    def put(self, number: int, direction: Direction, payload: Payload) -> int:
        """Something of one has arrived. Returns the first that may still be under way."""
        self._newest = max(self._newest, number)
        first = self._newest - EVALUATIONS_IN_FLIGHT_MAX + 1
        if number >= first:
            self.microbatches.setdefault(number, Microbatch()).put(direction, payload)
        return first

    def forget(self, first: int) -> None:
        """Those before `first` are done everywhere."""
        for number in [number for number in self.microbatches if number < first]:
            del self.microbatches[number]

    def next_forward(self, owned: Owned, is_last: bool) -> int | None:
        """The one to run now, which counts as running from here on."""
        for number in sorted(self.microbatches):
            state = self.microbatches[number]
            if owned(number) and state.may_forward(is_last=is_last):
                state.forward = "running"
                return number
        return None

    def finish(self, number: int) -> bool:
        """It has run. False where nobody asks for it any more."""
        if number not in self.microbatches:
            return False
        self.microbatches[number].forward = "done"
        return True
