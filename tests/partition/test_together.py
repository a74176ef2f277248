"""Layers that stay together in one stage: those that a user names, and those that share a weight."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.model.graph import Graph
from partition.model.layers import with_layers
from partition.model.together import RANGES_MAX, kept_ranges
from tests.partition.random_graphs import graphs
from tests.partition.test_layers import transformer


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return layers wte, h.0, h.0.mlp, h.1, h.1.mlp, h.2, h.2.mlp, lm_head; the first and the last share a
    weight."""
    return with_layers(transformer(3))


@pytest.mark.parametrize(
    ("groups", "ranges"),
    [
        ([], ()),
        ([["h.1"]], ((3, 5),)),
        ([["h.0", "h.1"]], ((1, 5),)),
        ([["h.1", "h.0"]], ((1, 5),)),
        ([["h.0.mlp"]], ()),
        ([["h.0.mlp.up", "h.1.attn.norm"]], ((2, 4),)),
        ([["2-4"]], ((2, 5),)),
        ([["0", "lm_head"]], ((0, 8),)),
        ([["1-2"], ["2-3"], ["5-6"]], ((1, 4), (5, 7))),
        ([["1-2"], ["3-4"]], ((1, 3), (3, 5))),
    ],
)
def test_groups_become_ranges_of_layers(graph: Graph, groups: list[list[str]], ranges: object) -> None:
    assert kept_ranges(graph, groups) == ranges


def test_layers_that_share_a_weight_stay_together_on_request(graph: Graph) -> None:
    assert kept_ranges(graph, [], tied=True) == ((0, 8),)
    assert kept_ranges(graph, [["h.1"]], tied=True) == ((0, 8),)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h.9", "no module and no layer"),
        ("8", "0 to 7"),
        ("5-3", "0 to 7"),
        ("-3", "no module"),
        ("", "no "),
    ],
)
def test_an_unknown_name_is_refused(graph: Graph, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kept_ranges(graph, [[name]])


def test_the_number_of_ranges_fits_a_manifest() -> None:
    graph = with_layers(transformer(RANGES_MAX + 1))
    with pytest.raises(ValueError, match="at most 16"):
        kept_ranges(graph, [[f"h.{number}"] for number in range(RANGES_MAX + 1)])


@settings(max_examples=40, deadline=None)
@given(graphs(), st.data())
def test_ranges_are_disjoint_and_hold_all_named_layers(graph: Graph, data: st.DataObject) -> None:
    layered = with_layers(graph, layers_max=8)
    count = len(layered.layers)
    numbers = st.integers(0, count - 1).map(str)
    groups = data.draw(st.lists(st.lists(numbers, min_size=1, max_size=3), max_size=4))
    ranges = kept_ranges(layered, groups, tied=data.draw(st.booleans()))
    flat = [end for bounds in ranges for end in bounds]
    assert flat == sorted(flat)
    assert all(0 <= first < last - 1 < count for first, last in ranges)
    for group in groups:
        low, high = min(map(int, group)), max(map(int, group))
        assert low == high or any(first <= low and high < last for first, last in ranges)
