"""Matrix products of served rows have the same bits among any other rows; they are computed in blocks if
necessary."""

from collections.abc import Callable

import pytest
import torch

from partition.execute.products import Products
from partition.model.graph import ParameterValue, Value

LEAST, MOST = 4, 512
LINEAR = torch.ops.aten.linear.default


def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose kernel depends on the number of rows, as for some shapes in torch."""
    if len(rows) <= 2 * LEAST:
        found: torch.Tensor = LINEAR(rows.float(), weight.float(), None if bias is None else bias.float())
        return found.to(weight.dtype)
    whole: torch.Tensor = LINEAR(rows, weight, bias)
    return whole.contiguous()


@pytest.mark.parametrize(("call", "blocks"), [(fickle, 1), (LINEAR, 0)])
def test_a_product_that_depends_on_its_batch_is_computed_in_blocks(
    call: Callable[..., torch.Tensor], blocks: int
) -> None:
    torch.manual_seed(3)
    weights = {0: torch.randn(32, 48, dtype=torch.float64), 1: torch.randn(32, dtype=torch.float64)}
    products = Products(LEAST, MOST)
    arguments = (Value(0), ParameterValue(0), ParameterValue(1))
    product = products.product("aten.linear.default", call, arguments)
    assert product is not None
    assert products.try_all(weights) == blocks
    rows = torch.randn(1, 40, 48, dtype=torch.float64)
    whole = product(rows, weights[0], weights[1])
    assert whole.shape == (1, 40, 32)
    for count in (4, 8, 12, 40):
        assert torch.equal(product(rows[:, :count], weights[0], weights[1]), whole[:, :count])
    torch.testing.assert_close(whole, LINEAR(rows, weights[0], weights[1]), rtol=1e-4, atol=1e-4)


def test_nodes_without_a_product_by_a_weight_stay_unchanged() -> None:
    products = Products(LEAST, MOST)
    assert products.product("aten.linear.default", LINEAR, (Value(0), Value(1))) is None
    assert products.product("aten.add.Tensor", LINEAR, (Value(0), ParameterValue(1))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_give_the_same_product_independent_of_the_batch(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weights = {0: torch.randn(96, 48).to(dtype), 1: torch.randn(96).to(dtype)}
    products = Products(LEAST, MOST, weights[0].nbytes)
    first, second = (
        products.product("aten.linear.default", LINEAR, arguments)
        for arguments in (
            (Value(0), ParameterValue(0), ParameterValue(1)),
            (Value(0), ParameterValue(0)),
        )
    )
    assert first is not None
    assert second is not None
    products.try_all(weights)
    # A weight that several products use is packed once.
    assert first.packed is not None
    assert first.packed is second.packed
    rows = torch.randn(1, 40, 48).to(dtype)
    whole = first(rows, weights[0], weights[1])
    for count in (4, 8, 12, 40):
        assert torch.equal(first(rows[:, :count], weights[0], weights[1]), whole[:, :count])
    near = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(whole, LINEAR(rows, weights[0], weights[1]), rtol=0, atol=near)
    torch.testing.assert_close(second(rows, weights[0]), LINEAR(rows, weights[0]), rtol=0, atol=near)


def test_weights_are_packed_all_or_none_and_only_with_enough_memory() -> None:
    weights = {0: torch.randn(96, 48), 1: torch.randn(48, 96)}
    for room, is_packed in ((2 * weights[0].nbytes, True), (2 * weights[0].nbytes - 1, False)):
        products = Products(LEAST, MOST, room)
        made = [
            products.product("aten.linear.default", LINEAR, (Value(0), ParameterValue(row)))
            for row in weights
        ]
        products.try_all(weights)
        assert [each is not None and each.packed is not None for each in made] == [is_packed] * 2
