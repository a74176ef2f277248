"""Operators that a graph writes differently: conversions, uninitialised memory, views, plain renamings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from partition.capture.errors import CaptureRefused
from partition.capture.steps import Call, Emitter, Handle

_aten = torch.ops.aten
Rewrite = Callable[[Call], Handle]


def _to(call: Call) -> Handle:
    """Convert to a different type; the device is dropped."""
    handle = call.first
    if call.fakes.dtype != handle.fake.dtype:
        return call.emit(_aten.to.dtype, handle, call.fakes.dtype)
    return call.emit(_aten.clone.default, handle) if call.keywords.get("copy") else call.walk.alias(handle)


def _to_copy(call: Call) -> Handle:
    return _to(replace(call, keywords={"copy": True}))


def _empty(call: Call) -> Handle:
    """Return zeros: a correct model overwrites this memory, and uninitialised memory must not be read."""
    return call.emit(_aten.zeros.default, call.arguments[0], dtype=call.fakes.dtype)


def _empty_like(call: Call) -> Handle:
    return call.emit(_aten.zeros_like.default, call.first, dtype=call.fakes.dtype)


def _new_empty(call: Call) -> Handle:
    return call.emit(_aten.new_zeros.default, call.first, call.arguments[1], dtype=call.fakes.dtype)


def _view(call: Call) -> Handle:
    """Replace a view by a reshape: a view needs the right strides, and strides are not sent."""
    return call.emit(_aten.reshape.default, call.first, call.arguments[1])


def _view_as(call: Call) -> Handle:
    return call.emit(_aten.reshape_as.default, *call.arguments)


def _squeeze(call: Call) -> Handle:
    """Squeeze only sides that are always one: a batch of one must keep its dimension."""
    shape = call.first.fake.shape
    ones = [place for place, side in enumerate(shape) if isinstance(side, int) and side == 1]
    return call.emit(_aten.squeeze.dims, call.first, ones) if ones else call.walk.alias(call.first)


def _detach(call: Call) -> Handle:
    handle = call.first
    if not handle.needs_gradient:
        return call.walk.alias(handle)
    cut = call.emit(_aten.detach.default, handle)
    cut.needs_gradient = False
    cut.view = None
    return cut


def _alias(call: Call) -> Handle:
    return call.walk.alias(call.first)


def _lifted(call: Call) -> Handle:
    return call.walk.alias(call.first, copy=True)


def _dropout(call: Call) -> Handle:
    """Remove a dropout that never drops anything; torch also returns its input itself."""
    if call.arguments[1] == 0 or not call.arguments[2]:
        return call.walk.alias(call.first)
    return call.emit(_aten.dropout.default, *call.arguments)


def _weight_norm(call: Call) -> Handle:
    """Compute g v / |v| by rows (Salimans and Kingma 2016), for which torch has a separate operator."""
    v, g = call.arguments[:2]
    dim = call.arguments[2] if len(call.arguments) > 2 else 0
    others = [place for place in range(v.fake.dim()) if dim == -1 or place != dim]
    norm = call.walk.emit(_aten.linalg_vector_norm.default, v, 2.0, others, dim != -1)
    return call.emit(_aten.mul.Tensor, v, call.walk.emit(_aten.div.Tensor, g, norm))


def _conjugate(call: Call) -> Handle:
    """Compute a conjugation: torch's own is a view with a flag, which is not sent."""
    if not call.first.fake.is_complex():
        return call.walk.alias(call.first)
    return call.emit(_aten.conj_physical.default, call.first)


def _einsum(call: Call) -> Handle:
    """Remove the spaces from an equation: they mean nothing, and stages do not accept them."""
    return call.emit(call.operator, str(call.arguments[0]).replace(" ", ""), *call.arguments[1:2])


def _embedding(call: Call) -> Handle:
    """Make the gradient dense: a sparse gradient is a different representation, which a stage does not
    support."""
    return call.emit(call.operator, *call.arguments[:4])


def _instance_norm(call: Call) -> Handle:
    if any(isinstance(each, Handle) for each in call.arguments[3:5]):
        raise CaptureRefused(
            "an instance norm that keeps statistics, but stages keep only batch "
            "norm's; set track_running_stats=False, so that it evaluates as it trains"
        )
    return call.emit(call.operator, *call.arguments, **call.keywords)


def _stft(call: Call) -> Handle:
    """Compute a Fourier transform of each window of a signal: (..., time) to (..., frequency, window)."""
    given = [*call.arguments, *[None] * (9 - len(call.arguments))]
    signal, length, hop, width, window, normalized, onesided, is_complex, align = given
    if align:
        raise CaptureRefused("torch.stft with align_to_window; leave that out")
    walk = call.walk
    if window is not None and (width or length) < length:
        left = (length - width) // 2
        window = walk.emit(_aten.constant_pad_nd.default, window, [left, length - width - left], 0.0)
    frames = walk.emit(_aten.unfold.default, signal, -1, length, hop or length // 4)
    if window is not None:
        frames = walk.emit(_aten.mul.Tensor, frames, window)
    is_half = onesided if onesided is not None else not signal.fake.is_complex()
    transform = _aten.fft_rfft.default if is_half else _aten.fft_fft.default
    side = length // 2 + 1 if is_half else length
    # torch's own shape function for it fails if a size varies.
    fake = frames.fake.new_empty((*frames.fake.shape[:-1], side), dtype=frames.fake.dtype.to_complex())
    found = walk.emit(transform, frames, None, -1, "ortho" if normalized else None, fakes=fake)
    found = walk.emit(_aten.transpose.int, found, -2, -1)
    made: Handle = found if is_complex else walk.emit(_aten.view_as_real.default, found)
    return made


def with_tensor_first(
    walk: Emitter, operator: torch._ops.OpOverload, arguments: Sequence[Any]
) -> Sequence[Any]:
    """Return the arguments with a tensor in the first position: `torch.add(0.5, x)` has a number there.

    A stage requires a tensor there, and the number becomes a tensor of the type in which torch computes both.
    """
    first = next(iter(operator._schema.arguments), None)
    if first is None or str(first.type) != "Tensor" or not arguments or isinstance(arguments[0], bool):
        return arguments
    others = [each for each in arguments[1:] if isinstance(each, Handle)]
    if not isinstance(arguments[0], int | float) or not others:
        return arguments
    kind = torch.result_type(others[0].fake, arguments[0])
    return [walk.emit(_aten.full.default, [], arguments[0], dtype=kind), *arguments[1:]]


def _strided(call: Call) -> Handle:
    raise CaptureRefused(
        f"{call.name}, as_strided and similar operators access memory by address; use "
        "view, unfold or slices instead"
    )


REWRITES: Mapping[str, Rewrite] = MappingProxyType(
    {
        "aten.to.device": _to,
        "aten.to.dtype": _to,
        "aten.to.dtype_layout": _to,
        "aten.to.other": _to,
        "aten.type_as.default": _to,
        "aten._to_copy.default": _to_copy,
        "aten.empty.memory_format": _empty,
        "aten.empty_like.default": _empty_like,
        "aten.new_empty.default": _new_empty,
        "aten.view.default": _view,
        "aten._unsafe_view.default": _view,
        "aten._reshape_alias.default": _view,
        "aten.view_as.default": _view_as,
        "aten.squeeze.default": _squeeze,
        "aten.detach.default": _detach,
        "aten.alias.default": _alias,
        "aten.lift_fresh.default": _lifted,
        "aten.lift_fresh_copy.default": _lifted,
        "aten.dropout.default": _dropout,
        "aten._weight_norm.default": _weight_norm,
        "aten.einsum.default": _einsum,
        "aten.embedding.default": _embedding,
        "aten.instance_norm.default": _instance_norm,
        "aten.stft.default": _stft,
        "aten.conj.default": _conjugate,
        "aten._conj.default": _conjugate,
        "aten.resolve_conj.default": _alias,
        "aten.resolve_neg.default": _alias,
        "aten.as_strided.default": _strided,
        "aten.empty_strided.default": _strided,
        "aten.new_empty_strided.default": _strided,
    }
)
"""Rewrites by the operator's full name."""
