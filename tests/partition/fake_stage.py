"""A stage that sums integers instead of gradients, so that results can be compared exactly, and the
undisturbed run.

The fake refuses what the real stage (`partition.execute.StageExecutor`) refuses, by raising `Broken`. All
stages share one tied weight. So each stage has a second sum, which a step adds up over the replicas of every
stage.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from crypto.identity import PeerId
from partition.codecs.codec import Payload, TensorHeader
from partition.plan.plan import HASH_BYTES
from partition.steps.validation import Series, ValidationSchedule, ValidationSettings

METRICS = 2
_TENSOR = (TensorHeader("uint8", (32,)),)


class Broken(AssertionError):
    """A guarantee of exact mode was violated."""


def digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=32).digest()


def number(*parts: object) -> int:
    return int.from_bytes(digest(*parts)[:6], "big")


def payload(data: bytes) -> Payload:
    return Payload((1,), _TENSOR, "raw", bytes(HASH_BYTES), memoryview(data))


def peer(name: str) -> PeerId:
    return PeerId(name.encode().ljust(32, b"-"))


def samples_of(microbatch: int) -> int:
    return 2 + microbatch % 3


def metrics_of(output: bytes, microbatch: int) -> tuple[float, ...]:
    return (float(output[0] % (samples_of(microbatch) + 1)), output[2] / 16)


def loss_of(output: bytes) -> float:
    return output[1] / 16


@dataclass
class FakeStage:
    """A double of `partition.execute.StageExecutor`.

    The first `frozen` stages have no gradients: their sums are complete after the forward pass.
    """

    index: int
    stages: int
    frozen: int = 0
    parameters: bytes = b"at the beginning".ljust(32)
    step: int = 0
    sums: dict[int, int] = field(default_factory=dict)
    in_flight: dict[int, bytes] = field(default_factory=dict)
    sums_step: int | None = None
    total: dict[int, int] | None = None
    tied_total: dict[int, int] | None = None

    @property
    def tied_sums(self) -> dict[int, int]:
        """Return the sum for the tied weight, which counts every micro-batch once in every stage."""
        count = self.stages
        return {name * count + self.index: value ^ 1 for name, value in self.sums.items()}

    @property
    def squared_norm(self) -> float:
        """Return the squared norm of the total. Only the first stage includes the tied weight. Powers of two
        add up exactly.
        """
        assert self.total is not None
        assert self.tied_total is not None
        mine = sum(self.total.values()) % 1024 / 16
        return mine + (0.0 if self.index else sum(self.tied_total.values()) % 1024 / 16)

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def awaits_gradient(self) -> bool:
        return not self.is_last and self.index >= self.frozen

    def _gradient(self, given: bytes, after: bytes | None) -> bytes | None:
        if self.index <= self.frozen:
            return None
        return digest("gradient", self.parameters, given, after)

    def forward(
        self, step: int, microbatch: int, train: bool, given: bytes, labels: bytes | None
    ) -> tuple[bytes | None, bytes | None, bytes]:
        """Output, gradient of the input, and the values of the loss."""
        output = digest("output", self.index, self.parameters, given, labels)
        if train:
            if self.sums_step not in (None, step) or step != self.step:
                raise Broken(f"a micro-batch of step {step} in the sums of step {self.step}")
            if microbatch in self.sums or microbatch in self.in_flight:
                raise Broken(f"micro-batch {microbatch} for a second time")
            self.sums_step = step
        if train and self.awaits_gradient:
            self.in_flight[microbatch] = given
        elif train:
            self.sums[microbatch] = self._summand(given, labels)
        if not self.is_last:
            return output, None, output
        return None, self._gradient(given, labels) if train else None, output

    def backward(self, step: int, microbatch: int, gradient: bytes) -> bytes | None:
        if step != self.sums_step or microbatch not in self.in_flight:
            raise Broken(f"nothing to go back through for micro-batch {microbatch} of step {step}")
        given = self.in_flight.pop(microbatch)
        self.sums[microbatch] = self._summand(given, gradient)
        return self._gradient(given, gradient)

    def _summand(self, given: bytes, after: bytes | None) -> int:
        """Return a micro-batch's summand, computed from its input and from its labels or incoming
        gradient.
        """
        return number("sum", self.parameters, given, after)

    def remove(self, microbatch: int, given: bytes, after: bytes | None) -> None:
        """Replay a micro-batch with the opposite sign; it must take out exactly what went in."""
        if self.sums.pop(microbatch, None) != self._summand(given, after):
            raise Broken(f"another micro-batch {microbatch} is taken out than went in")

    def forget(self, microbatch: int) -> None:
        if self.in_flight.pop(microbatch, None) is None:
            raise Broken(f"micro-batch {microbatch} is forgotten, and nothing is held of it")

    def discard(self) -> None:
        self.sums.clear()
        self.in_flight.clear()
        self.sums_step = None

    def fill(self, step: int, parameters: bytes) -> None:
        if self.sums or self.in_flight:
            raise Broken("filled while the sums of other parameters are still held")
        self.step, self.parameters = step, parameters
        self.total = self.tied_total = None

    def apply(self, step: int, samples: int, squared_norm: float | None) -> bytes:
        if step != self.step or self.total is None or self.tied_total is None:
            raise Broken(f"step {step} applied after {self.step} steps with total {self.total}")
        tied = sum(self.tied_total.values())
        self.parameters = digest(
            "parameters", self.parameters, sum(self.total.values()), tied, samples, squared_norm
        )
        self.total = self.tied_total = None
        self.step += 1
        self.discard()
        return self.parameters


class Truth:
    """The undisturbed run: totals and parameters per stage and step, losses and evaluations."""

    def __init__(
        self,
        stages: int,
        microbatches: int,
        steps: int,
        evaluations: int,
        *,
        frozen: int = 0,
        validations: int = 0,
        validation: ValidationSettings | None = None,
    ) -> None:
        """`steps` is a number of steps up to that of the run; the attribute is the number that the run
        makes."""
        schedule = ValidationSchedule(validation, None)
        self.steps = 0
        self.validated: dict[int, tuple[int, tuple[float, ...], Series]] = {}
        chain = [FakeStage(index, stages, frozen) for index in range(stages)]
        self.totals: list[list[dict[int, int]]] = []
        self.tied_totals: list[dict[int, int]] = []
        self.squared_norms: list[float] = []
        self.losses: list[float] = []
        self.parameters = [[stage.parameters for stage in chain]]
        for step in range(steps):
            losses, samples = 0.0, 0
            for microbatch in range(step * microbatches, (step + 1) * microbatches):
                data, gradient, output = input_of(microbatch, True), None, b""
                for stage in chain:
                    labels = label_of(microbatch, True) if stage.is_last else None
                    data_out, gradient, output = stage.forward(step, microbatch, True, data, labels)
                    data = data_out or b""
                for stage in reversed(chain[frozen:-1]):
                    assert gradient is not None
                    gradient = stage.backward(step, microbatch, gradient)
                losses += loss_of(output)
                samples += samples_of(microbatch)
            self.totals.append([dict(stage.sums) for stage in chain])
            self.losses.append(losses / samples)
            tied = {name: value for stage in chain for name, value in stage.tied_sums.items()}
            self.tied_totals.append(tied)
            for stage in chain:
                stage.total, stage.tied_total = dict(stage.sums), tied
            self.squared_norms.append(sum(stage.squared_norm for stage in chain))
            for stage in chain:
                stage.apply(step, samples, self.squared_norms[-1])
            self.parameters.append([stage.parameters for stage in chain])
            self.steps = step + 1
            if schedule.is_due(self.steps, is_over=self.steps == steps):
                samples, loss, metrics = _held_out(chain, range(validations))
                series = schedule.take(self.steps, samples, loss, metrics)
                self.validated[self.steps] = samples, metrics, series
                if schedule.has_converged:
                    break
        self.evaluated, _, self.metrics = _held_out(chain, range(validations, validations + evaluations))


def _held_out(chain: list[FakeStage], numbers: range) -> tuple[int, float, tuple[float, ...]]:
    """Sum samples, loss and metrics over these held-out micro-batches."""
    rows, loss = [], 0.0
    for microbatch in numbers:
        data = input_of(microbatch, False)
        for stage in chain:
            labels = label_of(microbatch, False) if stage.is_last else None
            data_out, _, output = stage.forward(stage.step, microbatch, False, data, labels)
            data = data_out or b""
        rows.append(metrics_of(output, microbatch))
        loss += loss_of(output)
    metrics = tuple(sum(row[place] for row in rows) for place in range(METRICS))
    return sum(samples_of(microbatch) for microbatch in numbers), loss, metrics


def input_of(microbatch: int, train: bool) -> bytes:
    return digest("input", microbatch, train)


def label_of(microbatch: int, train: bool) -> bytes:
    return digest("labels", microbatch, train)
