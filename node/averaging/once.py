"""`me.average(...)`: a single round of averaging. Torch tensors are read through their numpy view, so this
file does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import trio
from numpy.typing import NDArray

from crypto.identity import peer_text
from gossip.averaging.aggregates import chosen, obstacle_of
from gossip.averaging.group import WEIGHT_MAX, WEIGHT_MIN, is_weight
from node.averaging.participation import Participation
from node.averaging.rounds import RoundWish
from node.averaging.service import Averaging
from node.averaging.signature import Row, signatures_of
from node.errors import UsageError

FLOATING = ("float16", "float32", "float64")


@dataclass(frozen=True)
class AveragingResult:
    """The result of a round of averaging. `tensors` are new arrays with the types of the given ones.

    `shares` maps the peers whose tensors were included, by id as text, to their share of the total weight,
    after claims were bounded. If `error` is set, nothing was averaged, and `tensors` are the given ones.
    `aggregate` is the rule; under it, up to `liars_max` of the peers may have lied without moving any value
    out of the range of the honest peers' values.
    """

    tensors: Mapping[str, Any]
    shares: Mapping[str, float]
    seconds: float
    error: str = ""
    aggregate: str = "mean"
    liars_max: int = 0

    @property
    def is_averaged(self) -> bool:
        """Whether the tensors are a mean."""
        return not self.error


async def average_once(
    service: Averaging,
    tensors: Mapping[str, Any],
    group: str,
    weight: float,
    *,
    peers: int,
    timeout_seconds: float,
    codec: str,
    aggregate: str,
    admit: str = "open",
    invitation: str = "",
) -> AveragingResult:
    """See `node.api.surface.Surface.average`."""
    if not is_weight(weight):
        raise UsageError(f"average: weight {weight} must be from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}")
    door = await service.invitations.door(group, admit, invitation)
    is_private = service.is_private or door is not None
    try:
        rule = chosen(aggregate, is_private=is_private, obstacle=obstacle_of("", codec))
    except ValueError as error:
        raise UsageError(f"average: {error}") from None
    vector, rows = await trio.to_thread.run_sync(partial(_join, tensors))
    signature, alike = signatures_of("average", rows, rule)
    run = service.find(group, signature, door)
    run = run or service.open(group, signature, aggregate=rule, alike=alike, door=door)
    now = service.clock.monotonic
    begun = now()
    with trio.move_on_after(timeout_seconds) as patience:
        await run.wait_for_peers(peers)
        left = timeout_seconds - (now() - begun)
        wanted = RoundWish(codec=codec, patience_seconds=left, size_min=max(2, peers + 1))
        made = await run.average(vector, weight, wanted)
    seconds = now() - begun
    if patience.cancelled_caught:
        return AveragingResult(dict(tensors), {}, seconds, _too_late(run, peers, timeout_seconds), rule)
    if made.vector is None:
        return AveragingResult(dict(tensors), {}, seconds, made.error, rule)
    shares = {peer_text(peer): share for peer, share in made.shares.items()}
    return AveragingResult(_split(made.vector, tensors, rows), shares, seconds, "", rule, made.liars_max)


def _too_late(run: Participation, peers: int, timeout_seconds: float) -> str:
    view = run.view
    text = f"{view.peers} of {peers} others took part within {timeout_seconds:g} s"
    for rule, count in sorted(view.other_rules.items()):
        text += f'; {count} average these tensors by aggregate = "{rule}", this peer by "{run.aggregate}"'
    unlike = view.strangers - sum(view.other_rules.values())
    return text + (f"; {unlike} gave other names or shapes" if unlike else "")


def _join(tensors: Mapping[str, Any]) -> tuple[NDArray[Any], tuple[Row, ...]]:
    """Join tensors into one vector in the order of their names; return it with its rows."""
    if not tensors:
        raise UsageError("average: no tensors were given")
    arrays = {name: _array(name, value) for name, value in sorted(tensors.items())}
    rows = tuple((name, array.shape, array.dtype.name) for name, array in arrays.items())
    dtype = np.float64 if any(array.dtype == np.float64 for array in arrays.values()) else np.float32
    vector: NDArray[Any] = np.concatenate([array.reshape(-1).astype(dtype) for array in arrays.values()])
    if not vector.size:
        raise UsageError("average: the tensors are empty")
    if not np.isfinite(vector).all():
        raise UsageError("average: a value in the tensors is not finite")
    return vector, rows


def _array(name: str, value: Any) -> NDArray[Any]:
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            # numpy has no bfloat16; float32 holds it exactly.
            value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"average: {name}: {error}") from None
    if array.dtype.name not in FLOATING:
        raise UsageError(f"average: {name}: {array.dtype} cannot be averaged; want {', '.join(FLOATING)}")
    return array


def _split(vector: NDArray[Any], tensors: Mapping[str, Any], rows: tuple[Row, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    for name, shape, dtype in rows:
        size = int(np.prod(shape, dtype=np.int64))
        array = vector[at : at + size].reshape(shape).astype(dtype)
        given = tensors[name]
        # A tensor creates the new tensor, with its own type and device.
        found[name] = given.new_tensor(array) if hasattr(given, "new_tensor") else array
        at += size
    return {name: found[name] for name in tensors}
