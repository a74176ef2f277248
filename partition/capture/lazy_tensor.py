"""Parameters that have values only while an operator runs: a way to compute a model that fits no machine.

To autograd and to modules, a LazyTensor is a tensor with shape and type, but it has no memory. When an
operator takes it, its values are made, used and dropped. Its views are lazy too, so tensors that autograd
keeps for the backward pass cost nothing. `Materialised` counts the peak of materialised bytes.

Its values are for proofs, not for training. A tile of random numbers according to its recipe is repeated,
because drawing eight billion numbers for each pass would take minutes. The tile's length is prime, so that no
row or head repeats another. Constants get a little noise: if a gate began at exactly zero, every gradient
behind it would be zero, and comparing them would prove nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from partition.capture.errors import CaptureRefused
from partition.capture.skeleton import recipe_of
from partition.execute.values import drawn_chunks
from partition.model.graph import FillStep, Recipe

TILE = 1_048_573
"""Number of elements in a tile: the largest prime below 2**20."""
NOISE = 0.05
_TILES_MAX = 16
_POOLED_MAX = 2
"""Number of memory blocks kept for the next operator: for a weight and a bias."""
_POOLED_BYTES_MAX = 1 << 29


@dataclass
class Materialised:
    """Counts the bytes of lazy tensors that currently have values. An operator may take several lazy
    tensors."""

    bytes_now: int = 0
    bytes_peak: int = 0

    def take(self, size: int) -> None:
        self.bytes_now += size
        self.bytes_peak = max(self.bytes_peak, self.bytes_now)

    def drop(self, size: int) -> None:
        self.bytes_now -= size


@dataclass(frozen=True)
class Source:
    """The source of a lazy tensor's values: `make` returns them, `release` takes their memory back."""

    make: Callable[[], torch.Tensor]
    release: Callable[[torch.Tensor], None]
    size_bytes: int
    counter: Materialised


class LazyTensor(torch.Tensor):
    """A tensor without memory, made by `lazy`. `_view` maps the source's values to this tensor's values, a
    view of them.

    A view counts the bytes of its whole source, which is materialised for it.
    """

    _source: Source
    _view: Callable[[torch.Tensor], torch.Tensor]

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, source: Source, view: Callable[[torch.Tensor], torch.Tensor]
    ) -> "LazyTensor":
        made: LazyTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        made._source, made._view = source, view
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # torch's own form

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves `cls` and `func` out
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], LazyTensor) and _is_view(func):
            return _viewed(func, args, kwargs)
        flat, form = tree_flatten((args, kwargs))
        taken: list[tuple[Source, torch.Tensor]] = []
        try:
            for place, each in enumerate(flat):
                if isinstance(each, LazyTensor):
                    each._source.counter.take(each._source.size_bytes)
                    taken.append((each._source, each._source.make()))
                    flat[place] = each._view(taken[-1][1])
            made_args, made_kwargs = tree_unflatten(flat, form)
            result = func(*made_args, **made_kwargs)
            kept = [each.untyped_storage()._cdata for each in tree_leaves(result) if _has_storage(each)]
            for source, values in taken:
                # A result may share memory with an input, whose memory must not be released in that case.
                if values.untyped_storage()._cdata not in kept:
                    source.release(values)
            return result
        finally:
            for source, _ in taken:
                source.counter.drop(source.size_bytes)


def lazy(
    like: torch.Tensor,
    make: Callable[[], torch.Tensor],
    counter: Materialised,
    release: Callable[[torch.Tensor], None] = lambda _: None,
) -> LazyTensor:
    """Return a tensor with the shape and type of `like`, whose values `make` returns anew each time."""
    source = Source(make, release, like.numel() * like.element_size(), counter)
    return LazyTensor(like.detach(), source, lambda values: values)


def _has_storage(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor)


def _is_view(func: Any) -> bool:
    if func._schema.is_mutable:
        return False
    returned = [result.alias_info for result in func._schema.returns]
    return bool(returned) and all(alias is not None for alias in returned)


def _viewed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return one or several lazy views. Shapes come from the meta device, values from the same operator on
    the base's values."""
    base: LazyTensor = args[0]
    shape = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    outcome = func(shape, *args[1:], **kwargs)
    place = iter(range(len(outcome)) if isinstance(outcome, list | tuple) else (None,))

    def wrap(like: torch.Tensor) -> LazyTensor:
        number = next(place)

        def view(values: torch.Tensor) -> torch.Tensor:
            made = func(base._view(values), *args[1:], **kwargs)
            chosen: torch.Tensor = made if number is None else made[number]
            return chosen

        return LazyTensor(like, base._source, view)

    return tree_map_only(torch.Tensor, wrap, outcome)


class Tiles:
    """Values for proofs: scaled according to a recipe, different for every name, and cheap to make again."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tiles: dict[tuple[Recipe, torch.dtype], torch.Tensor] = {}
        self._free: list[torch.Tensor] = []

    def values(
        self, recipe: Recipe, name: str, shape: tuple[int, ...], dtype: torch.dtype, size: int
    ) -> torch.Tensor:
        """Return a tensor of `shape` with `size` elements. Its memory may be returned with `release`."""
        tile, factor, shift = self._scaled(recipe, dtype)
        base = torch.tensor(shift, dtype=dtype)
        # Each name begins at a different offset in the tile.
        begin = int.from_bytes(blake3(name.encode()).digest(length=4), "big") % TILE
        out = self._room(size, dtype)
        place = 0
        while place < size:
            count = min(TILE - begin, size - place)
            part = tile[begin : begin + count]
            torch.add(base, part, alpha=factor, out=out[place : place + count])
            place, begin = place + count, 0
        made = out.view(shape)
        for step in recipe.steps:
            if step.kind == "zero_row":
                made[int(step.first)] = 0
        return made

    def release(self, values: torch.Tensor) -> None:
        """Keep this memory for reuse, because touching new pages costs more than all the arithmetic."""
        storage = values.untyped_storage()
        if storage.nbytes() <= _POOLED_BYTES_MAX:
            self._free.append(torch.empty(0, dtype=values.dtype).set_(storage))
            self._free.sort(key=torch.numel)
            del self._free[:-_POOLED_MAX]

    def _room(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        for place, free in enumerate(self._free):
            if free.dtype == dtype and free.numel() >= size:
                return self._free.pop(place)[:size]
        return torch.empty(size, dtype=dtype)

    def _scaled(self, recipe: Recipe, dtype: torch.dtype) -> tuple[torch.Tensor, float, float]:
        """Return a tile, with the factor and the summand to apply to it. Most recipes share one of two
        tiles."""
        steps = tuple(step for step in recipe.steps if step.kind != "zero_row")
        match steps:
            case (FillStep("uniform", low, high),):
                return self._tile(_UNIFORM, dtype), high - low, low
            case (FillStep("normal", mean, deviation),):
                return self._tile(_NORMAL, dtype), deviation, mean
            case _:
                _, sample = next(drawn_chunks(Recipe(steps), "sample", self._seed, 2, 1))
                if sample[0] == sample[1]:
                    return self._tile(_UNIFORM, dtype), 2 * NOISE, float(sample[0]) - NOISE
                return self._tile(Recipe(steps), dtype), 1.0, 0.0

    def _tile(self, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
        key = (recipe, dtype)
        if key not in self._tiles:
            while len(self._tiles) >= _TILES_MAX:
                self._tiles.pop(next(iter(self._tiles)))
            _, tile = next(drawn_chunks(recipe, "tile", self._seed, TILE, 1))
            self._tiles[key] = tile.to(dtype)
        return self._tiles[key]


_UNIFORM = Recipe((FillStep("uniform", 0.0, 1.0),))
_NORMAL = Recipe((FillStep("normal", 0.0, 1.0),))


def noisy(values: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a copy with a little noise, for a parameter whose values are all equal."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(values.shape, generator=generator, dtype=torch.float64).mul_(2 * NOISE).sub_(NOISE)
    return values + noise.to(values.dtype)


@contextmanager
def with_values(model: nn.Module, seed: int, counter: Materialised) -> Iterator[None]:
    """Give values to parameters that have none, and noise to constant ones. Gradients are set aside."""
    tiles = Tiles(seed)
    parameters = list(dict.fromkeys(model.parameters()))
    kept = [(parameter, parameter.grad) for parameter in parameters]
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    data: list[tuple[nn.Parameter, torch.Tensor]] = []
    lazies = {
        parameter: _lazy(name, parameter, tiles, counter)
        for name, parameter in model.named_parameters()
        if parameter.is_meta
    }
    try:
        for parameter in parameters:
            parameter.grad = None
            if not parameter.is_meta and parameter.numel() > 0 and parameter.is_floating_point():
                values = parameter.detach()
                if bool((values == values.flatten()[0]).all()):
                    data.append((parameter, parameter.data))
                    parameter.data = noisy(values, seed + len(data))
        for module in model.modules():
            for name, held in list(module._parameters.items()):
                if held is not None and held in lazies:
                    replaced.append((module, name, held))
                    # Use setattr, so that a recurrent module updates its own list of weights.
                    setattr(module, name, lazies[held])
        yield
    finally:
        for module, name, held in reversed(replaced):
            setattr(module, name, held)
        for parameter, values in data:
            parameter.data = values
        for parameter, gradient in kept:
            parameter.grad = gradient


def _lazy(name: str, parameter: nn.Parameter, tiles: Tiles, counter: Materialised) -> nn.Parameter:
    recipe = recipe_of(parameter)
    if recipe is None:
        raise CaptureRefused(f"'{name}' has neither values nor a recipe")
    shape, dtype, size = tuple(parameter.shape), parameter.dtype, parameter.numel()
    made = lazy(parameter, lambda: tiles.values(recipe, name, shape, dtype, size), counter, tiles.release)
    return nn.Parameter(made, requires_grad=parameter.requires_grad)
