"""The fixtures for users' tests, tried in a separate test run."""

import tomllib
from textwrap import dedent

import pytest

from tests.sim.tiny import TINY
from tests.source import ROOT

pytest_plugins = ("pytester",)


@pytest.fixture
def theirs(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Return a folder of tests with a scenario. The simulator's pytest plugin is available there, as after an
    installation."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{pytester.path}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = pytester.mkdir("simulator_under_test-1.dist-info")
    entries = project["entry-points"]["pytest11"]
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: simulator-under-test\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    pytester.makefile(".toml", tiny=TINY)
    return pytester


def test_a_users_core_can_be_tested_on_a_simulated_swarm(theirs: pytest.Pytester) -> None:
    theirs.makepyfile(
        dedent("""
        from gossip.swim import Swim

        class MeetsNobody(Swim):
            def join(self, now, peers):
                return []

        def test_ours(simulate):
            result = simulate("tiny.toml", seed=3, nodes=6, values={"checks.converge_seconds": 10})
            assert result.broken is None
            assert result.summary["nodes"] == 6

        def test_theirs(simulate):
            result = simulate("tiny.toml", seed=3, swim=MeetsNobody, values={"checks.converge_seconds": 10})
            assert result.broken is None

        def test_a_scenario_that_cannot_hold(simulate):
            result = simulate("tiny.toml", values={"network.loss": 1.0, "checks.converge_seconds": 8})
            assert result.broken is None
        """)
    )
    done = theirs.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error")
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(
        [
            "*Captured simulation call*",
            "membership does not hold at *, seed 3: *",
            "*RecordGot  key *",
            "again: pytest *::test_theirs",
            "*Captured simulation call*",
            "again: python -m node sim tiny.toml --seed 1 --set network.loss=1.0 --set checks.*",
        ]
    )


def test_custom_protocols_run_if_a_test_suite_names_the_plugin(
    theirs: pytest.Pytester,
) -> None:
    theirs.makeconftest('pytest_plugins = ["sim.pytest_plugin"]')
    theirs.makepyfile(
        dedent("""
        import math
        from dataclasses import dataclass

        @dataclass(frozen=True)
        class Rumour:
            text: str

        @dataclass(frozen=True)
        class Heard:
            text: str

        class Gossiper:
            def __init__(self, seat):
                self.seat, self.events, self.deadline, self.text = seat, [], math.inf, None
                if seat.number == 0:
                    self.deadline, self.text = 1.0, "hello"

            def receive(self, now, sender, message):
                if self.text is None:
                    self.text, self.deadline = message.text, now + 0.1
                    self.events.append(Heard(message.text))
                return []

            def wake(self, now):
                self.deadline = now + 0.1
                return [(self.seat.rng.choice(self.seat.peers), Rumour(self.text))]

        def told(swarm):
            swarm.crash(5, at=0.5)
            swarm.run(until=10.0)
            return swarm

        def test_a_rumour_reaches_all_but_the_dead(simulate_cores):
            swarm = told(simulate_cores(Gossiper, nodes=30, seed=4))
            assert len(swarm.of(Heard)) == 28
            assert swarm.cores[5].text is None
            assert swarm.now == 10.0

        def test_it_repeats(simulate_cores):
            one, same, other = (told(simulate_cores(Gossiper, nodes=30, seed=seed)) for seed in (4, 4, 5))
            assert one.digest() == same.digest() != other.digest()
            assert one.events == same.events
        """)
    )
    theirs.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error").assert_outcomes(passed=2)
