"""A stage that sums integers instead of gradients, and what an undisturbed run of such stages comes to.

What a micro-batch adds depends on its number, its stage, the parameters, and all that came in with it, so a
sum tells whether each was counted once, in the right step and from the right frames. Whole numbers below
2^53 add up exactly in any order, also as the float64 of the real all-reduce. Pure.

It sums whatever it is told to: what must not happen is for those who watch the world.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from sim.observers import Broken

WIDTH = 4
"""Numbers in the vector of one stage."""
BITS = 40
"""The bits of each number: 1,024 micro-batches of them stay far below 2^53."""
_MASK = (1 << BITS) - 1
_NUMBER_BYTES = BITS // 8

Vector = tuple[int, ...]


def hashed(*parts: bytes) -> bytes:
    """32 bytes of these, whose lengths are known."""
    return blake2b(b"".join(parts), digest_size=32).digest()


def input_of(run: bytes, microbatch: int, train: bool) -> bytes:
    """Return what a trainer feeds to the first stage."""
    return hashed(b"input", run, microbatch.to_bytes(8, "big"), bytes([train]))


def labels_of(run: bytes, microbatch: int, train: bool) -> bytes:
    """Return what a trainer feeds to the last stage."""
    return hashed(b"labels", run, microbatch.to_bytes(8, "big"), bytes([train]))


def samples_of(microbatch: int) -> int:
    """Micro-batches differ, so that whatever divides by a wrong number of them shows."""
    return 2 + microbatch % 3


def loss_of(output: bytes) -> float:
    """Return the loss of one micro-batch, summed over its samples: sixteenths, which add up exactly."""
    return output[0] / 16


def vector_of(data: bytes) -> Vector:
    """The first numbers of these 32 bytes."""
    return tuple(
        int.from_bytes(data[place * _NUMBER_BYTES : (place + 1) * _NUMBER_BYTES], "big")
        for place in range(WIDTH)
    )


def vector_bytes(vector: Vector) -> bytes:
    """All of it, as what is digested."""
    return b"".join(number.to_bytes(8, "big") for number in vector)


@dataclass(frozen=True)
class State:
    """What a stage is after so many steps: all that is copied, fetched and restored."""

    step: int
    parameters: Vector

    @property
    def digest(self) -> bytes:
        """Return the digest of the parameters."""
        return hashed(vector_bytes(self.parameters))


@dataclass
class SummingStage:
    """Stage `index` of `stages`. `counted` is what the sums hold, each as often as it was summed."""

    index: int
    stages: int
    state: State
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
        """The output and, on the last stage in training, the gradient for the stage before."""
        output = hashed(b"output", self._digest, given, labels or b"")
        if not train:
            return output, None
        if not self.is_last:
            self.in_flight[microbatch] = given
            return output, None
        self._add(microbatch, given, labels or b"", +1)
        return output, self._gradient(given, labels or b"")

    def backward(self, microbatch: int, gradient: bytes) -> bytes | None:
        """The gradient for the stage before. Raises Broken: nothing of it has gone forward here."""
        given = self.in_flight.pop(microbatch, None)
        if given is None:
            raise Broken("sums", f"micro-batch {microbatch} went back through a stage without going forward")
        self._add(microbatch, given, gradient, +1)
        return self._gradient(given, gradient)

    def remove(self, microbatch: int, given: bytes, after: bytes) -> None:
        """The replay with the sign turned. Raises Broken: it is not in the sums."""
        if microbatch not in self.counted:
            raise Broken("sums", f"micro-batch {microbatch} is taken out of sums that do not hold it")
        self._add(microbatch, given, after, -1)

    def forget(self, microbatch: int) -> None:
        """Drop what is held of it between its passes."""
        self.in_flight.pop(microbatch, None)

    def discard(self) -> None:
        """All sums are void."""
        self.sums, self.counted = [0] * WIDTH, []
        self.in_flight.clear()
        self.total = None

    def restore(self, state: State) -> None:
        """Take another's state, or one that was kept."""
        self.discard()
        self.state, self._digest = state, state.digest

    def squared_norm(self) -> float:
        """Return the squared norm of the total: sixteenths, which add up exactly."""
        assert self.total is not None
        return sum(self.total) % 1024 / 16

    def apply(self, samples: int, squared_norm: float | None) -> bytes:
        """Step on the total; the digest of the parameters. Raises Broken: there is no total."""
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


def stepped(state: State, total: Vector, samples: int, squared_norm: float | None) -> State:
    """One step of the optimizer."""
    turn = samples + int((squared_norm or 0.0) * 16)
    numbers = tuple(
        (3 * mine + more + turn) & _MASK for mine, more in zip(state.parameters, total, strict=True)
    )
    return State(state.step + 1, numbers)


class Truth:
    """What a run comes to, computed in one place: the state of each stage after each step, and the losses."""

    def __init__(self, run: bytes, stages: int, microbatches: int) -> None:
        self._run = run
        self._microbatches = microbatches
        self._stages = [SummingStage(index, stages, first_state(run, index)) for index in range(stages)]
        self._states = [[stage.state for stage in self._stages]]
        self._losses: list[float] = []

    def state(self, step: int, stage: int) -> State:
        """After so many steps."""
        self._reach(step)
        return self._states[step][stage]

    def loss(self, step: int) -> float:
        """The mean over the step's samples."""
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


def first_state(run: bytes, stage: int) -> State:
    """At the beginning of a run."""
    return State(0, vector_of(hashed(b"first", run, bytes([stage]))))
