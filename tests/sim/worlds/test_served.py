"""Services in a world of cores: answers continue through churn, every token is right, and equal seeds give
equal answers.
"""

from typing import Any

import pytest

from partition.serve.door import Door
from sim.experiment import run
from sim.scenario import Scenario
from sim.scenario.loading import load, with_values
from sim.worlds import served

SMALL = {
    "nodes": "12",
    "seconds": "60",
    "start.spread_seconds": "5",
    "churn.permanent": "3",
    "churn.sessions.scale_seconds": "10",
    "churn.absences.scale_seconds": "10",
    "services.0.members": "12",
    "services.0.stages": "2",
    "services.0.tokens": "30",
    "services.0.prompt": "20",
    "services.0.answers_per_second": "1",
    "services.0.at_seconds": "12",
}


FEW = SMALL | {
    "nodes": "4",
    "seconds": "120",
    "churn.permanent": "1",
    "churn.crash_share": "0.5",
    "churn.sessions.scale_seconds": "30",
    "churn.absences.scale_seconds": "20",
    "services.0.members": "4",
    "services.0.replicas": "1",
    "services.0.load_seconds": "2",
    "services.0.at_seconds": "8",
}
"""Half of the departing machines die without a goodbye. Sometimes too few machines remain for two stages."""


def small() -> Scenario:
    return with_values(load("serving"), SMALL)


def test_answers_survive_churn_and_are_the_same_for_the_same_seed() -> None:
    first, again = (run(small(), seed=1) for _ in range(2))
    assert first.broken is None
    (service,) = first.summary["services"]
    assert service["moved"] > 0
    assert service["outcomes"]["length"] > 10
    assert first.summary["digest"] == again.summary["digest"]


def test_a_stopgap_answers_until_another_peer_holds_the_stage() -> None:
    found = run(with_values(load("serving"), FEW), seed=3)
    assert found.broken is None
    (service,) = found.summary["services"]
    assert service["moved"] > 0
    assert set(service["outcomes"]) == {"length"}
    counters = found.summary["traffic"]["counters"]
    assert counters["stopgaps taken"] > 0
    assert counters["stopgaps relieved"] > 0


class Confused(Door):
    """A door (the node that asks a service) that continues from a wrong token once its route is lost."""

    def _leave_route(self, now: float, generation: Any, lost: Any, reason: str) -> Any:
        generation.tokens[-1] = 1 - generation.tokens[-1] % 2
        return super()._leave_route(now, generation, lost, reason)


def test_a_door_that_loses_a_token_while_changing_routes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "Door", Confused)
    found = run(small(), seed=1)
    assert found.broken is not None
    assert found.broken.invariant == "answers"
