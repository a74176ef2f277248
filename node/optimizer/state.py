"""A training state as named arrays, and back: parameters, buffers, and the optimizers' memory (such as
moments).

It contains only trained tensors: frozen parameters are neither sent nor stored. Peers' data is written into
existing tensors of equal shape and type. So it can only enlarge an optimizer's memory, which is limited to a
few tensors for each parameter.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from gossip.averaging.robust.reduction import Vector
from node.averaging.snapshot import Array, ArrayRow, Snapshot, is_finite
from node.optimizer.layout import Layout

MEMORIES_MAX = 16
"""Maximum number of tensors that an optimizer remembers for one parameter. AMSGrad has four."""
KEY_LENGTH_MAX = 64
TYPES: dict[str, torch.dtype] = {
    "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64,
    "int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}

Arrays = dict[str, tuple[str, tuple[int, ...], Array]]


def copy_state(
    layout: Layout, optimizers: Sequence[torch.optim.Optimizer], counts: Mapping[str, torch.Tensor]
) -> Arrays:
    """Copy the state. `counts` are integer buffers, which are copied unchanged."""
    found: Arrays = {}
    for slot in layout.slots:
        found[f"tensor/{slot.name}"] = _copied(slot.tensor)
    for name, tensor in counts.items():
        found[f"count/{name}"] = _copied(tensor)
    for slot in layout.slots:
        for optimizer in optimizers:
            for key, value in optimizer.state.get(slot.tensor, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype in NAMES:
                    found[f"memory/{slot.name}/{key}"] = _copied(value)
    return found


def check_state(snapshot: Snapshot, layout: Layout, counts: Mapping[str, torch.Tensor]) -> str:
    """Return why another peer's state cannot replace this one, or "" if it can. Reads every value, so call it
    in the executor."""
    arrays = snapshot.arrays()
    for slot in layout.slots:
        row = arrays.get(f"tensor/{slot.name}", (None,))[0]
        if row is None or row.shape != tuple(slot.tensor.shape) or row.dtype != NAMES[slot.tensor.dtype]:
            return f"the state of others has no such {slot.name}"
        data = arrays[f"tensor/{slot.name}"][1]
        # A buffer such as a mask may hold infinities if the buffer here holds the same ones.
        if not is_finite(row.dtype, data) and not np.array_equal(data, _copied(slot.tensor)[2]):
            return f"the state of others is not finite in {slot.name}"
    for name, tensor in counts.items():
        row = arrays.get(f"count/{name}", (None,))[0]
        if row is None or row.shape != tuple(tensor.shape) or row.dtype != NAMES[tensor.dtype]:
            return f"the state of others has no such {name}"
    memories: dict[str, int] = {}
    shapes = {slot.name: tuple(slot.tensor.shape) for slot in layout.slots}
    for name, (row, data) in arrays.items():
        if name.startswith("memory/"):
            owner, _, key = name.removeprefix("memory/").rpartition("/")
            memories[owner] = memories.get(owner, 0) + 1
            if (
                owner not in shapes
                or not _may_remember(row.shape, shapes[owner])
                or len(key) > KEY_LENGTH_MAX
            ):
                return f"the state of others has an unknown memory {name[:80]}"
            if memories[owner] > MEMORIES_MAX:
                return "the state of others remembers too much"
        if not name.startswith("tensor/") and not is_finite(row.dtype, data):
            return f"the state of others is not finite in {name[:80]}"
    return ""


def put_state(
    snapshot: Snapshot,
    layout: Layout,
    optimizers: Sequence[torch.optim.Optimizer],
    counts: Mapping[str, torch.Tensor],
) -> None:
    """Replace this state by a checked one."""
    arrays = snapshot.arrays()
    with torch.no_grad():
        for slot in layout.slots:
            slot.tensor.copy_(_tensor(*arrays[f"tensor/{slot.name}"]))
        for name, tensor in counts.items():
            tensor.copy_(_tensor(*arrays[f"count/{name}"]))
    owners = {
        id(parameter): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for slot in layout.slots:
        owner = owners.get(id(slot.tensor))
        if owner is None:
            continue  # a buffer
        prefix = f"memory/{slot.name}/"
        known = owner.state.get(slot.tensor, {})
        memory = {}
        for name, (row, data) in arrays.items():
            if name.startswith(prefix) and "/" not in (key := name.removeprefix(prefix)):
                before = known.get(key)
                # Counters such as Adam's `step` stay on the CPU, where torch puts them.
                device = before.device if isinstance(before, torch.Tensor) else slot.tensor.device
                memory[key] = _tensor(row, data).to("cpu" if not row.shape and before is None else device)
        if memory:
            owner.state[slot.tensor].update(memory)


def outer_arrays(outer: Mapping[str, Vector]) -> Arrays:
    """Return a copy of the vectors that a strategy gives to late joiners, as part of a state."""
    return {
        f"outer/{name}": (str(vector.dtype), (vector.size,), vector.copy().view(np.uint8))
        for name, vector in outer.items()
    }


def outer_of(snapshot: Snapshot, layout: Layout) -> dict[str, Vector]:
    """Return the vectors of another peer's strategy that fit this model."""
    return {
        name.removeprefix("outer/"): data.view(layout.dtype).copy()
        for name, (row, data) in snapshot.arrays().items()
        if name.startswith("outer/") and row.shape == (layout.items,) and row.dtype == layout.dtype
    }


def _may_remember(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Return whether an optimizer may remember a tensor of this shape: a single number, or the parameter's
    shape with some dimensions reduced to one, as Adafactor does."""
    is_like = len(shape) == len(parameter) and all(
        own in (1, theirs) for own, theirs in zip(shape, parameter, strict=True)
    )
    return shape in ((), (1,)) or is_like


def size_of(layout: Layout) -> int:
    """Return the maximum size in bytes of the state of this model with any optimizer of torch."""
    own = sum(slot.tensor.numel() * slot.tensor.element_size() for slot in layout.slots)
    return 8 * own + len(layout.slots) * MEMORIES_MAX * 64 + (1 << 20)


def _copied(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], Array]:
    flat = tensor.detach().contiguous().reshape(-1).cpu().clone()
    array = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return NAMES[tensor.dtype], tuple(tensor.shape), array


def _tensor(row: ArrayRow, data: Array) -> torch.Tensor:
    flat = torch.from_numpy(data.copy())
    return flat.view(TYPES[row.dtype]).reshape(row.shape)
