"""The allow-list of operators compared with torch: each row must be true of the installed version."""

from typing import Any

import pytest
import torch

from partition.execute.schema import signature
from partition.model.operators import ATTEND, OPERATORS, Operator

NAMES = tuple(OPERATORS)


def overload(name: str) -> Any:
    space, operator, kind = name.split(".")
    assert space == "aten" or name == ATTEND
    return getattr(getattr(getattr(torch.ops, space), operator), kind)


def rows(wanted: Any) -> list[Operator]:
    return [row for row in OPERATORS.values() if wanted(row)]


def test_every_operator_exists_under_its_own_name() -> None:
    assert all(row.name == name for name, row in OPERATORS.items())
    assert all(str(overload(name)) == name.removesuffix(".default") or overload(name) for name in NAMES)
    assert len(NAMES) > 250


def test_no_operator_changes_its_arguments() -> None:
    assert [name for name in NAMES if overload(name)._schema.is_mutable] == []


def test_operators_that_alias_by_their_schema_are_views() -> None:
    aliasing = {
        name
        for name in NAMES
        if any(argument.alias_info is not None for argument in overload(name)._schema.arguments)
    }
    assert aliasing <= {row.name for row in rows(lambda row: row.view)}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.dropout.default", (0.0, True)),
        ("aten.dropout.default", (0.5, False)),
        ("aten.feature_dropout.default", (0.5, False)),
        ("aten.alpha_dropout.default", (0.5, False)),
        ("aten.type_as.default", (torch.zeros(1),)),
        ("aten.atleast_1d.default", ()),
        ("aten.to.dtype", (torch.float32,)),
        ("aten.contiguous.default", ()),
        ("aten.reshape.default", ([4],)),
    ],
)
def test_composites_that_may_return_their_input_are_views(name: str, arguments: tuple[Any, ...]) -> None:
    tensor = torch.zeros(4)
    assert overload(name)(tensor, *arguments).data_ptr() == tensor.data_ptr()
    assert OPERATORS[name].view


def test_operators_that_are_not_views_allocate_their_results() -> None:
    """Test operators on one or two tensors without other arguments; most operators can be called this way."""
    tried = 0
    for row in rows(lambda row: not row.view and not row.factory):
        for count in (1, 2):
            given = [torch.rand(3, 3) + 0.1 for _ in range(count)]
            try:
                made = overload(row.name)(*given)
            except (RuntimeError, TypeError, IndexError):
                continue
            results = [made] if isinstance(made, torch.Tensor) else list(made)
            own = {tensor.untyped_storage().data_ptr() for tensor in given}
            assert not own & {tensor.untyped_storage().data_ptr() for tensor in results}, row.name
            tried += 1
    assert tried > 150


def test_exactly_the_operators_that_draw_are_marked_random() -> None:
    drawing = {name for name in NAMES if torch.Tag.nondeterministic_seeded in overload(name).tags}
    assert drawing == {row.name for row in rows(lambda row: row.random)}


def test_operators_with_a_training_flag_draw_nothing_in_evaluation() -> None:
    flags = {"train", "training", "dropout_p"}
    for name in NAMES:
        arguments = [argument.name for argument in overload(name)._schema.arguments]
        flipped = {arguments[index]: value for index, value in OPERATORS[name].evaluate}
        assert set(flipped) == flags & set(arguments), name
        assert not any(flipped.values())


def test_factories_take_a_device_and_no_tensor() -> None:
    for name in NAMES:
        arguments = overload(name)._schema.arguments
        takes_device = any(argument.name == "device" for argument in arguments)
        takes_tensor = any("Tensor" in str(argument.type) for argument in arguments)
        assert OPERATORS[name].factory == (takes_device and not takes_tensor), name


def test_in_place_variants_compute_the_same_as_their_operators() -> None:
    twins = rows(lambda row: row.state_twin)
    assert twins
    for row in twins:
        assert row.state_twin is not None
        plain, twin = overload(row.name)._schema, overload(row.state_twin)._schema
        assert [argument.name for argument in plain.arguments] == [
            argument.name for argument in twin.arguments
        ]
        written = [argument.name for argument in twin.arguments if argument.is_write]
        assert written == ["self"]
        assert row.state_twin not in OPERATORS


def test_dangerous_operators_are_not_on_the_list() -> None:
    bases = {name.split(".")[1] for name in NAMES}
    assert not [base for base in bases if base.endswith("_") and not base.endswith("__")]
    assert not [base for base in bases if base.startswith(("_foreach", "_fused", "_sparse"))]
    assert not bases & {
        "as_strided", "set", "resize", "empty", "empty_like", "empty_strided", "new_empty", "from_file",
        "item", "_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "bincount",
        "multinomial", "lift", "data", "record_stream", "_pin_memory", "normal", "poisson",
    }  # fmt: skip
    # If the repeats are a tensor, the shape depends on data.
    assert "aten.repeat_interleave.Tensor" not in OPERATORS


def test_no_argument_reaches_a_generator_a_device_or_a_layout() -> None:
    kinds = {
        rule.kind
        for name in NAMES
        for rule in (*signature(name).positional, *signature(name).keywords.values())
    }
    known = {"Tensor", "List[Tensor]", "List[Optional[Tensor]]", "int", "List[int]", "float", "List[float]",
             "number", "bool", "str", "ScalarType", "MemoryFormat"}  # fmt: skip
    assert kinds - known == {"Generator", "Device", "Layout"}


def test_every_integer_argument_has_limits() -> None:
    free = {
        rule.name
        for name in NAMES
        for rule in (*signature(name).positional, *signature(name).keywords.values())
        if rule.kind in ("int", "List[int]") and rule.bounds is None
    }
    # A slice accepts any integer, an ignored index is only compared, and a path is never given.
    assert free == {"start", "end", "ignore_index", "path"}
