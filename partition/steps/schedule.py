"""The micro-batches of a replica's open step, and the choice of the next pass to compute.

1F1B (Narayanan and others 2019, PipeDream) prefers backward passes. It begins a forward pass only while few
micro-batches are between their two passes here, so a stage holds at most as many as there are stages from it
to the end. GPipe (Huang and others 2019) does all forward passes first.

Neither schedule can deadlock. The last stage holds no micro-batches, so everything that waits there is
computed. By induction, so is everything that each earlier stage holds.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Literal

from partition.codecs.codec import Payload
from partition.steps.frames import Direction, OpenedFrame
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX

Schedule = Literal["1f1b", "gpipe"]
Owned = Callable[[int], bool]
Result = tuple[int, float]
"""The number of samples and their summed loss; both are 0 except in the last stage."""


Progress = Literal["waiting", "running", "done"]


@dataclass
class Microbatch:
    """The received frames of one micro-batch, and its progress here.

    The first frame of each kind stays, because the same frame must be summed and, if necessary, taken out
    again. Until the stage has used it, frames of the same kind from other authors are kept as spares, in case
    the first is unusable.
    """

    frames: dict[Direction, OpenedFrame] = field(default_factory=dict)
    spares: list[OpenedFrame] = field(default_factory=list)
    refused: set[tuple[Direction, bytes, bytes]] = field(default_factory=set)
    forward: Progress = "waiting"
    backward: Progress = "waiting"

    def payload(self, direction: Direction) -> Payload | None:
        """Return the payload for the stage; None if it has not arrived."""
        frame = self.frames.get(direction)
        return None if frame is None else frame.payload

    def given(self, direction: Direction) -> Payload:
        """Return the payload of a frame that is known to be here."""
        return self.frames[direction].payload

    def put(self, frame: OpenedFrame) -> None:
        """Keep a frame. A repeated frame of the same author, even of a refused one, changes nothing."""
        direction = frame.header.direction
        name = _named(frame)
        held = self.frames.get(direction)
        if name in self.refused:
            return
        if held is None:
            self.frames[direction] = frame
        elif name not in map(_named, (held, *self.spares)) and self._progress(direction) != "done":
            self.spares.append(frame)

    def refuse(self, direction: Direction) -> OpenedFrame:
        """Drop a frame that the stage cannot use, and replace it by a spare if there is one."""
        bad = self.frames.pop(direction)
        self.refused.add(_named(bad))
        for spare in self.spares:
            if spare.header.direction == direction:
                self.frames[direction] = spare
                self.spares.remove(spare)
                break
        if direction == "gradient":
            self.backward = "waiting"
        else:
            self.forward = "waiting"
        return bad

    def settle(self) -> None:
        """Drop the spares of frames that the stage has used."""
        self.spares = [spare for spare in self.spares if self._progress(spare.header.direction) != "done"]

    def _progress(self, direction: Direction) -> Progress:
        return self.backward if direction == "gradient" else self.forward

    def may_forward(self, *, is_last: bool) -> bool:
        """Return whether all inputs of the forward pass are here."""
        complete = "input" in self.frames and ("labels" in self.frames or not is_last)
        return complete and self.forward == "waiting"

    def may_backward(self) -> bool:
        """Return whether the backward pass may run."""
        return "gradient" in self.frames and self.forward == "done" and self.backward == "waiting"


def _named(frame: OpenedFrame) -> tuple[Direction, bytes, bytes]:
    return frame.header.direction, frame.author, frame.header.plan


class StepSchedule:
    """The open step of one replica. Its size is limited by the number of micro-batches; `clear` begins the
    next step."""

    def __init__(self, schedule: Schedule, *, is_last: bool) -> None:
        self._schedule = schedule
        self._is_last = is_last
        self.microbatches: dict[int, Microbatch] = {}
        self.counted: dict[int, Result] = {}
        self.in_flight: set[int] = set()
        self._forwards: list[int] = []
        self._backwards: list[int] = []

    def clear(self) -> None:
        """Clear the step."""
        self.microbatches.clear()
        self.counted.clear()
        self.in_flight.clear()
        self._forwards.clear()
        self._backwards.clear()

    def put(self, frame: OpenedFrame) -> None:
        """Take a frame of a micro-batch."""
        number = frame.header.microbatch
        self.microbatches.setdefault(number, Microbatch()).put(frame)
        self.offer((number,))

    def refuse(self, number: int, direction: Direction) -> OpenedFrame:
        """Refuse a frame that the stage cannot use, and wait for another one."""
        bad = self.microbatches[number].refuse(direction)
        self.offer((number,))
        return bad

    def offer(self, numbers: Iterable[int]) -> None:
        """Consider these micro-batches again, because more frames have arrived or their owner may have
        changed."""
        for number in numbers:
            state = self.microbatches[number]
            if state.may_forward(is_last=self._is_last):
                heappush(self._forwards, number)
            elif state.may_backward():
                heappush(self._backwards, number)

    def told(self) -> dict[str, Any]:
        """Return the progress in the form of a Synced."""
        rows = sorted(self.counted.items())
        return {
            "counted": tuple(number for number, _ in rows),
            "samples": tuple(samples for _, (samples, _) in rows),
            "losses": tuple(loss for _, (_, loss) in rows),
            "begun": tuple(sorted(self.in_flight)),
        }

    # The next pass

    def not_owned(self, owned: Owned) -> int | None:
        """Return a micro-batch that is between its two passes here but now has another owner; None if there
        is none."""
        return min((number for number in self.in_flight if not owned(number)), default=None)

    def next_pass(
        self, owned: Owned, in_flight_max: int
    ) -> tuple[Literal["forward", "backward"], int] | None:
        """Return the pass to run now, and mark it as running; None if there is none."""
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

    # Finished passes

    def hold(self, number: int) -> None:
        """Note that the forward pass is done, and that a gradient will follow."""
        state = self.microbatches[number]
        state.forward = "done"
        state.settle()
        self.in_flight.add(number)
        self.offer((number,))

    def count(self, number: int, samples: int = 0, loss: float = 0.0) -> None:
        """Note that the micro-batch's gradient is in the sums."""
        state = self.microbatches[number]
        state.forward = state.backward = "done"
        state.settle()
        self.in_flight.discard(number)
        self.counted[number] = (samples, loss)

    def forget(self, number: int) -> None:
        """Forget the computation of a micro-batch, but keep its frames."""
        state = self.microbatches[number]
        state.forward = state.backward = "waiting"
        self.in_flight.discard(number)
        self.counted.pop(number, None)
        self.offer((number,))


class EvaluationBatches:
    """The held-out micro-batches in progress. They are few, because those far behind the newest are done."""

    def __init__(self) -> None:
        self.microbatches: dict[int, Microbatch] = {}
        self._newest = -1

    def clear(self) -> None:
        """Clear all micro-batches, because a new plan evaluates anew."""
        self.microbatches.clear()
        self._newest = -1

    def put(self, frame: OpenedFrame) -> int:
        """Keep a frame. Return the first micro-batch that may still be in progress."""
        number = frame.header.microbatch
        self._newest = max(self._newest, number)
        first = self._newest - EVALUATIONS_IN_FLIGHT_MAX + 1
        if number >= first:
            self.microbatches.setdefault(number, Microbatch()).put(frame)
        return first

    def refuse(self, number: int, direction: Direction) -> OpenedFrame | None:
        """Refuse a frame that the stage cannot use; return None if the micro-batch is no longer needed."""
        state = self.microbatches.get(number)
        return None if state is None or direction not in state.frames else state.refuse(direction)

    def forget(self, first: int) -> None:
        """Forget micro-batches before `first`, which are done in all stages."""
        for number in [number for number in self.microbatches if number < first]:
            del self.microbatches[number]

    def next_forward(self, owned: Owned, is_last: bool) -> int | None:
        """Return the micro-batch to run now, and mark it as running; None if there is none."""
        for number in sorted(self.microbatches):
            state = self.microbatches[number]
            if owned(number) and state.may_forward(is_last=is_last):
                state.forward = "running"
                return number
        return None

    def finish(self, number: int) -> bool:
        """Note that the micro-batch was computed. Return False if it is no longer needed."""
        if number not in self.microbatches:
            return False
        self.microbatches[number].forward = "done"
        return True
