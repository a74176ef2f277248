"""The operators that are timed to calibrate a device, each class at small and large shapes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from partition.plan.operations import Amount, Kind


@dataclass(frozen=True)
class Sample:
    """One operator at one shape: its call, the leaves that need gradients, and the amount of work."""

    kind: Kind
    run: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    forward: Amount
    backward: Amount


class Samples:
    """The operators to time. Each class has a small and a large size, and the sizes in models lie between
    them."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._item = torch.empty((), dtype=dtype).element_size()

    def _leaf(self, *sides: int) -> Tensor:
        return torch.randn(*sides, **self._options).requires_grad_()

    def _bytes(self, *tensors: Tensor) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def all(self) -> Iterator[Sample]:
        """Yield every sample."""
        yield from self._products()
        yield from self._convolutions()
        yield from self._attentions()
        yield from self._pointwise()
        yield from self._reductions()
        yield from self._lookups()

    def _sample(
        self,
        kind: Kind,
        run: Callable[..., Tensor],
        leaves: Sequence[Tensor],
        flops: int,
        *,
        read: Sequence[Tensor] = (),
        shares: int = 1,
        back_bytes: int | None = None,
    ) -> Sample:
        given = tuple(leaves)
        with torch.no_grad():
            made = run(*given)
        touched = self._bytes(*given, *read, made)
        forward = Amount(1, flops, touched)
        back = Amount(shares, flops * shares, touched * shares if back_bytes is None else back_bytes)
        return Sample(kind, lambda: run(*given), given, forward, back)

    def _products(self) -> Iterator[Sample]:
        for rows, width, columns in (
            (4, 64, 64), (64, 128, 512), (256, 256, 256), (128, 768, 768), (512, 512, 2048),
            (1024, 768, 3072), (16, 1024, 2048),
        ):  # fmt: skip
            leaves = self._leaf(rows, width), self._leaf(columns, width), self._leaf(columns)
            yield self._sample("matmul", functional.linear, leaves, 2 * rows * width * columns, shares=2)
        for count, side, width in ((16, 64, 64), (32, 128, 64)):
            pair = self._leaf(count, side, width), self._leaf(count, width, side)
            yield self._sample("matmul", torch.bmm, pair, 2 * count * side * side * width, shares=2)

    def _convolutions(self) -> Iterator[Sample]:
        for batch, channels, side, out, kernel in (
            (4, 3, 32, 16, 3), (8, 32, 16, 32, 3), (8, 64, 32, 64, 3), (4, 64, 16, 256, 1),
            (4, 256, 16, 128, 1), (4, 128, 16, 256, 3),
        ):  # fmt: skip
            leaves = self._leaf(batch, channels, side, side), self._leaf(out, channels, kernel, kernel)
            flops = 2 * batch * out * side * side * channels * kernel * kernel

            def convolve(x: Tensor, weight: Tensor, pad: int = kernel // 2) -> Tensor:
                return functional.conv2d(x, weight, padding=pad)

            yield self._sample("convolution", convolve, leaves, flops, shares=2)
        for batch, channels, side in ((4, 32, 16), (8, 96, 32), (4, 192, 32)):
            leaves = self._leaf(batch, channels, side, side), self._leaf(channels, 1, 3, 3)
            flops = 2 * batch * channels * side * side * 9

            def depthwise(x: Tensor, weight: Tensor, groups: int = channels) -> Tensor:
                return functional.conv2d(x, weight, padding=1, groups=groups)

            yield self._sample("depthwise", depthwise, leaves, flops, shares=2)

    def _attentions(self) -> Iterator[Sample]:
        for batch, heads, length, width in (
            (1, 4, 16, 16),
            (2, 4, 64, 32),
            (4, 8, 128, 64),
            (2, 12, 256, 64),
        ):
            leaves = [self._leaf(batch, heads, length, width) for _ in range(3)]
            flops = 4 * batch * heads * length * length * width

            def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)

            yield self._sample("attention", plain, leaves, flops)
            yield self._sample("attention_dropout", dropping, leaves, flops)

    def _pointwise(self) -> Iterator[Sample]:
        for rows, width in ((4, 64), (64, 256), (256, 512), (1024, 1024), (2048, 1536)):
            x, y = self._leaf(rows, width), self._leaf(rows, width)
            size = rows * width
            yield self._sample("elementwise", torch.add, (x, y), size)
            yield self._sample("elementwise", torch.mul, (x, y), size)
            yield self._sample("elementwise", torch.relu, (x,), size)
            yield self._sample("transcendental", functional.gelu, (x,), size)
            yield self._sample("transcendental", torch.tanh, (x,), size)
            yield self._sample("transcendental", lambda t: torch.softmax(t, -1), (x,), size)
            yield self._sample("random", lambda t: functional.dropout(t, 0.1), (x,), size)
            weight, bias = self._leaf(width), self._leaf(width)

            def norm(t: Tensor, w: Tensor, b: Tensor, shape: tuple[int, ...] = (width,)) -> Tensor:
                return functional.layer_norm(t, shape, w, b)

            yield self._sample("normalization", norm, (x, weight, bias), size)
        for batch, channels, side in ((4, 16, 8), (8, 32, 16), (8, 64, 32)):
            x = self._leaf(batch, channels, side, side)
            weight, bias = self._leaf(channels), self._leaf(channels)

            def batch_norm(t: Tensor, w: Tensor, b: Tensor) -> Tensor:
                return functional.batch_norm(t, None, None, w, b, training=True)

            yield self._sample("normalization", batch_norm, (x, weight, bias), x.numel())
            yield self._sample("pooling", lambda t: functional.max_pool2d(t, 2), (x,), x.numel())
            yield self._sample("pooling", lambda t: functional.avg_pool2d(t, 2), (x,), x.numel())
        yield self._sample("view", lambda t: t.view(64, 256), (self._leaf(128, 128),), 0)

    def _reductions(self) -> Iterator[Sample]:
        for rows, width in ((8, 10), (64, 256), (256, 1024), (1024, 2048)):
            x = self._leaf(rows, width)
            labels = torch.randint(width, (rows,), device=x.device)
            yield self._sample("reduction", lambda t: t.sum(-1), (x,), x.numel())
            yield self._sample("reduction", lambda t: t.mean(), (x,), x.numel())

            def entropy(t: Tensor, wanted: Tensor = labels) -> Tensor:
                return functional.cross_entropy(t, wanted, reduction="sum")

            yield self._sample("reduction", entropy, (x,), x.numel(), read=(labels,))

    def _lookups(self) -> Iterator[Sample]:
        for rows, width, count in ((64, 64, 16), (1024, 128, 512), (8192, 256, 1024), (12288, 512, 512)):
            table = self._leaf(rows, width)
            ids = torch.randint(rows, (count,), device=table.device)
            out = count * width * self._item

            def look(weight: Tensor, wanted: Tensor = ids) -> Tensor:
                return functional.embedding(wanted, weight)

            yield self._sample(
                "gather", look, (table,), count * width, read=(ids,), back_bytes=out + self._bytes(table)
            )
