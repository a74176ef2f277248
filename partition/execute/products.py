"""Products with weights in a stage that serves: the bits of each row are independent of the other rows.

Rows are padded to a multiple (`partition.execute.serving`), which makes torch's kernels compute them in the
same way for most shapes. There are exceptions: in float64 on two threads, a product of 384 by 17 gives a row
different bits among 8 rows than among 160. So once the weights are loaded, every shape is tried on this
machine, among few and among many rows. A product that fails is computed in blocks with a fixed number of
rows, which is slower but always the same.

The trial of a shape takes at most `FLOPS`, so fewer rows are tried for large weights.

If the slot has enough memory, oneDNN stores the weights in the order in which its kernels read them. Then the
minimum number of rows costs about as much as one row with the plain weight; torch's own kernels take two to
three times as long. The bits may differ from those with the plain weight. A plain weight that nothing else
reads is not kept; `values` restores it from oneDNN's form.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from partition.model.graph import Argument, ParameterValue, Value

FLOPS = 4_000_000_000
"""FLOPs used to try one shape: about a tenth of a second."""
_MULTIPLES = (1, 2, 3, 5, 9, 16, 32, 64, 128)
"""The products with these multiples of the minimum number of rows are compared with the largest product."""
PACKED_TYPES = (torch.float32, torch.bfloat16)
"""Types for which oneDNN is faster with packed weights."""
UNPACKED_CALLS = 64
"""A weight restored by `values` is kept for this many calls, because a replica that loads it asks for its
next part within them."""
PACKED_SIDE_MIN = 32
"""Minimum side of a weight to pack; smaller weights gain nothing."""
_PLACES = {"aten.linear.default": (0, 1, 2), "aten.mm.default": (0, 1, -1), "aten.addmm.default": (1, 2, 0)}
"""The positions of rows, weights and bias among an operator's arguments."""


class Product:
    """The product of one node; it is called like its operator."""

    def __init__(self, name: str, call: Callable[..., torch.Tensor], weight: int, bias: int | None) -> None:
        self.weight, self.bias = weight, bias
        self.block = 0
        """Number of rows that are computed together; 0 for all."""
        self.packed: torch.Tensor | None = None
        """The weight in oneDNN's own order."""
        self._call = call
        self._rows = _PLACES[name][0]
        self._name = name

    @property
    def _schema(self) -> Any:
        return self._call._schema  # type: ignore[attr-defined]  # an operator of torch

    def __call__(self, *arguments: Any) -> torch.Tensor:
        if not self.block:
            return self._at_once(*arguments)
        given: torch.Tensor = arguments[self._rows]
        flat = given.reshape(-1, given.shape[-1])
        before, after = arguments[: self._rows], arguments[self._rows + 1 :]
        parts = []
        for begin in range(0, len(flat), self.block):
            rows = flat[begin : begin + self.block]
            if len(rows) < self.block:
                rows = torch.cat((rows, rows.new_zeros(self.block - len(rows), rows.shape[1])))
            parts.append(self._at_once(*before, rows, *after))
        return torch.cat(parts)[: len(flat)].reshape(*given.shape[:-1], -1)

    def _at_once(self, *arguments: Any) -> torch.Tensor:
        if self.packed is None:
            return self._call(*arguments)
        bias = None if self.bias is None else arguments[_PLACES[self._name][2]]
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            arguments[self._rows], self.packed, bias, "none", [], ""
        )
        return found

    def find_block(self, parameters: Mapping[int, torch.Tensor], least: int, most: int) -> None:
        """Try row counts from `least` to `most`. Use blocks if the bits depend on the number of rows."""
        weight = parameters[self.weight]
        arguments: list[Any] = [None, weight]
        if self.bias is not None:
            arguments.append(parameters[self.bias])
        if self._name == "aten.addmm.default":
            arguments = [arguments[2], None, weight]
        inner = weight.shape[1] if self._name == "aten.linear.default" else weight.shape[0]
        most = min(most, max(4 * least, FLOPS // max(1, 4 * weight.numel()) // least * least))
        rows = torch.randn(most, inner, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
        found = {}
        for count in (most, *(least * multiple for multiple in _MULTIPLES)):
            if count <= most:
                arguments[self._rows] = rows[:count]
                found[count] = self._at_once(*arguments)
        whole = found[most]
        is_same = all(torch.equal(part, whole[:count]) for count, part in found.items())
        self.block = 0 if is_same else least


class Products:
    """All products of a program. The number of rows in each call is `least` or a multiple of it. Weights are
    packed if `room_bytes` is enough for all of them."""

    def __init__(self, least: int, most: int, room_bytes: int = 0) -> None:
        self._least, self._most = least, most
        self._room_bytes = room_bytes
        self._packed: dict[int, torch.Tensor] = {}
        self._unpacked: tuple[int, torch.Tensor] | None = None
        self._calls_left = 0
        self._all: list[tuple[str, Product]] = []

    def product(
        self, name: str, call: Callable[..., torch.Tensor], arguments: Sequence[Argument]
    ) -> Product | None:
        """Return the product that replaces a node; None if the node is not a product of rows with a
        weight."""
        places = _PLACES.get(name)
        if places is None:
            return None
        rows, weight, bias = (arguments[place] if 0 <= place < len(arguments) else None for place in places)
        is_known = bias is None or isinstance(bias, ParameterValue)
        if not (isinstance(rows, Value) and isinstance(weight, ParameterValue) and is_known):
            return None
        made = Product(name, call, weight.row, bias.row if isinstance(bias, ParameterValue) else None)
        self._all.append((name, made))
        return made

    @property
    def packed(self) -> Mapping[int, int]:
        """Return, for the row of each packed weight, how many products read it."""
        return Counter(product.weight for _, product in self._all if product.packed is not None)

    def values(self, row: int) -> torch.Tensor:
        """Return a packed weight in plain order. The most recent one is kept for a while, see `forget`."""
        self._calls_left = UNPACKED_CALLS
        if self._unpacked is None or self._unpacked[0] != row:
            self._unpacked = None
            self._unpacked = row, self._packed[row].to_dense()
        return self._unpacked[1]

    def forget(self) -> None:
        """Count a call of the stage. After some calls without a read, drop the weight that `values`
        restored."""
        self._calls_left -= 1
        if self._calls_left <= 0:
            self._unpacked = None

    def try_all(self, parameters: Mapping[int, torch.Tensor]) -> int:
        """Try each shape with the current weights. Return how many products are computed in blocks."""
        known: dict[tuple[Any, ...], int] = {}
        with torch.inference_mode():
            self._pack(parameters)
            for name, product in self._all:
                weight = parameters[product.weight]
                key = name, tuple(weight.shape), weight.dtype, product.bias is None
                if weight.device.type != "cpu" or weight.dim() != 2:
                    continue
                if key not in known:
                    product.find_block(parameters, self._least, self._most)
                    known[key] = product.block
                product.block = known[key]
        return sum(bool(product.block) for _, product in self._all)

    def _pack(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Pack every weight that oneDNN can pack, each once, if there is room for all of them."""
        fit = [product for name, product in self._all if _can_be_packed(name, parameters[product.weight])]
        weights = {product.weight: parameters[product.weight] for product in fit}
        for _, product in self._all:
            product.packed = None
        self._packed, self._unpacked = {}, None
        if sum(weight.nbytes for weight in weights.values()) > self._room_bytes:
            return
        for row, weight in weights.items():
            self._packed[row] = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), self._least)
        for product in fit:
            product.packed = self._packed[product.weight]


def _can_be_packed(name: str, weight: torch.Tensor) -> bool:
    return (
        name == "aten.linear.default"
        and weight.device.type == "cpu"
        and weight.dtype in PACKED_TYPES
        and weight.dim() == 2
        and min(weight.shape) >= PACKED_SIDE_MIN
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]  # of torch
    )
