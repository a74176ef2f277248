"""Operations that a kind of device lacks, refused at admission.

torch raises in the middle of a step for an operator without a deterministic kernel, and for a type that the
device does not have. The names are those of the operators below autograd, including those of the backward
pass.
"""

from collections.abc import Mapping
from typing import Any

import torch

from crypto.errors import RemoteProtocolError

NOT_DETERMINISTIC: Mapping[str, frozenset[str]] = {
    "cuda": frozenset(
        f"aten::{name}"
        for name in (
            "_adaptive_avg_pool2d_backward",
            "_adaptive_avg_pool3d_backward",
            "_ctc_loss_backward",
            "adaptive_max_pool2d_backward",
            "avg_pool3d_backward",
            "bincount",
            "grid_sampler_2d_backward",
            "grid_sampler_3d_backward",
            "max_pool3d_with_indices_backward",
            "nll_loss2d_forward",
            "put",
            "reflection_pad1d_backward",
            "reflection_pad3d_backward",
            "upsample_bicubic2d_backward",
            "upsample_linear1d_backward",
        )
    )
}
"""Operators without a deterministic kernel, by kind of device, as found on an H200 with torch 2.11 in 123
forward and backward calls. Two more raise in one of their modes: `_embedding_bag_backward` of a maximum, and
`scatter_reduce` by products."""
EMBEDDING_BAG_MAX = 2
MISSING: Mapping[str, frozenset[torch.dtype]] = {
    "mps": frozenset((torch.float64, torch.complex128, torch.complex64))
}
"""Types that a kind of device does not have. Complex numbers on MPS are too new to rely on."""


def check_operator(kind: str, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check a call. Raises RemoteProtocolError if this kind of device has no deterministic kernel for it."""
    name = func._schema.name
    if kind not in NOT_DETERMINISTIC:
        return
    is_missing = name in NOT_DETERMINISTIC[kind]
    if name == "aten::scatter_reduce":
        is_missing = "prod" in (*args, *kwargs.values())
    elif name == "aten::_embedding_bag_backward":
        is_missing = len(args) > 8 and args[8] == EMBEDDING_BAG_MAX
    if is_missing:
        short = name.removeprefix("aten::").removeprefix("_")
        raise RemoteProtocolError(
            f"{kind} computes {short} in a different order each time. Use a CPU for this stage"
        )


def check_type(kind: str, dtype: torch.dtype) -> None:
    """Check a type. Raises RemoteProtocolError if this kind of device does not have it."""
    if dtype in MISSING.get(kind, ()):
        text = str(dtype).removeprefix("torch.")
        raise RemoteProtocolError(f"{kind} has no {text}. Use a CPU for this stage, or float32")
