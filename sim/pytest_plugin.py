"""Pytest fixtures that test a user's code on a simulated swarm; pytest finds them automatically.

    def test_my_swim_survives_churn(simulate):
        result = simulate("churn", nodes=50, seconds=300, seed=3, swim=MySwim)
        assert result.broken is None

If an invariant broke and the test fails, the report shows the last events and the command to repeat them.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sim.experiment import Result

_OF_RUN = ("seed", "swim", "kademlia", "replica", "committer", "agreement", "checkers", "watchers", "folder")
"""The keywords that are passed to `sim.run`; every other keyword is a value of the scenario."""
_CORES = _OF_RUN[1:6]


@pytest.fixture
def simulate(request: pytest.FixtureRequest) -> "Callable[..., Result]":
    """`simulate(scenario="lan", *, values={}, **keywords) -> sim.Result`.

    Keywords of `sim.run` are passed to it (seed, swim, kademlia, checkers, ...). All others are values of the
    scenario, such as nodes=50. Values whose names have dots go into `values`: {"network.loss": 0.1}.
    """

    def play(scenario: str = "lan", *, values: Mapping[str, Any] | None = None, **keywords: Any) -> "Result":
        # Imported here, so that tests without a simulation do not load the simulator.
        from node.invocation import simulator
        from sim.experiment import run
        from sim.scenario import load, with_values

        changed = {name: value for name, value in keywords.items() if name not in _OF_RUN} | dict(
            values or {}
        )
        texts = {name: json.dumps(value) for name, value in changed.items()}
        given = {name: value for name, value in keywords.items() if name in _OF_RUN}
        if any(given.get(name) is not None for name in (*_CORES, "checkers")):
            repeat = f"pytest {request.node.nodeid}"
        else:
            words = [scenario, "--seed", str(given.get("seed", 1))]
            words += [word for name, text in texts.items() for word in ("--set", f"{name}={text}")]
            repeat = f"{simulator()} {shlex.join(words)}"
        result = run(with_values(load(scenario), texts, source="simulate"), repeat=repeat, **given)
        if result.broken is not None:
            request.node.add_report_section("call", "simulation", str(result.broken))
        return result

    return play


@pytest.fixture
def simulate_cores() -> Callable[..., Any]:
    """`simulate_cores(make, *, nodes=20, network=..., seed=1) -> sim.custom_cores.CustomSwarm`: a user's own
    protocol."""
    from sim.custom_cores import CustomSwarm

    return CustomSwarm
