"""Seeds of random operators: the same draws on every replica, at every repetition and for every cut.

Before every random operator, torch's generators are seeded with a hash of everything that may change the
draws: the run, the step, the micro-batch, the entry point and the operator's position in the *whole* entry
point. So a replay draws the same mask. Torch fills a tensor in the order of its memory, and a stage boundary
makes every tensor contiguous. So an operator that draws always gets a contiguous tensor, wherever the cut is.
On CPUs a seed gives the same draws on every machine. Accelerators have their own generators, with the same
draws on every accelerator of one kind.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from crypto.encoding import encode


def seed_of(run: bytes, step: int, microbatch: int, entry: str, node: int) -> int:
    """Return a signed 64-bit integer, as `torch.Generator.manual_seed` takes it."""
    digest = blake3(b"peerloom/1\0" + encode(("random", run, step, microbatch, entry, node))).digest(length=8)
    return int.from_bytes(digest, "big", signed=True)


def seeder(device: torch.device) -> Callable[[int], object]:
    """Return the function that seeds the generators of an operator on `device`. A call takes about 2
    microseconds."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator.manual_seed
    # This reaches every generator of every device. It is slower, but only such a device pays for it.
    return torch.manual_seed


def drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an ATen operator that draws, independent of the strides of its first argument.

    This is for a dispatch mode over an eager module that must make the same draws as its graph.
    """
    if not args or not isinstance(args[0], torch.Tensor) or args[0].is_contiguous():
        return func(*args, **kwargs)
    made = func(args[0].contiguous(), *args[1:], **kwargs)
    return args[0].copy_(made) if func._schema.is_mutable else made  # type: ignore[attr-defined]  # an OpOverload
