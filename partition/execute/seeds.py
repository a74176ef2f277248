"""Seeds of random operators: the same draws on any replica, at any repetition and for any cut.

Before every random operator torch's generators are seeded with a hash of all that may change the draws: the
run, the step, the micro-batch, the entry point and the operator's place in the *whole* entry point. So a
replay draws the same mask. Torch fills a tensor in the order of its memory, and a boundary makes every tensor
contiguous, so an operator that draws is given its tensor contiguous, wherever the cut is. On the CPU a seed
gives the same draws on every machine; an accelerator has a generator of its own, and draws the same on every
one of its kind.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from crypto.encoding import encode


def seed_of(run: bytes, step: int, microbatch: int, entry: str, node: int) -> int:
    """Return 64 bits with sign, as `torch.Generator.manual_seed` takes them."""
    digest = blake3(b"peerloom/1\0" + encode(("random", run, step, microbatch, entry, node))).digest(length=8)
    return int.from_bytes(digest, "big", signed=True)


def seeder(device: torch.device) -> Callable[[int], object]:
    """Return the function that seeds the generators of an operator on `device`; it takes about 2
    microseconds."""
    if device.type in ("cpu", "meta"):
        return torch.default_generator.manual_seed
    # It reaches every generator of every device: slower, but only such a device pays for it.
    return torch.manual_seed


def drawn(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an ATen operator that draws, independent of the strides of its first argument.

    It is for a dispatch mode over an eager module that has to draw as its graph does.
    """
    if not args or not isinstance(args[0], torch.Tensor) or args[0].is_contiguous():
        return func(*args, **kwargs)
    made = func(args[0].contiguous(), *args[1:], **kwargs)
    return args[0].copy_(made) if func._schema.is_mutable else made  # type: ignore[attr-defined]  # an OpOverload
