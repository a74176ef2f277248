"""The open step of a stage: which micro-batches its sums hold, and which are between forward and backward
pass."""

from dataclasses import dataclass, field

import torch

from crypto.errors import RemoteProtocolError
from partition.execute.interpret import Results
from partition.stage import IN_FLIGHT_MAX, MICROBATCHES_MAX, Backward, Forward, Sign


@dataclass(frozen=True)
class Flight:
    """A micro-batch between its two passes. If it has no results, the forward pass will be computed again."""

    sign: Sign
    sizes: tuple[int, ...]
    inputs: list[torch.Tensor]
    results: Results | None


@dataclass
class OpenStep:
    """The state of the step in progress. Initially no step is open: any step may begin, or only `next_step`
    if the stage was restored."""

    next_step: int | None = None
    step: int | None = None
    """The step to which the counted micro-batches and those in flight belong."""
    counted: set[int] = field(default_factory=set)
    """The micro-batches in the sums."""
    _in_flight: dict[int, Flight] = field(default_factory=dict)

    def admit(self, request: Forward) -> None:
        """Raise RemoteProtocolError if no correct peer requests this forward pass now."""
        step, microbatch = request.step, request.microbatch
        if not request.train:
            if request.sign < 0:
                raise RemoteProtocolError("an evaluation leaves nothing in the sums that could be taken out")
            return
        if self.next_step not in (None, step):
            raise RemoteProtocolError(f"a micro-batch of step {step}, but step {self.next_step} is the next")
        if self.step not in (None, step):
            raise RemoteProtocolError(f"a micro-batch of step {step} while the sums hold step {self.step}")
        if microbatch in self._in_flight or (request.sign > 0 and microbatch in self.counted):
            raise RemoteProtocolError(f"micro-batch {microbatch} of step {step} for the second time")
        if request.sign < 0 and microbatch not in self.counted:
            raise RemoteProtocolError(
                f"the sums do not hold micro-batch {microbatch} of step {step}, so it cannot be taken out"
            )
        if len(self._in_flight) >= IN_FLIGHT_MAX:
            raise RemoteProtocolError(f"{IN_FLIGHT_MAX} micro-batches are in flight already")
        if len(self.counted) >= MICROBATCHES_MAX:
            raise RemoteProtocolError(f"step {step} has {MICROBATCHES_MAX} micro-batches already")

    def check_applied(self, step: int) -> None:
        """Raise RemoteProtocolError if this is not the step to apply."""
        if self.next_step not in (None, step):
            raise RemoteProtocolError(f"step {step} applied, but step {self.next_step} is the next")
        if self.step not in (None, step):
            raise RemoteProtocolError(f"step {step} applied while the sums hold step {self.step}")

    def hold(self, request: Forward, held: Flight) -> None:
        """Keep a micro-batch for its backward pass."""
        self.step = request.step
        self._in_flight[request.microbatch] = held

    def held(self, request: Backward) -> Flight:
        """Return the micro-batch for the backward pass. Raises RemoteProtocolError if there is none."""
        held = self._in_flight.get(request.microbatch) if request.step == self.step else None
        if held is None or held.sign != request.sign:
            raise RemoteProtocolError(
                f"no forward pass to go back through for micro-batch {request.microbatch} "
                f"of step {request.step}"
            )
        return held

    def end_flight(self, microbatch: int) -> None:
        """Discard what was held for a micro-batch's backward pass."""
        del self._in_flight[microbatch]

    def has_counted(self, request: Backward) -> bool:
        """Return whether the sums hold the micro-batch already."""
        return request.step == self.step and request.microbatch in self.counted and request.sign > 0

    def count(self, request: Forward | Backward) -> None:
        """Record that the sums hold a micro-batch, or, if its sign is negative, that they no longer do."""
        if request.sign > 0:
            self.step = request.step
            self.counted.add(request.microbatch)
        else:
            self.counted.remove(request.microbatch)
            self._settle()

    def let_go(self, step: int, microbatch: int) -> None:
        """Forget a micro-batch in flight. Raises RemoteProtocolError if it is not in flight."""
        if step != self.step or microbatch not in self._in_flight:
            raise RemoteProtocolError(
                f"micro-batch {microbatch} of step {step} is not in flight, so it cannot be forgotten"
            )
        del self._in_flight[microbatch]
        self._settle()

    def advance(self) -> None:
        """Record that the open step was applied."""
        if self.next_step is not None:
            self.next_step += 1

    def clear(self) -> None:
        """Close the step and forget its micro-batches."""
        self.step = None
        self.counted.clear()
        self._in_flight.clear()

    def _settle(self) -> None:
        """If nothing is held of the open step, allow any step to begin."""
        if not self.counted and not self._in_flight:
            self.step = None
