"""The heap engine and the node's own driver give the same trace for the same cores (ARCHITECTURE law 1).

So experiments in `sim.engine` hold for real nodes. The scenario is in `tests/sim/agreement.py`. It is full of
simultaneous ticks, without which the comparison would prove nothing.
"""

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from sim.network.model import NetworkModel
from sim.trace import TraceEntry
from tests.sim.agreement import EVEN, ROUGH, Outcome, by_engine, by_trio

SEEDS = (1, 2, 3)
TIES_MIN = 500
ROOT = Path(__file__).parent.parent

engine = cache(by_engine)
driver = cache(by_trio)
rough = pytest.mark.parametrize("model", [EVEN, ROUGH], ids=["even", "rough"])


def difference(one: Outcome, other: Outcome) -> tuple[TraceEntry | None, TraceEntry | None]:
    """Return the first difference of two traces, which explains more than two digests."""
    ours, theirs = one.trace.entries(), other.trace.entries()
    for left, right in zip(ours, theirs, strict=False):
        if left != right:
            return left, right
    longer = ours[len(theirs) :] or theirs[len(ours) :]
    return (longer[0] if longer else None), None


@rough
@pytest.mark.parametrize("seed", SEEDS)
def test_the_engine_and_the_driver_give_the_same_trace(seed: int, model: NetworkModel) -> None:
    assert difference(engine(seed, model), driver(seed, model)) == (None, None)
    assert engine(seed, model).trace.digest() == driver(seed, model).trace.digest()


@rough
@pytest.mark.parametrize("seed", SEEDS)
def test_engine_and_driver_count_the_same_fates_and_lose_nothing(seed: int, model: NetworkModel) -> None:
    for outcome in (engine(seed, model), driver(seed, model)):
        fates = Counter(outcome.fates)
        arisen = fates.pop("sent") + fates.pop("duplicated")
        assert arisen == fates.total() + outcome.under_way
    assert engine(seed, model).fates == driver(seed, model).fates


@pytest.mark.parametrize("seed", SEEDS)
def test_the_scenario_is_full_of_simultaneous_ticks(seed: int) -> None:
    assert engine(seed, EVEN).ties > TIES_MIN


def test_the_scenario_exercises_the_main_functions_of_the_cores() -> None:
    learnt = {
        entry.data.split(b" ")[0].decode()
        for entry in engine(1, EVEN).trace.entries()
        if entry.what == "learnt"
    }
    assert learnt >= {"MemberUp", "MemberSuspected", "MemberDown", "Joined", "RecordStored", "RecordsFound"}


def test_messages_have_every_possible_fate_in_the_rough_scenario() -> None:
    assert min(engine(1, ROUGH).fates.values()) > 0, engine(1, ROUGH).fates


@rough
def test_messages_as_structs_and_as_bytes_give_the_same_trace(model: NetworkModel) -> None:
    assert difference(engine(1, model), by_engine(1, model, codec=False)) == (None, None)


@rough
def test_different_seeds_give_different_traces(model: NetworkModel) -> None:
    assert len({engine(seed, model).trace.digest() for seed in SEEDS}) == len(SEEDS)


def test_the_trace_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    expected = engine(1, ROUGH).trace.digest()
    printed = subprocess.run(
        [sys.executable, "-m", "tests.sim.agreement", "1"],
        env={**os.environ, "PYTHONHASHSEED": "1"},  # this process has a random hash seed
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert printed.stdout.split() == [expected, expected]
