"""The ledger of figures is read back as it was written, marks worse figures, and keeps unmeasured ones."""

import importlib.util
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.source import ROOT


def load() -> ModuleType:
    folder = str(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("_ledger", ROOT / "benchmarks" / "_ledger.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    sys.modules["_ledger"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        del sys.modules["_ledger"]
    return module


ledger = load()
VALUES = st.floats(0.001, 1e9).map(lambda value: float(f"{value:.4g}"))
NAMES = st.from_regex(r"[a-z][a-z ,:.0-9]{0,20}[a-z]", fullmatch=True)
FIGURES = st.builds(
    ledger.Figure,
    benchmark=st.sampled_from(["plan", "stage"]),
    name=NAMES,
    goal=st.sampled_from(["<= 2.0", ">= 0.5"]),
    value=VALUES,
    commit=st.sampled_from(["a1b2c3d", "d4e5f6a"]),
    before=st.none() | VALUES,
)


@given(st.lists(FIGURES, max_size=6, unique_by=lambda each: (each.benchmark, each.name)))
def test_the_page_is_read_as_it_was_written(figures: list[object]) -> None:
    assert ledger.read_page(ledger.page(figures, {"slots": "exit code 2"}, "x86_64")) == figures


@pytest.mark.parametrize(
    ("goal", "before", "value", "worse"),
    [
        ("<= 2.0", 1.0, 1.2, True),
        ("<= 2.0", 1.0, 0.5, False),
        (">= 2.0", 1.0, 0.8, True),
        (">= 2.0", 1.0, 0.9, False),
        (">= 2.0", None, 0.1, False),
    ],
)
def test_a_figure_is_worse_in_the_direction_of_its_goal(
    goal: str, before: float | None, value: float, worse: bool
) -> None:
    figure = ledger.Figure("plan", "ratio", goal, value, "b", before)
    assert figure.is_worse is worse
    assert ("**worse**" in ledger.page([figure], {}, "")) is worse


def test_a_figure_is_compared_with_the_previous_commit() -> None:
    first = ledger.merged([], [ledger.Figure("plan", "ratio", "<= 2.0", 1.0, "a")])
    second = ledger.merged(first, [ledger.Figure("plan", "ratio", "<= 2.0", 1.5, "b")])
    again = ledger.merged(second, [ledger.Figure("plan", "ratio", "<= 2.0", 1.4, "b")])
    assert [each.before for each in (*first, *second, *again)] == [None, 1.0, 1.0]


def test_unmeasured_figures_keep_their_rows_and_removed_goals_lose_theirs() -> None:
    known = [
        ledger.Figure("plan", "ratio", "<= 2.0", 1.0, "a"),
        ledger.Figure("stage", "old goal", "<= 2.0", 1.0, "a"),
    ]
    found = ledger.merged(known, [ledger.Figure("stage", "new goal", "<= 2.0", 1.0, "b")])
    assert [(each.benchmark, each.name) for each in found] == [("plan", "ratio"), ("stage", "new goal")]


def test_every_benchmark_is_in_the_ledger_or_has_a_page() -> None:
    assert {*ledger.FIRST, *ledger.APART} - {
        path.stem for path in (ROOT / "benchmarks").glob("*.py")
    } == set()
    assert not {*ledger.APART} & {*ledger.names()}
