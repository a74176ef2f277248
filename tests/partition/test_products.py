"""Products of served rows have the same bits whatever rows stand beside them, by blocks where need be."""

from collections.abc import Callable

import pytest
import torch

from partition.execute.products import Products
from partition.model.graph import ParameterValue, Value

LEAST, MOST = 4, 512
LINEAR = torch.ops.aten.linear.default


def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product whose kernel depends on the number of rows, as those of some shapes do."""
    if len(rows) <= 2 * LEAST:
        found: torch.Tensor = LINEAR(rows.float(), weight.float(), None if bias is None else bias.float())
        return found.to(weight.dtype)
    whole: torch.Tensor = LINEAR(rows, weight, bias)
    return whole.contiguous()


@pytest.mark.parametrize(("call", "blocks"), [(fickle, 1), (LINEAR, 0)])
def test_a_product_that_depends_on_its_company_is_computed_in_blocks(
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


def test_what_is_no_product_by_a_weight_stays_as_it_is() -> None:
    products = Products(LEAST, MOST)
    assert products.product("aten.linear.default", LINEAR, (Value(0), Value(1))) is None
    assert products.product("aten.add.Tensor", LINEAR, (Value(0), ParameterValue(1))) is None
