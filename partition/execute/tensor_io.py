"""The boundary of a stage: payloads to checked tensors on the device, and back.

Incoming payloads are claims of an unknown peer. Types and shapes must be those of the graph at the payload's
own sizes. Forward values must be finite, because others would spoil the sums of every sample; only minus
infinity is allowed, which fills attention masks. Gradients may have any value (`Norm` detects those that are
not finite). Integers are not checked here: an index out of range makes its operator raise. Under autocast, a
tensor that is floating-point in the graph may be bfloat16.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import numpy as np
import torch

from crypto.errors import RemoteProtocolError
from partition.codecs.codec import Codec, Payload, Rounding, Typed, pack_measured, unpack
from partition.codecs.error_feedback import Feedback
from partition.execute.interpret import DTYPES
from partition.model.graph import FLOATING, ITEM_BYTES, PAIRS, Constant, DataType, TensorType
from partition.model.sizes import check_sizes, evaluate, shape_of
from partition.stage import PayloadPart, StageSpecification, boundary_bytes

_NAMES: dict[torch.dtype, DataType] = {kind: name for name, kind in DTYPES.items()}


class NotFinite(RemoteProtocolError):
    """A number is infinite or NaN."""


class BadPayload(RemoteProtocolError):
    """The payload given as `part` cannot be used, neither by this stage nor by another replica of it.

    `of_values`: it arrived as sent, but has a value that the model does not accept.
    """

    def __init__(self, reason: str, part: PayloadPart, *, of_values: bool = False) -> None:
        super().__init__(reason)
        self.part = part
        self.of_values = of_values


@contextmanager
def blaming(part: PayloadPart) -> Iterator[None]:
    """Blame refusals inside the context on the author of this payload."""
    try:
        yield
    except RemoteProtocolError as error:
        raise BadPayload(str(error), part, of_values=isinstance(error, NotFinite)) from None


class Boundary:
    """The boundary checks of one stage."""

    def __init__(self, specification: StageSpecification, device: torch.device) -> None:
        self._graph = specification.graph
        self._sizes_max = specification.sizes_max
        self._is_half = specification.autocast == "bfloat16"
        # Enough for the gradients of one micro-batch, which as float32 take twice as much as in bfloat16.
        self._feedback = Feedback(2 * boundary_bytes(specification))
        self._device = device
        self._threads = specification.threads
        self._known: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def sizes(self, payload: Payload) -> tuple[int, ...]:
        """Return the symbols' values. Raises RemoteProtocolError if the stage was not made for them."""
        check_sizes(self._graph.symbols, payload.sizes)
        for symbol, size, largest in zip(self._graph.symbols, payload.sizes, self._sizes_max, strict=True):
            if size > largest:
                raise RemoteProtocolError(f"{symbol.name} is {size}, but the stage was made for {largest}")
        return payload.sizes

    def shapes(self, kinds: Sequence[TensorType], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes of types at these sizes. Raises RemoteProtocolError if the sizes give no valid
        shapes."""
        # Many consecutive calls have the same sizes, and the table covers the whole model.
        if self._known is None or self._known[0] != sizes:
            self._known = sizes, evaluate(self._graph.expressions, sizes)
        rows = self._known[1]
        return [shape_of(kind, rows) for kind in kinds]

    def take(
        self,
        payload: Payload,
        kinds: Sequence[TensorType],
        sizes: tuple[int, ...],
        *,
        are_gradients: bool = False,
    ) -> list[torch.Tensor]:
        """Return the tensors of a payload, each with its type; no other code holds them.

        Raises:
            RemoteProtocolError: wrong sizes, a wrong number of tensors, or an invalid tensor.
        """
        if payload.sizes != sizes:
            raise RemoteProtocolError(f"tensors of sizes {payload.sizes}, but {sizes} are expected")
        if len(payload.tensors) != len(kinds):
            raise RemoteProtocolError(f"{len(payload.tensors)} tensors where {len(kinds)} belong")
        for header, kind, shape in zip(payload.tensors, kinds, self.shapes(kinds, sizes), strict=True):
            self._check(header.dtype, header.shape, *_on_wire(kind, shape))
        tensors = []
        unpacked = unpack(payload, bytes_max=payload.size_bytes, threads=self._threads)
        for (dtype, array), kind in zip(unpacked, kinds, strict=True):
            # A copy is writable and aligned, and does not keep the whole message in memory. An array that was
            # decoded is not shared anyway.
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            if dtype == "bfloat16":
                tensor = tensor.view(torch.bfloat16)
            tensor = tensor.to(self._device)
            # A gradient may have any value: if it spoils the sums, `Norm` shows this for all stages at once.
            # A refusal here would blame a replica that behaved correctly.
            if not (are_gradients or may_cross(tensor)):
                raise NotFinite(f"a tensor is not finite{_first_bad(tensor)}")
            tensors.append(torch.view_as_complex(tensor) if kind.dtype in PAIRS else tensor)
        return tensors

    def give(
        self,
        tensors: Sequence[torch.Tensor],
        kinds: Sequence[TensorType],
        sizes: tuple[int, ...],
        codec: Codec,
    ) -> tuple[Payload, Rounding]:
        """Return a payload of tensors that the next stage would accept, and the codec's rounding.

        Raises:
            RemoteProtocolError: a tensor differs from what the graph says, or has no elements.
            NotFinite: a tensor is not finite.
        """
        tensors = [_real(tensor) for tensor in tensors]
        for tensor, kind, shape in zip(tensors, kinds, self.shapes(kinds, sizes), strict=True):
            kind, shape = _on_wire(kind, shape)
            self._check(_NAMES.get(tensor.dtype), tuple(tensor.shape), kind, shape)
            if not tensor.numel():
                raise RemoteProtocolError("an output has no elements")
            if not may_cross(tensor):
                raise NotFinite("an output is not finite")
        return pack_measured([_typed(tensor) for tensor in tensors], codec, sizes, threads=self._threads)

    def give_gradients(
        self, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...], codec: Codec
    ) -> tuple[Payload, Rounding]:
        """Return a payload of gradients, which need no check because they have the shapes of the inputs.

        All go to replicas whose sums are added, so int4's error on one link may be corrected on a different
        link.
        """
        arrays = [_typed(_real(tensor)) for tensor in tensors]
        return pack_measured(arrays, codec, sizes, self._feedback, threads=self._threads)

    def forget(self) -> None:
        """Void the gradients given so far, and their rounding errors."""
        self._feedback.clear()

    def _check(
        self, dtype: DataType | None, shape: tuple[int, ...], kind: TensorType, expected: tuple[int, ...]
    ) -> None:
        fits = dtype == kind.dtype or (self._is_half and dtype == "bfloat16" and kind.dtype in FLOATING)
        if not fits or shape != expected:
            raise RemoteProtocolError(f"a tensor of {dtype} {shape}, but {kind.dtype} {expected} is expected")


def tensor_of(constant: Constant, device: torch.device) -> torch.Tensor:
    """Return a constant's tensor. Raises RemoteProtocolError if its bytes do not match its type."""
    shape = shape_of(constant.type, ())
    if prod(shape) * ITEM_BYTES[constant.type.dtype] != len(constant.data):
        raise RemoteProtocolError(f"a constant of {len(constant.data)} bytes with the shape {shape}")
    dtype = DTYPES[constant.type.dtype]
    if not constant.data:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(bytearray(constant.data), dtype=dtype).view(shape).to(device)


def _on_wire(kind: TensorType, shape: tuple[int, ...]) -> tuple[TensorType, tuple[int, ...]]:
    """Return a tensor's type and shape on the wire. Complex numbers are sent as pairs of real numbers."""
    real = PAIRS.get(kind.dtype)
    return (kind, shape) if real is None else (TensorType(real, ()), (*shape, 2))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite, in one pass without a copy."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    least, most = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(least) & torch.isfinite(most))


def may_cross(tensor: torch.Tensor) -> bool:
    """Return whether no element is plus infinity or NaN, as required for forward values."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    # If any element is NaN, the maximum is NaN too.
    most = tensor.detach().max()
    return bool((most < torch.inf) & ~torch.isnan(most))


def _first_bad(tensor: torch.Tensor) -> str:
    """Return the position and value of the first element that may not cross."""
    bad = torch.isnan(tensor) | torch.isposinf(tensor)
    place = [int(side) for side in bad.nonzero()[0]]
    return f": {float(tensor[tuple(place)])} at {place}"


def _typed(tensor: torch.Tensor) -> Typed:
    plain = tensor.detach().cpu().contiguous()
    dtype = _NAMES[plain.dtype]
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
    # numpy has no bfloat16. Autograd makes zeros without memory, which numpy accepts only with `force`.
    array = (plain.view(torch.uint16) if dtype == "bfloat16" else plain).numpy(force=True)
    return dtype, array
