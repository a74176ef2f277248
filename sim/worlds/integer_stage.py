"""A stage that sums integers instead of gradients, and the true result of an undisturbed run of such stages.

A micro-batch's summand depends on its number, its stage, the parameters, and all its inputs. So a sum shows
whether each micro-batch was counted once, in the right step and from the right frames. Whole numbers below
2^53 add up exactly in any order, even as the float64 values of the real all-reduce. No I/O.

The stage sums everything that it is told to; watchers of the world judge whether that is allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from partition.plan.plan import Plan
from sim.observers import Broken

WIDTH = 4
"""Length of the vector of one stage."""
BITS = 40
"""Number of bits of each value; sums of 1,024 micro-batches stay far below 2^53."""
_MASK = (1 << BITS) - 1
_NUMBER_BYTES = BITS // 8

Vector = tuple[int, ...]


def hashed(*parts: bytes) -> bytes:
    """Return the 32-byte hash of parts with fixed lengths."""
    return blake2b(b"".join(parts), digest_size=32).digest()


def input_of(run: bytes, microbatch: int, train: bool) -> bytes:
    """Return the input that a trainer feeds to the first stage."""
    return hashed(b"input", run, microbatch.to_bytes(8, "big"), bytes([train]))


def labels_of(run: bytes, microbatch: int, train: bool) -> bytes:
    """Return the labels that a trainer feeds to the last stage."""
    return hashed(b"labels", run, microbatch.to_bytes(8, "big"), bytes([train]))


def samples_of(microbatch: int) -> int:
    """Return the number of samples in a micro-batch. It varies, so that a division by a wrong number is
    detected."""
    return 2 + microbatch % 3


def loss_of(output: bytes) -> float:
    """Return the loss of one micro-batch, summed over its samples. Losses are multiples of a sixteenth, which
    add up exactly."""
    return output[0] / 16


def vector_of(data: bytes) -> Vector:
    """Return the vector that the first of these 32 bytes encode."""
    return tuple(
        int.from_bytes(data[place * _NUMBER_BYTES : (place + 1) * _NUMBER_BYTES], "big")
        for place in range(WIDTH)
    )


def vector_bytes(vector: Vector) -> bytes:
    """Return the bytes of a vector, for hashing."""
    return b"".join(number.to_bytes(8, "big") for number in vector)


@dataclass(frozen=True)
class IntegerState:
    """The state of a stage after a number of steps: everything that is copied, fetched and restored."""

    step: int
    parameters: Vector

    @property
    def digest(self) -> bytes:
        """Return the digest of the parameters."""
        return hashed(vector_bytes(self.parameters))


def joined(states: Sequence[IntegerState]) -> IntegerState:
    """Return the state of a stage that is joined from several stages, all after the same step."""
    (step,) = {state.step for state in states}
    return IntegerState(step, tuple(number for state in states for number in state.parameters))


def parted(state: IntegerState) -> list[IntegerState]:
    """Return the states of the stages from which a state was joined."""
    numbers = state.parameters
    return [
        IntegerState(state.step, numbers[place : place + WIDTH]) for place in range(0, len(numbers), WIDTH)
    ]


def units_of(plan: Plan, stage: int, units: int) -> range:
    """Return which of the run's `units` original stages make up `stage` of `plan`: those within its layers,
    by the nearest border, and at least one."""
    layers, end = plan.stages[-1].last_layer, 0
    for number, row in enumerate(plan.stages[: stage + 1]):
        begin = end
        nearest = (2 * row.last_layer * units + layers) // (2 * layers)
        end = min(max(nearest, begin + 1), units - (len(plan.stages) - 1 - number))
    return range(begin, end)


@dataclass
class SummingStage:
    """Stage `index` of `stages`. `counted` lists the micro-batches in the sums, with repetitions."""

    index: int
    stages: int
    state: IntegerState
    sums: list[int] = field(default_factory=lambda: [0] * WIDTH)
    counted: list[int] = field(default_factory=list)
    in_flight: dict[int, bytes] = field(default_factory=dict)
    total: Vector | None = None

    def __post_init__(self) -> None:
        self._digest = self.state.digest

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def forward(
        self, microbatch: int, train: bool, given: bytes, labels: bytes | None
    ) -> tuple[bytes, bytes | None]:
        """Return the output and, on the last stage in training, the gradient for the previous stage."""
        output = hashed(b"output", self._digest, given, labels or b"")
        if not train:
            return output, None
        if not self.is_last:
            self.in_flight[microbatch] = given
            return output, None
        self._add(microbatch, given, labels or b"", +1)
        return output, self._gradient(given, labels or b"")

    def backward(self, microbatch: int, gradient: bytes) -> bytes | None:
        """Return the gradient for the previous stage. Raises Broken if this micro-batch had no forward pass
        here."""
        given = self.in_flight.pop(microbatch, None)
        if given is None:
            raise Broken(
                "sums", (f"micro-batch {microbatch} has a backward pass in a stage without a forward pass")
            )
        self._add(microbatch, given, gradient, +1)
        return self._gradient(given, gradient)

    def replayed(self, given: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Return a micro-batch's output and gradient for the neighbouring stages."""
        return hashed(b"output", self._digest, given, b""), self._gradient(given, after) or b""

    def remove(self, microbatch: int, given: bytes, after: bytes) -> None:
        """Subtract a micro-batch by a replay with negated sign. Raises Broken if it is not in the sums."""
        if microbatch not in self.counted:
            raise Broken("sums", f"micro-batch {microbatch} is removed from sums that do not contain it")
        self._add(microbatch, given, after, -1)

    def forget(self, microbatch: int) -> None:
        """Drop the data kept for a micro-batch between its two passes."""
        self.in_flight.pop(microbatch, None)

    def discard(self) -> None:
        """Reset all sums."""
        self.sums, self.counted = [0] * WIDTH, []
        self.in_flight.clear()
        self.total = None

    def restore(self, state: IntegerState) -> None:
        """Take over the state of another replica, or a saved one."""
        self.discard()
        self.state, self._digest = state, state.digest

    def squared_norm(self) -> float:
        """Return the squared norm of the total, a multiple of a sixteenth, which adds up exactly."""
        assert self.total is not None
        return sum(self.total) % 1024 / 16

    def apply(self, samples: int, squared_norm: float | None) -> bytes:
        """Apply a step with the total; return the digest of the parameters. Raises Broken if there is no
        total."""
        if self.total is None:
            raise Broken("sums", f"step {self.state.step} is applied without a total")
        self.restore(stepped(self.state, self.total, samples, squared_norm))
        return self._digest

    def _add(self, microbatch: int, given: bytes, after: bytes, sign: int) -> None:
        summand = vector_of(hashed(b"summand", self._digest, microbatch.to_bytes(8, "big"), given, after))
        self.sums = [number + sign * more for number, more in zip(self.sums, summand, strict=True)]
        if sign > 0:
            self.counted.append(microbatch)
        else:
            self.counted.remove(microbatch)

    def _gradient(self, given: bytes, after: bytes) -> bytes | None:
        return hashed(b"gradient", self._digest, given, after) if self.index else None


class SummingSpan:
    """A replica's stage of one or more original stages of the run (`units_of`). `index` is its number in the
    plan; its state is that of all its parts in order."""

    def __init__(self, plan: Plan, index: int, units: int, run: bytes) -> None:
        self.index = index
        self.stages = len(plan.stages)
        self.units = units_of(plan, index, units)
        self._parts = [SummingStage(unit, units, first_state(run, unit)) for unit in self.units]

    @property
    def state(self) -> IntegerState:
        return joined([part.state for part in self._parts])

    @property
    def sums(self) -> list[int]:
        return [number for part in self._parts for number in part.sums]

    @property
    def counted(self) -> list[int]:
        """Return the micro-batches in the sums; they are the same in all parts once nothing is in flight."""
        return self._parts[0].counted

    def forward(
        self, microbatch: int, train: bool, given: bytes, labels: bytes | None
    ) -> tuple[bytes, bytes | None]:
        """See `SummingStage`."""
        gradient: bytes | None = None
        for part in self._parts:
            given, gradient = part.forward(microbatch, train, given, labels if part.is_last else None)
        if gradient is not None:
            gradient = self._back(self._parts[:-1], microbatch, gradient)
        return given, gradient

    def backward(self, microbatch: int, gradient: bytes) -> bytes | None:
        """See `SummingStage`."""
        return self._back(self._parts, microbatch, gradient)

    def _back(self, parts: Sequence[SummingStage], microbatch: int, gradient: bytes | None) -> bytes | None:
        for part in reversed(parts):
            assert gradient is not None
            gradient = part.backward(microbatch, gradient)
        return gradient

    def remove(self, microbatch: int, given: bytes, after: bytes) -> None:
        """See `SummingStage`."""
        inputs = [given]
        for part in self._parts[:-1]:
            inputs.append(part.replayed(inputs[-1], b"")[0])
        for part, came in zip(reversed(self._parts), reversed(inputs), strict=True):
            part.remove(microbatch, came, after)
            after = part.replayed(came, after)[1]

    def forget(self, microbatch: int) -> None:
        """See `SummingStage`."""
        for part in self._parts:
            part.forget(microbatch)

    def discard(self) -> None:
        """See `SummingStage`."""
        for part in self._parts:
            part.discard()

    def restore(self, state: IntegerState) -> None:
        """See `SummingStage`."""
        for part, mine in zip(self._parts, parted(state), strict=True):
            part.restore(mine)

    def total(self, total: Vector) -> float:
        """Apply the sum over all replicas. Return its squared norm."""
        for place, part in enumerate(self._parts):
            part.total = total[place * WIDTH : (place + 1) * WIDTH]
        return sum(part.squared_norm() for part in self._parts)

    def apply(self, samples: int, squared_norm: float | None) -> bytes:
        """See `SummingStage`."""
        for part in self._parts:
            part.apply(samples, squared_norm)
        return self.state.digest


def stepped(state: IntegerState, total: Vector, samples: int, squared_norm: float | None) -> IntegerState:
    """Return the state after one step of the optimizer."""
    turn = samples + int((squared_norm or 0.0) * 16)
    numbers = tuple(
        (3 * mine + more + turn) & _MASK for mine, more in zip(state.parameters, total, strict=True)
    )
    return IntegerState(state.step + 1, numbers)


class Truth:
    """The true result of a run, computed in one place: the state of each stage after each step, and the
    losses."""

    def __init__(self, run: bytes, stages: int, microbatches: int) -> None:
        self._run = run
        self._microbatches = microbatches
        self._stages = [SummingStage(index, stages, first_state(run, index)) for index in range(stages)]
        self._states = [[stage.state for stage in self._stages]]
        self._losses: list[float] = []

    def state(self, step: int, units: Sequence[int]) -> IntegerState:
        """Return the state of a stage with these units after this step."""
        self._reach(step)
        return joined([self._states[step][unit] for unit in units])

    def loss(self, step: int) -> float:
        """Return the mean loss over the step's samples."""
        self._reach(step + 1)
        return self._losses[step]

    def _reach(self, step: int) -> None:
        while len(self._losses) < step:
            self._step(len(self._losses))

    def _step(self, step: int) -> None:
        loss, samples = 0.0, 0
        for microbatch in range(step * self._microbatches, (step + 1) * self._microbatches):
            data, gradient = input_of(self._run, microbatch, True), None
            labels = labels_of(self._run, microbatch, True)
            for stage in self._stages:
                data, gradient = stage.forward(microbatch, True, data, labels if stage.is_last else None)
            for stage in reversed(self._stages[:-1]):
                assert gradient is not None
                gradient = stage.backward(microbatch, gradient)
            loss += loss_of(data)
            samples += samples_of(microbatch)
        for stage in self._stages:
            stage.total = tuple(stage.sums)
        norm = sum(stage.squared_norm() for stage in self._stages)
        for stage in self._stages:
            stage.apply(samples, norm)
        self._states.append([stage.state for stage in self._stages])
        self._losses.append(loss / samples)


def first_state(run: bytes, stage: int) -> IntegerState:
    """Return the state at the beginning of a run."""
    return IntegerState(0, vector_of(hashed(b"first", run, bytes([stage]))))
