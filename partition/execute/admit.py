"""Admission: the decision whether a stage may run here, before anything large is allocated.

Every node is checked against torch's own schema (`partition.execute.schema`), and each entry point is run on
tensors that have shapes and types but no memory (`partition.execute.shape_tensors`): `train` forward and
backward as in training, the others as in requests. That run is metered, and ends at the first operator that
exceeds what the provider offers (`partition.execute.memory_meter`). Every value must have the type and the
shape that the graph claims, both at the largest and at the smallest sizes.

This proves nothing about sizes in between, or about scratch memory inside a kernel. The operating system's
limits on the process cover those.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from crypto.errors import RemoteProtocolError
from partition.execute.device_limits import check_type
from partition.execute.interpret import DTYPES, FORMATS
from partition.execute.memory_meter import Meter, shown_bytes
from partition.execute.schema import Signature, check_node
from partition.execute.shape_tensors import GhostStorage, ghost
from partition.model.graph import (
    FLOATING,
    ITEM_BYTES,
    ITEMS_MAX,
    SERVE,
    Argument,
    ConstantValue,
    FormatName,
    GraphNode,
    Items,
    ParameterValue,
    Size,
    StageEntry,
    StateValue,
    TensorType,
    TypeName,
    Value,
)
from partition.model.operators import BATCH_NORM, OPERATORS
from partition.model.sizes import evaluate, shape_of
from partition.stage import Admitted, StageSpecification
from partition.stage_layout import arena_bytes

NODES_MAX = 16_384
"""Maximum number of nodes of one stage, over its entry points: some seconds of dry runs, and 300 transformer
blocks."""
REASON_LENGTH_MAX = 200

_LOSSES = frozenset(
    f"aten.{name}.default"
    for name in (
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "kl_div",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
    )
)

_CLAMPS = frozenset(("aten.clamp.Tensor", "aten.clip.Tensor"))

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# torch writes a traceback for each operator that it cannot run on fake tensors. Here that is a refusal like
# any other, and text from an unknown peer should not be in a log.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True


@dataclass(frozen=True)
class _Figures:
    flops: int
    saved_bytes: int
    peak_bytes: int


def admit(specification: StageSpecification) -> Admitted:
    """Return the resources of one micro-batch of the largest sizes, if the stage may run here.

    Raises:
        RemoteProtocolError: an operator, an argument, a shape or a cost is refused. The text names the node.
    """
    began = time.monotonic()
    graph = specification.graph
    if sum(len(entry.nodes) for entry in graph.entries) > NODES_MAX:
        raise RemoteProtocolError(f"a stage of more than {NODES_MAX} nodes")
    base = _kept_bytes(specification)
    offered = specification.memory_bytes_max - base
    if offered <= 0:
        raise RemoteProtocolError(
            f"parameters and optimizer need {shown_bytes(base)} of memory, but "
            f"{shown_bytes(specification.memory_bytes_max)} is offered"
        )
    smallest = tuple(symbol.minimum for symbol in graph.symbols)
    found = []
    for entry in graph.entries:
        found.append(_DryRun(specification, entry, specification.sizes_max, offered, base).run())
        if smallest != specification.sizes_max:
            _DryRun(specification, entry, smallest, offered, base, is_whole=False).run()
    return Admitted(
        flops=max((figures.flops for figures in found), default=0),
        saved_bytes=max((figures.saved_bytes for figures in found), default=0),
        peak_bytes=max((figures.peak_bytes for figures in found), default=0),
        seconds=time.monotonic() - began,
    )


def room_bytes(specification: StageSpecification, admitted: Admitted) -> int:
    """Return the offered memory that remains after everything an admitted stage needs."""
    return max(0, specification.memory_bytes_max - _kept_bytes(specification) - admitted.peak_bytes)


def _kept_bytes(specification: StageSpecification) -> int:
    """Return the bytes of arenas, constants, the pages of served sessions, and the states of one session."""
    graph = specification.graph
    sizes = evaluate(graph.expressions, specification.sizes_max)
    arenas = sum(arena_bytes(specification).values()) + specification.cache_bytes
    constants = sum(len(constant.data) for constant in graph.constants)
    states = sum(prod(shape_of(state.type, sizes)) * ITEM_BYTES[state.type.dtype] for state in graph.states)
    return arenas + constants + states


class _DryRun:
    """One entry point at one set of sizes. If `is_whole`, the backward pass is run too, if there is one."""

    def __init__(
        self,
        specification: StageSpecification,
        entry: StageEntry,
        sizes: Sequence[int],
        memory_bytes_max: int,
        base_bytes: int,
        *,
        is_whole: bool = True,
    ) -> None:
        self._specification = specification
        self._graph = specification.graph
        self._entry = entry
        self._device = torch.device(specification.device)
        self._sizes = evaluate(self._graph.expressions, sizes)
        self._types = {number: self._graph.types[row] for number, row in entry.types}
        self._is_trained = entry.name == "train" and is_whole
        context = sizes[2] if entry.name == SERVE else 0
        self._meter = Meter(memory_bytes_max, specification.flops_max, base_bytes, self._device.type, context)
        self._values: dict[int, torch.Tensor] = {}
        self._tables: dict[type, dict[int, torch.Tensor]] = {}
        self._last_uses = _last_uses(entry)

    def run(self) -> _Figures:
        """Run the entry point. Raises RemoteProtocolError like `admit`."""
        where = f"entry point '{self._entry.name}'"
        try:
            with self._meter, torch.set_grad_enabled(self._is_trained), self._autocast():
                return self._measure()
        except RemoteProtocolError as error:
            raise RemoteProtocolError(f"{where}: {error}") from None
        # Any exception raised by an operator on an unknown peer's graph is that peer's fault.
        except Exception as error:
            raise RemoteProtocolError(f"{where}: {_reason(error)}") from None

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._specification.autocast == "off":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _measure(self) -> _Figures:
        self._fill_tables()
        self._fill_ports()
        for node in self._entry.nodes:
            try:
                self._step(node)
            except RemoteProtocolError as error:
                raise RemoteProtocolError(f"{self._place(node)}: {error}") from None
            except Exception as error:
                raise RemoteProtocolError(f"{self._place(node)}: {_reason(error)}") from None
        self._check_results()
        saved = self._meter.live_bytes
        if self._is_trained:
            self._backward()
        meter = self._meter
        if self._specification.recompute:
            saved = sum(self._bytes_of(self._types[number]) for number in self._entry.inputs)
        return _Figures(meter.flops, saved, meter.peak_bytes)

    def _place(self, node: GraphNode) -> str:
        names = self._graph.operators
        return f"node {node.id} ({names[node.operator] if node.operator < len(names) else 'no operator'})"

    # Tensors

    def _kept(self, kind: TensorType) -> torch.Tensor:
        """Return a tensor that the stage keeps. It is counted among the arenas, not here."""
        shape = shape_of(kind, self._sizes)
        check_type(self._device.type, DTYPES[kind.dtype])
        return ghost(shape, DTYPES[kind.dtype], self._device, GhostStorage(0, None))

    def _bytes_of(self, kind: TensorType) -> int:
        return prod(shape_of(kind, self._sizes)) * ITEM_BYTES[kind.dtype]

    def _fill_tables(self) -> None:
        graph = self._graph
        parameters = {}
        for row, parameter in zip(graph.rows, graph.parameters, strict=True):
            tensor = self._kept(parameter.type)
            if self._is_trained and parameter.kind == "parameter":
                tensor.requires_grad_()
                # Gradients are added up in an arena, not allocated for each pass.
                tensor.grad = self._kept(parameter.type)
            parameters[row] = tensor
        self._tables = {
            ParameterValue: parameters,
            ConstantValue: {
                row: self._kept(constant.type)
                for row, constant in zip(graph.constant_rows, graph.constants, strict=True)
            },
            StateValue: {
                row: self._kept(state.type) for row, state in zip(graph.state_rows, graph.states, strict=True)
            },
        }

    def _fill_ports(self) -> None:
        for number in (*self._entry.inputs, *self._entry.labels):
            kind = self._types[number]
            shape = shape_of(kind, self._sizes)
            tensor: torch.Tensor = self._meter.tensor(shape, DTYPES[kind.dtype], self._device)
            if self._is_trained and number in self._entry.backward_inputs:
                tensor.requires_grad_()
            self._values[number] = tensor

    # Nodes

    def _step(self, node: GraphNode) -> None:
        names = self._graph.operators
        if node.operator >= len(names):
            raise RemoteProtocolError("no such operator")
        wanted = check_node(node, names[node.operator], self._sizes)
        arguments = [self._given(argument) for argument in node.arguments]
        keywords = {key: self._given(argument) for key, argument in node.keywords}
        _guard(wanted, arguments, len(node.outputs))
        if wanted.name == BATCH_NORM and arguments[5]:
            # The operator would change running statistics in place; the interpreter also withholds them from
            # it.
            arguments[3] = arguments[4] = None
        if OPERATORS[wanted.name].factory:
            keywords["device"] = self._device
        made = wanted.call(*arguments, **keywords)
        del arguments, keywords
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        if len(results) != len(node.outputs):
            raise RemoteProtocolError(f"{len(results)} results, but {len(node.outputs)} are named")
        for number, tensor in zip(node.outputs, results, strict=True):
            self._check_claim(number, tensor)
            self._values[number] = tensor
        for number in self._last_uses.get(node.id, ()):
            self._values.pop(number, None)

    def _given(self, argument: Argument) -> Any:
        match argument:
            case Value(number):
                if number not in self._values:
                    raise RemoteProtocolError(f"no node has computed value {number}")
                return self._values[number]
            case ParameterValue(row) | ConstantValue(row) | StateValue(row):
                table = self._tables[type(argument)]
                if row not in table:
                    raise RemoteProtocolError(f"the stage does not hold row {row}")
                return table[row]
            case Size(row):
                return self._sizes[row]
            case TypeName(dtype):
                return DTYPES[dtype]
            case FormatName(name):
                return FORMATS[name]
            case Items(items):
                return [self._given(item) for item in items]
        return argument

    def _check_claim(self, number: int, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise RemoteProtocolError("a result that is not a tensor")
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise RemoteProtocolError(f"a result of type {tensor.dtype}")
        kind = self._types.get(number)
        if kind is None:
            return
        shape = shape_of(kind, self._sizes)
        dtype = _NAMES[tensor.dtype]
        is_type = dtype == kind.dtype or (
            # Only a run shows which tensors are bfloat16.
            self._specification.autocast != "off" and dtype in FLOATING and kind.dtype in FLOATING
        )
        if tuple(tensor.shape) != shape or not is_type:
            raise RemoteProtocolError(
                f"value {number} is {dtype}{list(tensor.shape)}, but the graph claims "
                f"{kind.dtype}{list(shape)}"
            )

    # Results

    def _check_results(self) -> None:
        entry = self._entry
        scalars = [metric.value for metric in entry.metrics]
        scalars += [number for number in (entry.loss, entry.count) if number is not None]
        for number in scalars:
            if number not in self._values or self._values[number].shape:
                raise RemoteProtocolError(f"value {number}, the loss, the count or a metric, is not a scalar")
        states = {
            row: state.type for row, state in zip(self._graph.state_rows, self._graph.states, strict=True)
        }
        for row, number in entry.updates:
            if row not in states or number not in self._values:
                raise RemoteProtocolError(
                    f"state {row} is updated by value {number}, but one of them is not in this stage"
                )
            tensor = self._values[number]
            if tuple(tensor.shape) != shape_of(states[row], self._sizes):
                raise RemoteProtocolError(f"state {row} is updated by a tensor of shape {list(tensor.shape)}")
        for number in entry.outputs:
            if number not in self._values:
                raise RemoteProtocolError(f"there is no value {number} to pass on")

    def _backward(self) -> None:
        """Go backward like the executor: from the loss, or from the gradients that arrive for the outputs."""
        entry = self._entry
        roots = (entry.loss,) if entry.loss is not None else entry.backward_outputs
        tensors = [self._values[number] for number in roots if number in self._values]
        tensors = [tensor for tensor in tensors if tensor.requires_grad]
        if tensors:
            torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


def _last_uses(entry: StageEntry) -> dict[int, list[int]]:
    """Return, by node id, the values that are not needed after that node."""
    # The executor keeps its inputs until the backward pass is done.
    kept = {*entry.inputs, *entry.labels, *entry.outputs, *(metric.value for metric in entry.metrics)}
    kept.update(number for number in (entry.loss, entry.count) if number is not None)
    kept.update(number for _, number in entry.updates)
    last: dict[int, int] = {}
    for node in entry.nodes:
        for number in (*_taken(node), *node.outputs):
            last[number] = node.id
    uses: dict[int, list[int]] = {}
    for number, node_id in last.items():
        if number not in kept:
            uses.setdefault(node_id, []).append(number)
    return uses


def _taken(node: GraphNode) -> list[int]:
    found = []
    for argument in (*node.arguments, *(value for _, value in node.keywords)):
        for item in argument.items if isinstance(argument, Items) else (argument,):
            if isinstance(item, Value):
                found.append(item.id)
    return found


def _guard(wanted: Signature, arguments: Sequence[Any], results: int) -> None:
    """Refuse calls that operators without memory would accept, or that would take long.

    Three kinds of operators fail only in the backward pass, too late to be refused, if their arguments are
    unsuitable. Also, the number of pieces of a tensor is limited, because all pieces are made together.
    """
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if wanted.name in _LOSSES:
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
            raise RemoteProtocolError(f"a loss of {', '.join(sorted(map(str, dtypes)))}")
    elif wanted.name in _CLAMPS:
        shapes = [tensor.shape for tensor in tensors]
        wide = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]  # torch left it without types
        if wide != shapes[0]:
            raise RemoteProtocolError(f"limits of shape {list(wide)} for a tensor of {list(shapes[0])}")
    elif wanted.name == "aten.group_norm.default" and len(arguments) > 3:
        if arguments[2] is None and arguments[3] is not None:
            raise RemoteProtocolError("a group norm with a bias but no weight")
    elif wanted.name in ("aten.unbind.int", "aten.split.Tensor"):
        place = 1 if wanted.name == "aten.unbind.int" else 2
        side = tensors[0].shape[arguments[place] if len(arguments) > place else 0]
        pieces = side if wanted.name == "aten.unbind.int" else max(1, -(-side // arguments[1]))
        if pieces != results or pieces > ITEMS_MAX:
            raise RemoteProtocolError(f"{pieces} pieces, but {results} are named")


def _reason(error: BaseException) -> str:
    """Return one line of torch's message. It may quote text from an unknown peer, so it is kept short."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= REASON_LENGTH_MAX else text[:REASON_LENGTH_MAX] + "..."
