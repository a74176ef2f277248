"""Sizes of a stage: the layout of its parameters in an arena, and the maximum size of arenas and messages."""

from math import prod

import msgspec

from partition.model.graph import FLOATING, ITEM_BYTES, DataType, Parameter
from partition.model.sizes import shape_of
from partition.stage import StageSpecification, boundary_bytes, vector_bytes

_OVERHEAD_BYTES = 1 << 20
"""Space in addition to tensors and their names: fields of messages, and zstd's overhead on incompressible
data."""
_ROW_BYTES = 256
"""Space of a tensor in safetensors' header in addition to its name: a type, up to eight sides, two
offsets."""


class Slot(msgspec.Struct, frozen=True):
    """The position of one parameter in an arena: `offset` and `size` count elements. `row` is the graph's."""

    row: int
    parameter: Parameter
    shape: tuple[int, ...]
    offset: int
    size: int
    is_tied: bool

    @property
    def name(self) -> str:
        """The parameter's first name."""
        return self.parameter.names[0]

    @property
    def dtype(self) -> DataType:
        return self.parameter.type.dtype

    @property
    def begin_bytes(self) -> int:
        return self.offset * ITEM_BYTES[self.dtype]

    @property
    def end_bytes(self) -> int:
        return self.begin_bytes + self.parameter.stored_bytes


def parameter_layout(specification: StageSpecification) -> tuple[Slot, ...]:
    """Return the stage's parameters in their order in an arena, without gaps.

    First come the parameters with gradients or statistics that belong to this stage alone, then those tied to
    other stages, so that each all-reduce covers one contiguous range. The frozen parameters follow by type,
    the widest first.
    """
    graph = specification.graph
    tied = set(graph.tied)

    def order(row: int, parameter: Parameter) -> tuple[int, int, int]:
        if parameter.kind != "frozen":
            return int(row in tied), 0, row
        return 2, FLOATING.index(parameter.type.dtype), row

    slots: list[Slot] = []
    begin = 0
    pairs = zip(graph.rows, graph.parameters, strict=True)
    for row, parameter in sorted(pairs, key=lambda pair: order(*pair)):
        shape = shape_of(parameter.type, ())
        offset = begin // ITEM_BYTES[parameter.type.dtype]
        slots.append(Slot(row, parameter, shape, offset, prod(shape), row in tied))
        begin = slots[-1].end_bytes
    return tuple(slots)


def gradient_bytes(specification: StageSpecification) -> int:
    """Return the bytes of `gradients` and of `totals`: of all parameters and statistics that are not
    frozen."""
    return sum(row.stored_bytes for row in specification.graph.parameters if row.kind != "frozen")


def arena_bytes(specification: StageSpecification) -> dict[str, int]:
    """Return the bytes of every arena, by name, in the order of ARENAS."""
    gradients = gradient_bytes(specification)
    return {
        "parameters": vector_bytes(specification),
        "gradients": gradients,
        "totals": gradients,
        "moments": gradients * specification.optimizer.moments,
    }


def payload_bytes_max(specification: StageSpecification) -> int:
    """Return the maximum size of the tensors, as sent, in one request or answer of a correct stage."""
    # Under autocast the tensors at a boundary may take half of this, never more than this.
    tensors = 2 * boundary_bytes(specification)
    return tensors + tensors // 128 + _OVERHEAD_BYTES


def message_bytes_max(specification: StageSpecification) -> int:
    """Return the maximum length of a request or answer of a correct stage: the parameters, or one
    micro-batch."""
    constants = sum(len(constant.data) for constant in specification.graph.constants)
    tensors = max(vector_bytes(specification) + constants, 2 * boundary_bytes(specification))
    graph = specification.graph
    names = [row.names[0] for row in graph.parameters]
    names += [row.names[0] for row in graph.constants if row.names]
    header = sum(_ROW_BYTES + len(name) for name in names)
    return tensors + tensors // 128 + header + _OVERHEAD_BYTES
