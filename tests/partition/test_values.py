"""A parameter's initial values depend only on its name and seed."""

from contextlib import suppress
from math import erf, inf, nan, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.execute.values import CHUNK, drawn_chunks, first_values
from partition.model.graph import FillStep, Parameter, Recipe, StoredValues, TensorType

PINNED = [0.29208877588525484, 0.8150785600569982, 0.3212939309018721]
UNIFORM = Recipe((FillStep("uniform", -0.25, 0.5),))


def parameter(recipe: Recipe, *shape: int, name: str = "fc.weight") -> Parameter:
    return Parameter((name, "another.name"), TensorType("float64", shape), "parameter", recipe)


def drawn(made: Parameter, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    shape = [side for side in made.type.shape if isinstance(side, int)]
    out = torch.full(shape, torch.nan, dtype=dtype)
    first_values(made, seed, dtype, out)
    return out


def test_values_depend_only_on_name_and_seed() -> None:
    values = drawn(parameter(UNIFORM, 30, 40))
    assert torch.equal(values, drawn(parameter(UNIFORM, 30, 40)))
    assert not torch.equal(values, drawn(parameter(UNIFORM, 30, 40), seed=1))
    assert not torch.equal(values, drawn(parameter(UNIFORM, 30, 40, name="fc.bias")))


def test_values_are_pinned_since_replicas_of_other_versions_must_agree() -> None:
    values = drawn(parameter(Recipe((FillStep("uniform", 0.0, 1.0),)), 3))
    assert values.tolist() == PINNED


def test_neither_torchs_seed_nor_its_state_is_used_or_changed() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    values = drawn(parameter(UNIFORM, 30))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(values, drawn(parameter(UNIFORM, 30)))


def test_float32_values_are_float64_values_rounded() -> None:
    made = parameter(Recipe((FillStep("normal", 1.0, 3.0),)), 100)
    assert torch.equal(drawn(made, dtype=torch.float32), drawn(made).float())


def test_a_range_can_be_drawn_alone() -> None:
    size = 2 * CHUNK + 17
    out = torch.empty(size, dtype=torch.float64)
    first_values(parameter(UNIFORM, size), 5, torch.float64, out)
    chunks = {start: chunk.clone() for start, chunk in drawn_chunks(UNIFORM, "fc.weight", 5, size, 1)}
    assert sorted(chunks) == [0, CHUNK, 2 * CHUNK]
    assert torch.equal(torch.cat([chunks[start] for start in sorted(chunks)]), out)
    # The same chunk of a parameter with a different length: only the seed counts.
    shorter = dict(drawn_chunks(UNIFORM, "fc.weight", 5, CHUNK, 1))
    assert torch.equal(shorter[0], chunks[0])
    assert not torch.equal(chunks[0], chunks[CHUNK])


def test_values_are_written_into_a_view_of_an_arena() -> None:
    arena = torch.zeros(100, dtype=torch.float32)
    made = parameter(UNIFORM, 4, 5)
    first_values(made, 0, torch.float32, arena[10:30].view(4, 5))
    assert torch.equal(arena[10:30].view(4, 5), drawn(made, dtype=torch.float32))
    assert not arena[:10].any()
    assert not arena[30:].any()


def test_uniform_values_fill_their_range_evenly() -> None:
    values = drawn(parameter(UNIFORM, 40_000))
    assert values.min() >= -0.25
    assert values.max() < 0.5
    assert abs(values.mean() - 0.125) < 5 * 0.75 / sqrt(12 * 40_000)
    assert abs(values.std() - 0.75 / sqrt(12)) < 0.005


def test_normal_values_have_their_mean_and_deviation() -> None:
    values = drawn(parameter(Recipe((FillStep("normal", 2.0, 0.5),)), 40_000))
    assert abs(values.mean() - 2.0) < 5 * 0.5 / 200
    assert abs(values.std() - 0.5) < 5 * 0.5 / 282
    assert values.max() > 2.0 + 3 * 0.5


def test_steps_are_applied_in_their_order() -> None:
    steps = (
        FillStep("constant", 2.0),
        FillStep("add", 1.0),
        FillStep("multiply", -3.0),
        FillStep("clamp", -8.0, 0.0),
    )
    assert drawn(parameter(Recipe(steps), 3)).tolist() == [-8.0] * 3
    assert drawn(parameter(Recipe(()), 3)).tolist() == [0.0] * 3
    # A row zeroed before an addition is not zero after it.
    ordered = Recipe((FillStep("constant", 2.0), FillStep("zero_row", 1.0), FillStep("add", 1.0)))
    assert drawn(parameter(ordered, 3, 2)).tolist() == [[3.0, 3.0], [1.0, 1.0], [3.0, 3.0]]


def test_a_truncated_normal_is_made_by_its_inverse() -> None:
    low, high = erf(-2 / sqrt(2)), erf(2 / sqrt(2))
    steps = (
        FillStep("uniform", low, high),
        FillStep("erfinv"),
        FillStep("multiply", 0.02 * sqrt(2)),
        FillStep("clamp", -0.04, 0.04),
    )
    values = drawn(parameter(Recipe(steps), 40_000))
    assert values.abs().max() <= 0.04
    # The deviation of a normal distribution truncated at two sigma is 0.8796 of its own.
    assert abs(values.std() - 0.02 * 0.879_63) < 0.0002


def test_only_the_row_across_two_chunks_is_zeroed() -> None:
    width = CHUNK // 2 + 3
    values = drawn(parameter(Recipe((FillStep("uniform", 1.0, 2.0), FillStep("zero_row", 1.0))), 3, width))
    assert not values[1].any()
    assert values[0].min() >= 1
    assert values[2].min() >= 1


@pytest.mark.parametrize(
    "step",
    [
        FillStep("uniform", 1.0, 0.0),
        FillStep("uniform", -1.7e308, 1.7e308),
        FillStep("uniform", float("nan"), 1.0),
        FillStep("normal", 0.0, -1.0),
        FillStep("constant", float("inf")),
        FillStep("clamp", 1.0, 0.0),
        FillStep("zero_row", 3.0),
        FillStep("zero_row", -1.0),
        FillStep("zero_row", 0.5),
        FillStep("zero_row", float("nan")),
    ],
)
def test_an_invalid_step_is_refused(step: FillStep) -> None:
    with pytest.raises(RemoteProtocolError, match=step.kind):
        drawn(parameter(Recipe((step,)), 3, 2))


def test_a_clamp_may_be_open_on_one_side() -> None:
    values = drawn(parameter(Recipe((FillStep("normal", 0.0, 1.0), FillStep("clamp", 0.0, inf))), 100))
    assert values.min() == 0
    assert values.max() > 1
    with pytest.raises(RemoteProtocolError, match="clamp"):
        drawn(parameter(Recipe((FillStep("clamp", nan, 1.0),)), 4))


KINDS = ("uniform", "normal", "constant", "multiply", "add", "clamp", "erfinv", "zero_row")
NUMBERS = st.one_of(st.integers(-5, 5).map(float), st.floats())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.builds(FillStep, st.sampled_from(KINDS), NUMBERS, NUMBERS), max_size=4))
def test_any_recipe_is_either_drawn_or_refused(steps: list[FillStep]) -> None:
    with suppress(RemoteProtocolError):
        drawn(parameter(Recipe(tuple(steps)), 4, 5))


def test_the_output_needs_the_right_size_and_an_initial_recipe() -> None:
    made = parameter(UNIFORM, 3)
    with pytest.raises(LocalProtocolError, match="cannot hold"):
        first_values(made, 0, torch.float32, torch.empty(4))
    with pytest.raises(LocalProtocolError, match="cannot hold"):
        first_values(made, 0, torch.float64, torch.empty(3))
    stored = Parameter(("w",), TensorType("float32", (3,)), "parameter", StoredValues(0, 12, bytes(32)))
    with pytest.raises(LocalProtocolError, match="stored"):
        first_values(stored, 0, torch.float32, torch.empty(3))
