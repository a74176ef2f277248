"""A stage's parameters as a safetensors file, and back; each has the first of its state-dict names.

The file also has the named constants (buffers that nothing changes). So the files of all stages together are
the model's state dict, except for additional names of tied weights. This module writes the file itself,
because the library's numpy side has no bfloat16. The library reads it, and validates what an unknown peer
sends.
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np
import safetensors

from crypto.errors import RemoteProtocolError
from partition.codecs.base import ON_WIRE
from partition.codecs.codec import Array
from partition.model.graph import ITEM_BYTES, Constant, DataType
from partition.model.safetensors_layout import SAFETENSORS_TYPES
from partition.model.sizes import shape_of
from partition.stage_layout import Slot

_ALIGNMENT_BYTES = 8
"""The alignment of the first tensor, as in safetensors' own files."""
_BFLOAT16_EXPONENT = 0x7F80
"""If all these bits are set, the value is infinite or NaN."""


def export_file(arena: memoryview, slots: Sequence[Slot], constants: Sequence[Constant]) -> bytes:
    """Return the file of the arena's values. Equal contents give equal bytes."""
    flat = arena.cast("B")
    tensors: list[tuple[str, DataType, tuple[int, ...], bytes | memoryview]] = [
        (slot.name, slot.dtype, slot.shape, flat[slot.begin_bytes : slot.end_bytes]) for slot in slots
    ]
    for constant in constants:
        if constant.names:
            kind = constant.type
            tensors.append((constant.names[0], kind.dtype, shape_of(kind, ()), constant.data))
    # Types with the largest elements first, so that every tensor is aligned to its element size.
    tensors.sort(key=lambda tensor: (-ITEM_BYTES[tensor[1]], tensor[0]))
    header: dict[str, object] = {}
    end = 0
    for name, kind_name, shape, data in tensors:
        begin, end = end, end + len(data)
        header[name] = {
            "dtype": SAFETENSORS_TYPES[kind_name],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return b"".join((len(text).to_bytes(8, "little"), text, *(data for _, _, _, data in tensors)))


def import_file(data: bytes, slots: Sequence[Slot], constants: Sequence[Constant]) -> Mapping[int, Array]:
    """Return the parameters of a file by row, flat, read-only, and in the form in which they are sent:
    bfloat16 as uint16.

    Named constants may be missing; those that are present must equal the graph's.

    Raises:
        RemoteProtocolError: not a safetensors file, or its parameters are not exactly this stage's.
    """
    try:
        tensors = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]  # Rust, untyped
    except safetensors.SafetensorError as error:
        raise RemoteProtocolError(f"not a safetensors file: {error}") from None
    for constant in constants:
        if constant.names and (found := tensors.pop(constant.names[0], None)) is not None:
            same = found["dtype"], tuple(found["shape"]), bytes(found["data"])
            if same != (SAFETENSORS_TYPES[constant.type.dtype], shape_of(constant.type, ()), constant.data):
                raise RemoteProtocolError(
                    f"{constant.names[0]} in the safetensors file differs from the graph's"
                )
    if sorted(tensors) != sorted(slot.name for slot in slots):
        raise RemoteProtocolError("the safetensors file does not hold exactly this stage's parameters")
    arrays = {}
    for slot in slots:
        tensor = tensors[slot.name]
        if tuple(tensor["shape"]) != slot.shape or tensor["dtype"] != SAFETENSORS_TYPES[slot.dtype]:
            raise RemoteProtocolError(f"{slot.name} has a different shape or type in the safetensors file")
        array = np.frombuffer(tensor["data"], dtype=ON_WIRE[slot.dtype])
        if not _is_finite(array, slot.dtype):
            raise RemoteProtocolError(f"{slot.name} is not finite in the safetensors file")
        arrays[slot.row] = array
    return arrays


def _is_finite(array: Array, dtype: DataType) -> bool:
    if dtype == "bfloat16":
        return not bool(((array & _BFLOAT16_EXPONENT) == _BFLOAT16_EXPONENT).any())
    return bool(np.isfinite(array).all())
