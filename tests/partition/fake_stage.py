"""A stage that sums integers instead of gradients, for exact comparison; and the undisturbed run.

It refuses whatever the real one (`partition.execute.StageExecutor`) refuses, by raising `Broken`.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

from crypto.identity import PeerId
from partition.codec import Payload
from partition.plan.plan import HASH_BYTES


class Broken(AssertionError):
    """A promise of exact mode was not kept."""


def digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=32).digest()


def number(*parts: object) -> int:
    return int.from_bytes(digest(*parts)[:6], "big")


def payload(data: bytes) -> Payload:
    return Payload((len(data),), "int64", "raw", bytes(HASH_BYTES), data)


def peer(name: str) -> PeerId:
    return PeerId(name.encode().ljust(32, b"-"))


def samples_of(microbatch: int) -> int:
    return 2 + microbatch % 3


def correct_of(output: bytes, microbatch: int) -> int:
    return output[0] % (samples_of(microbatch) + 1)


def loss_of(output: bytes) -> float:
    return output[1] / 16


@dataclass
class FakeStage:
    """What `partition.execute.StageExecutor` is to a real replica."""

    index: int
    stages: int
    parameters: bytes = b""
    step: int = 0
    sums: dict[int, int] = field(default_factory=dict)
    in_flight: dict[int, bytes] = field(default_factory=dict)
    sums_step: int | None = None
    total: dict[int, int] | None = None

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def forward(
        self, step: int, microbatch: int, train: bool, given: bytes, labels: bytes | None
    ) -> tuple[bytes | None, bytes | None, bytes]:
        """Output, gradient of the input, and the numbers the loss is made of."""
        output = digest("output", self.index, self.parameters, given, labels)
        if train:
            if self.sums_step not in (None, step) or step != self.step:
                raise Broken(f"a micro-batch of step {step} in the sums of step {self.step}")
            if microbatch in self.sums or microbatch in self.in_flight:
                raise Broken(f"micro-batch {microbatch} for a second time")
            self.sums_step = step
        if not self.is_last:
            if train:
                self.in_flight[microbatch] = given
            return output, None, output
        gradient = None
        if train:
            self.sums[microbatch] = number("sum", self.parameters, given, labels)
            gradient = digest("gradient", self.parameters, given, labels) if self.index else None
        return None, gradient, output

    def backward(self, step: int, microbatch: int, gradient: bytes) -> bytes | None:
        if step != self.sums_step or microbatch not in self.in_flight:
            raise Broken(f"nothing to go back through for micro-batch {microbatch} of step {step}")
        given = self.in_flight.pop(microbatch)
        self.sums[microbatch] = number("sum", self.parameters, given, gradient)
        return digest("gradient", self.parameters, given, gradient) if self.index else None

    def discard(self) -> None:
        self.sums.clear()
        self.in_flight.clear()
        self.sums_step = None

    def apply(self, step: int, samples: int) -> bytes:
        if step != self.step or self.total is None:
            raise Broken(f"step {step} applied after {self.step} steps with total {self.total}")
        self.parameters = digest("parameters", self.parameters, sum(self.total.values()), samples)
        self.total = None
        self.step += 1
        self.discard()
        return self.parameters


class Truth:
    """The undisturbed run: totals and parameters per stage and step, losses, evaluations."""

    def __init__(self, stages: int, microbatches: int, steps: int, evaluations: int) -> None:
        chain = [FakeStage(index, stages) for index in range(stages)]
        self.totals: list[list[dict[int, int]]] = []
        self.losses: list[float] = []
        for step in range(steps):
            losses, samples = 0.0, 0
            for microbatch in range(step * microbatches, (step + 1) * microbatches):
                data, gradient, output = input_of(step, microbatch, True), None, b""
                for stage in chain:
                    labels = label_of(step, microbatch, True) if stage.is_last else None
                    data_out, gradient, output = stage.forward(step, microbatch, True, data, labels)
                    data = data_out or b""
                for stage in reversed(chain[:-1]):
                    assert gradient is not None
                    gradient = stage.backward(step, microbatch, gradient)
                losses += loss_of(output)
                samples += samples_of(microbatch)
            self.totals.append([dict(stage.sums) for stage in chain])
            self.losses.append(losses / samples)
            for stage in chain:
                stage.total = dict(stage.sums)
                stage.apply(step, samples)
        self.parameters = [stage.parameters for stage in chain]
        self.correct = 0
        for microbatch in range(evaluations):
            data = input_of(steps, microbatch, False)
            for stage in chain:
                labels = label_of(steps, microbatch, False) if stage.is_last else None
                data_out, _, output = stage.forward(steps, microbatch, False, data, labels)
                data = data_out or b""
            self.correct += correct_of(output, microbatch)
        self.evaluated = sum(samples_of(microbatch) for microbatch in range(evaluations))


def input_of(step: int, microbatch: int, train: bool) -> bytes:
    return digest("input", microbatch, train)


def label_of(step: int, microbatch: int, train: bool) -> bytes:
    return digest("labels", microbatch, train)
