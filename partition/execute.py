"""Computing a stage with torch: forward, backward and the optimizer step over shared arenas.

The only file of this package that imports torch, and it runs in the stage's own process
(`node.runs.host_process`), never in the node's.

Torch's parameters are views into the arena `parameters`, their `.grad` views into `gradients`, so sums
grow in place over the micro-batches, and averaging reads and writes without a copy. On a device
without the host's memory each arena has a twin there, copied where the two must agree.

Determinism: first parameters are drawn from a seed per parameter *name*, and before
every random operator a generator is seeded from run, step, micro-batch and the layer's index in the
*whole* model. So a replay draws the same mask, and so does any other cut. Random numbers are always
drawn on the CPU, where torch's generator gives the same ones on every machine.
"""

from collections.abc import Mapping
from math import prod, sqrt

import numpy as np
import safetensors
import safetensors.numpy
import torch
from blake3 import blake3
from torch.nn import functional

from crypto.encoding import encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.codec import ITEM_BYTES, DataType, Payload, pack, unpack
from partition.model import Conv2d, Dropout, Flatten, Layer, Linear, MaxPool2d, ReLU, Shape
from partition.stage import (
    ARENAS,
    IN_FLIGHT_MAX,
    MICROBATCHES_MAX,
    REASON_LENGTH_MAX,
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Discard,
    Done,
    Export,
    Exported,
    Forward,
    Forwarded,
    Import,
    OptimizerSettings,
    Refused,
    Reply,
    Request,
    Slot,
    StageSpecification,
    arena_bytes,
    message_bytes_max,
    parameter_layout,
)

_DTYPES: dict[DataType, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int64": torch.int64,
}
_SAFETENSORS_DTYPES = {"float32": "F32", "float64": "F64"}


def prepare_process(threads: int) -> None:
    """Set torch's global switches for a process that does nothing but host one stage."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is for finding bugs in operators; it is only a cost here.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by name
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


class StageExecutor:
    """One replica of a stage. Not thread-safe; one request at a time.

    `arenas` maps each name of `partition.stage.ARENAS` to zeroed, writable memory of `arena_bytes`. The
    first parameters are written to it at once.

    Raises:
        LocalProtocolError: an arena is missing or has another size.
    """

    def __init__(self, specification: StageSpecification, arenas: Mapping[str, memoryview]) -> None:
        for name, size in arena_bytes(specification).items():
            if name not in arenas or arenas[name].nbytes != size:
                raise LocalProtocolError(f"the arena '{name}' must have {size} bytes")
        self._specification = specification
        self._model = specification.built
        self._device = torch.device(specification.device)
        dtype = _DTYPES[specification.dtype]
        self._arenas = {name: arenas[name] for name in ARENAS}
        self._vectors = {name: _Vector(arenas[name], dtype, self._device) for name in ARENAS}
        self._slots = parameter_layout(specification)
        self._parameters = self._make_parameters()
        self._optimizer = self._make_optimizer(specification.optimizer)
        self._step: int | None = None
        self._counted: set[int] = set()
        self._in_flight: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def handle(self, request: Request) -> Reply:
        """Answer one request. What no correct peer asks is `Refused` and changes nothing."""
        try:
            match request:
                case Forward():
                    return self._forward(request)
                case Backward():
                    return self._backward(request)
                case Discard():
                    self._forget()
                    return Done()
                case Apply():
                    return self._apply(request)
                case Export():
                    return Exported(safetensors.numpy.save(self._named_arrays()))
                case Import():
                    self._import(request)
                    return Done()
        except RemoteProtocolError as error:
            return Refused(str(error)[:REASON_LENGTH_MAX])

    # Forward and backward

    def _forward(self, request: Forward) -> Forwarded:
        specification = self._specification
        if request.train:
            self._admit(request.step, request.microbatch)
        given = self._tensor(request.input, specification.input_shape, specification.dtype)
        labels = self._labels(request.labels, len(given)) if specification.is_last else None
        given.requires_grad_(request.train and not specification.is_first)
        with torch.set_grad_enabled(request.train):
            output = self._compute(given, request)
            loss = None if labels is None else functional.cross_entropy(output, labels, reduction="sum")
        if not torch.isfinite(output if loss is None else loss).all():
            raise RemoteProtocolError(f"{'an output' if loss is None else 'the loss'} is not finite")
        if request.train:
            self._step = request.step
            self._counted.add(request.microbatch)
        if loss is None or labels is None:
            if request.train:
                self._in_flight[request.microbatch] = (given, output)
            return Forwarded(self._pack(output), None, 0.0, len(given), 0)
        if request.train and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]  # torch left it without types
            self._vectors["gradients"].give()
        correct = int((output.argmax(dim=1) == labels).sum())
        gradient = None if given.grad is None else self._pack(given.grad)
        return Forwarded(None, gradient, float(loss.detach()), len(given), correct)

    def _backward(self, request: Backward) -> BackwardDone:
        if request.step != self._step or request.microbatch not in self._in_flight:
            raise RemoteProtocolError(
                f"nothing to go back through for micro-batch {request.microbatch} of step {request.step}"
            )
        given, output = self._in_flight[request.microbatch]
        gradient = self._tensor(
            request.gradient, self._specification.output_shape, self._specification.dtype, len(output)
        )
        del self._in_flight[request.microbatch]
        if output.requires_grad:  # not so for a first stage without parameters
            torch.autograd.backward(output, gradient)
            self._vectors["gradients"].give()
        return BackwardDone(None if given.grad is None else self._pack(given.grad))

    def _admit(self, step: int, microbatch: int) -> None:
        if self._step not in (None, step):
            raise RemoteProtocolError(f"a micro-batch of step {step} while the sums hold step {self._step}")
        if microbatch in self._counted:
            raise RemoteProtocolError(f"micro-batch {microbatch} of step {step} for a second time")
        if len(self._in_flight) >= IN_FLIGHT_MAX:
            raise RemoteProtocolError(f"{IN_FLIGHT_MAX} micro-batches are in flight already")
        if len(self._counted) >= MICROBATCHES_MAX:
            raise RemoteProtocolError(f"step {step} has {MICROBATCHES_MAX} micro-batches already")

    def _compute(self, given: torch.Tensor, request: Forward) -> torch.Tensor:
        specification = self._specification
        values = given
        for index in range(specification.first_layer, specification.last_layer):
            layer = self._model.layers[index]
            if isinstance(layer, Dropout):
                if request.train:
                    seed = _seed("random", specification.run, request.step, request.microbatch, index)
                    values = _drop(values, layer.probability, seed)
            else:
                values = self._operate(layer, values)
        return values

    def _operate(self, layer: Layer, values: torch.Tensor) -> torch.Tensor:
        match layer:
            case Conv2d():
                weight, bias = (self._parameters[parameter.name] for parameter in layer.parameters)
                return functional.conv2d(values, weight, bias, padding=layer.padding)
            case Linear():
                weight, bias = (self._parameters[parameter.name] for parameter in layer.parameters)
                return functional.linear(values, weight, bias)
            case MaxPool2d():
                return functional.max_pool2d(values, layer.size)
            case ReLU():
                return functional.relu(values)
            case Flatten():
                return values.flatten(start_dim=1)
        raise LocalProtocolError(f"no rule to compute a {type(layer).__name__}")

    # The step

    def _apply(self, request: Apply) -> Applied:
        if self._step not in (None, request.step):
            raise RemoteProtocolError(f"step {request.step} applied while the sums hold step {self._step}")
        totals, gradients = self._vectors["totals"], self._vectors["gradients"]
        totals.take()
        if not torch.isfinite(totals.tensor).all():
            raise RemoteProtocolError("a total gradient is not finite")
        if self._optimizer is not None:
            gradients.tensor.copy_(totals.tensor).div_(request.samples)
            for state in self._optimizer.state.values():
                if "step" in state:
                    state["step"].fill_(request.step)  # the optimizer itself adds the one
            self._optimizer.step()
            self._vectors["parameters"].give()
            self._vectors["moments"].give()
        totals.tensor.zero_()
        totals.give()
        self._forget()
        return Applied(blake3(self._arenas["parameters"]).digest())

    def _forget(self) -> None:
        self._step = None
        self._counted.clear()
        self._in_flight.clear()
        self._vectors["gradients"].tensor.zero_()
        self._vectors["gradients"].give()

    # Parameters

    def _make_parameters(self) -> dict[str, torch.Tensor]:
        parameters, gradients = self._vectors["parameters"], self._vectors["gradients"]
        made = {}
        for slot in self._slots:
            view = parameters.view(slot)
            view.copy_(_first_values(slot, self._specification.seed))
            made[slot.name] = view.requires_grad_()
            view.grad = gradients.view(slot)
        parameters.give()
        return made

    def _make_optimizer(self, settings: OptimizerSettings) -> torch.optim.Optimizer | None:
        """An optimizer whose state is views into `moments`; None for a stage without parameters."""
        values = list(self._parameters.values())
        if not values:
            return None
        # The plain loop over tensors, on every device: it is the one that updates the state in place.
        if settings.kind == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(
                values,
                lr=settings.learning_rate,
                momentum=settings.momentum,
                weight_decay=settings.weight_decay,
                foreach=False,
            )
            keys: tuple[str, ...] = ("momentum_buffer",) if settings.momentum else ()
        else:
            optimizer = torch.optim.Adam(
                values,
                lr=settings.learning_rate,
                betas=settings.betas,
                eps=settings.epsilon,
                weight_decay=settings.weight_decay,
                foreach=False,
            )
            keys = ("exp_avg", "exp_avg_sq")
        size = sum(slot.size for slot in self._slots)
        for slot in self._slots:
            state = optimizer.state[self._parameters[slot.name]]
            if settings.kind == "adam":
                state["step"] = torch.zeros((), dtype=torch.float64)
            for number, key in enumerate(keys):
                state[key] = self._vectors["moments"].view(slot, start=number * size)
        return optimizer

    def _named_arrays(self) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.floating]]]:
        flat = np.frombuffer(self._arenas["parameters"], dtype=self._specification.dtype)
        return {
            slot.name: flat[slot.offset : slot.offset + slot.size].reshape(slot.shape) for slot in self._slots
        }

    def _import(self, request: Import) -> None:
        specification = self._specification
        if len(request.data) > message_bytes_max(specification):
            raise RemoteProtocolError(f"a safetensors file of {len(request.data)} bytes is not this stage's")
        try:
            tensors = dict(safetensors.deserialize(request.data))  # type: ignore[no-untyped-call]  # Rust, untyped
        except safetensors.SafetensorError as error:
            raise RemoteProtocolError(f"not a safetensors file: {error}") from None
        if sorted(tensors) != sorted(slot.name for slot in self._slots):
            raise RemoteProtocolError("the safetensors file does not hold exactly this stage's parameters")
        arrays = {}
        for slot in self._slots:
            tensor = tensors[slot.name]
            if tuple(tensor["shape"]) != slot.shape or (
                tensor["dtype"] != _SAFETENSORS_DTYPES[specification.dtype]
            ):
                raise RemoteProtocolError(f"{slot.name} has another shape or type in the safetensors file")
            arrays[slot.name] = np.frombuffer(tensor["data"], dtype=specification.dtype).reshape(slot.shape)
            if not np.isfinite(arrays[slot.name]).all():
                raise RemoteProtocolError(f"{slot.name} is not finite in the safetensors file")
        with torch.no_grad():
            for name, array in arrays.items():
                self._parameters[name].copy_(torch.tensor(array))
        self._vectors["parameters"].give()
        self._forget()

    # Tensors in and out

    def _labels(self, payload: Payload | None, samples: int) -> torch.Tensor:
        if payload is None:
            raise RemoteProtocolError("the last stage wants labels")
        labels = self._tensor(payload, (), "int64", samples)
        if int(labels.min()) < 0 or int(labels.max()) >= self._specification.classes:
            raise RemoteProtocolError("a label names no class")
        return labels

    def _tensor(
        self, payload: Payload, shape: Shape, dtype: DataType, samples: int | None = None
    ) -> torch.Tensor:
        """A checked tensor on the device: (samples, *shape), finite."""
        samples_max = self._specification.samples_max if samples is None else samples
        samples_min = 1 if samples is None else samples
        if payload.dtype != dtype or payload.shape[1:] != shape or len(payload.shape) != len(shape) + 1:
            raise RemoteProtocolError(
                f"a tensor of {payload.dtype} {payload.shape} where {dtype} (samples, *{shape}) belongs"
            )
        if not samples_min <= payload.shape[0] <= samples_max:
            raise RemoteProtocolError(f"{payload.shape[0]} samples where {samples_max} are the limit")
        bytes_max = payload.shape[0] * ITEM_BYTES[dtype] * prod(shape)
        array = unpack(payload, bytes_max=bytes_max)
        tensor = torch.tensor(array, device=self._device)
        if not torch.isfinite(tensor).all():
            raise RemoteProtocolError("a tensor is not finite")  # it would spoil the sums of every sample
        return tensor

    def _pack(self, tensor: torch.Tensor) -> Payload:
        return pack(tensor.detach().cpu().numpy(), self._specification.codec)


class _Vector:
    """An arena as a flat tensor on the device: the arena itself on the CPU, else a copy of it."""

    def __init__(self, arena: memoryview, dtype: torch.dtype, device: torch.device) -> None:
        # torch refuses an empty buffer; a stage without parameters has one.
        self._shared = torch.frombuffer(arena, dtype=dtype) if arena.nbytes else torch.empty(0, dtype=dtype)
        self.tensor = self._shared if device.type == "cpu" else self._shared.to(device)

    def take(self) -> None:
        """Read what the node wrote into the arena."""
        if self.tensor is not self._shared:
            self.tensor.copy_(self._shared)

    def give(self) -> None:
        """Let the node see what was computed."""
        if self.tensor is not self._shared:
            self._shared.copy_(self.tensor)

    def view(self, slot: Slot, start: int = 0) -> torch.Tensor:
        """The part of one parameter, in its shape; `start` is where the vector begins, in elements."""
        offset = start + slot.offset
        return self.tensor[offset : offset + slot.size].view(slot.shape)


def _seed(purpose: str, *parts: bytes | str | int) -> int:
    """64 bits out of everything that may change what is drawn, and nothing else."""
    digest = blake3(b"peerloom/1\0" + encode((purpose, *parts))).digest(length=8)
    return int.from_bytes(digest, "big", signed=True)


def _first_values(slot: Slot, seed: int) -> torch.Tensor:
    """Torch's default for convolutions and linear layers: Kaiming-uniform with a = sqrt(5).

    That is uniform in +-1/sqrt(fan_in), for weights and biases alike. Drawn in float64, so that a
    float32 run and a float64 run start at the same point.
    """
    generator = torch.Generator().manual_seed(_seed("parameter", seed, slot.name))
    draws = torch.rand(slot.shape, generator=generator, dtype=torch.float64)
    return draws.mul_(2).sub_(1).div_(sqrt(slot.fan_in))


def _drop(values: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kept = torch.rand(values.shape, generator=generator, dtype=torch.float32) >= probability
    return values * kept.to(values.device, values.dtype).div_(1 - probability)
