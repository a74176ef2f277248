"""Train, gossip, repeat by real processes: one is killed, one joins late, and the run converges; and the same
with two columns of two stages.

The small form of `benchmarks/gossip_digits.py`, which has eight processes. For `make soak`: on a busy machine
the run may converge before the late one has made a step. In virtual time `tests.node.local` plays the same.
"""

import os

import pytest

from tests.source import ROOT

pytest.importorskip("sklearn")


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
def test_processes_gossip_until_the_run_converges_and_a_late_joiner_serves_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gossip_digits

    row = gossip_digits.play(peers=3, killed=1, patience=6)
    assert (row["outcomes"], row["reason"]) == (["done"], [gossip_digits.CONVERGED])
    assert row["late_steps"] > 0
    assert row["accuracy"] > 0.93


@pytest.mark.skipif("PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
def test_two_columns_of_processes_train_on_after_one_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gossip_digits

    row = gossip_digits.play(peers=4, killed=1, patience=gossip_digits.PATIENCE_COLUMNS, stages=2)
    assert (row["outcomes"], row["reason"]) == (["done"], [gossip_digits.CONVERGED])
    assert row["accuracy"] > 0.93
