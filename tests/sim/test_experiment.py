"""One call runs an experiment: its result, its files, and its report of a broken invariant."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sim
from gossip.swim import Swim
from sim.experiment import ExperimentProgress, Stopped
from sim.measures.rows import Row
from sim.observers import RECENT_MAX, Broken, Observation, World
from sim.scenario import load
from tests.sim.tiny import deaf, digest, tiny, written
from tests.source import ROOT


def test_a_result_has_events_and_measures(tmp_path: Path) -> None:
    result = sim.run(tiny(tmp_path), seed=3)
    assert result.broken is None
    assert not result.stopped
    assert (result.seed, result.virtual_seconds) == (3, 30.0)
    assert result.values("population_peers")[-1] == (30.0, 5.0)
    assert result.values("entries_right_share")[-1] == (30.0, 1.0)
    assert result.summary["schema"] == "peerloom.sim.summary/1"
    assert result.summary["dht"]["lookups_found_share"] == 1.0
    assert result.summary["population"]["max"] == 5


def test_digests_are_equal_for_equal_seeds_and_differ_for_others(tmp_path: Path) -> None:
    assert digest(tmp_path, seed=3) == digest(tmp_path, seed=3) != digest(tmp_path, seed=4)


def test_watching_and_writing_change_nothing(tmp_path: Path) -> None:
    class Nosy:
        def __init__(self) -> None:
            self.seen: list[Observation] = []

        def see(self, observed: Observation, world: World) -> None:
            self.seen.append(observed)

        def sample(self, world: World) -> None:
            for peer in world.peers:
                if world.is_up(peer):
                    world.believes(peer)

        def end(self, world: World) -> None:
            pass

    nosy = Nosy()
    watched = digest(tmp_path, seed=3, watchers=[nosy], folder=tmp_path / "out", progress=lambda _: None)
    assert watched == digest(tmp_path, seed=3, checkers=())
    assert nosy.seen
    assert len((tmp_path / "out" / "events.jsonl").read_text().splitlines()) == len(nosy.seen) + 1


def test_written_files_can_be_read_and_played_again(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    result = sim.run(tiny(tmp_path, nodes=6), seed=3, folder=folder)
    result.write(folder, plots=False)
    assert json.loads((folder / "summary.json").read_text()) == result.summary
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert len(rows) == len(result.metrics)
    assert tuple(rows[0]) == Row._fields
    kinds = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert kinds[0] == {"schema": "peerloom.sim.events/1", "scenario": "tiny", "seed": 3}
    assert len(kinds) == result.events + 1
    assert {"time_seconds", "peer", "kind"} <= set(kinds[1])
    assert {event["peer"] for event in kinds[1:]} == {"n0", "n1", "n2", "n3", "n4", "n5"}
    assert load(str(folder / "scenario.toml")) == result.scenario
    assert sim.run(str(folder / "scenario.toml"), seed=3).digest == result.digest


def test_the_event_file_is_bounded_and_the_summary_counts_missing_events(tmp_path: Path) -> None:
    result = sim.run(tiny(tmp_path), seed=3, folder=tmp_path / "out", events_max=30)
    lines = (tmp_path / "out" / "events.jsonl").read_text().splitlines()
    assert len(lines) == 31
    assert sum('"MemberUp"' in line for line in lines) <= 15
    assert sum(result.summary["events_left_out"].values()) == result.events - 30


def test_a_broken_invariant_reports_the_last_events_and_the_command(tmp_path: Path) -> None:
    scenario = deaf(tmp_path)
    result = sim.run(scenario, seed=3, folder=tmp_path / "out")
    broken = result.broken
    assert broken is not None
    assert result.virtual_seconds < scenario.seconds
    assert 0 < len(broken.recent) == len(broken.lines) <= RECENT_MAX
    assert "PeerStarted" in "\n".join(broken.lines)
    assert broken.repeat == f"python -m node sim {tmp_path / 'out' / 'scenario.toml'} --seed 3"
    for told in (broken.invariant, "seed 3", broken.repeat):
        assert told in str(broken)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["complete"], "the run cannot progress"
    assert summary["broken"]["invariant"] == broken.invariant
    again = sim.run(str(tmp_path / "out" / "scenario.toml"), seed=3)
    assert again.digest == result.digest


def test_worlds_of_whole_nodes_are_measured_and_checked_alike(tmp_path: Path) -> None:
    whole = {"fidelity": "stack", "nodes": 3, "seconds": 12}
    result = sim.run(tiny(tmp_path, **whole), seed=3)
    assert result.values("population_peers")[-1] == (12.0, 3.0)
    assert result.summary["membership"]["entries_right_share_end"] == 1.0
    assert set(result.summary["traffic"]["sent_bytes"]) >= {"swim", "dht"}
    assert sim.run(tiny(tmp_path, **whole), seed=3).digest == result.digest
    checked = {"network.loss": 1.0, "checks.converge_seconds": 8}
    broken = sim.run(tiny(tmp_path, **whole, **checked), seed=3).broken
    assert broken is not None
    assert broken.invariant == "membership"


class MeetsNobody(Swim):
    """A SWIM core that never joins."""

    def join(self, now: float, peers: Any) -> Any:
        return []


class Stumbles(Swim):
    """A SWIM core that raises when it is woken."""

    def wake(self, now: float) -> Any:
        if now > 5.0:
            raise ZeroDivisionError("stumbled")
        return super().wake(now)


def test_a_users_core_replaces_the_built_in_one(tmp_path: Path) -> None:
    scenario = tiny(tmp_path, **{"checks.converge_seconds": 10})
    assert sim.run(scenario, seed=3).broken is None
    broken = sim.run(scenario, seed=3, swim=MeetsNobody).broken
    assert broken is not None
    assert broken.repeat == "sim.run(scenario, seed=3, swim=MeetsNobody)"


def test_exceptions_of_a_core_propagate_with_their_time(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        sim.run(written(tmp_path), seed=3, swim=Stumbles)
    (note,) = caught.value.__notes__
    assert "virtual seconds" in note
    assert "seed=3, swim=Stumbles" in note


def test_a_users_checker_may_end_a_run_unless_checkers_are_disabled(tmp_path: Path) -> None:
    class Impatient:
        def see(self, observed: Observation, world: World) -> None:
            if observed.time > 7.0:
                raise Broken("patience", "it takes too long")

        def sample(self, world: World) -> None:
            pass

        def end(self, world: World) -> None:
            pass

    broken = sim.run(tiny(tmp_path), seed=3, checkers=[Impatient()]).broken
    assert broken is not None
    assert (broken.invariant, broken.what) == ("patience", "it takes too long")
    assert sim.run(deaf(tmp_path), seed=3, checkers=()).broken is None


def test_a_progress_callback_may_stop_the_experiment(tmp_path: Path) -> None:
    told: list[ExperimentProgress] = []

    def watch(progress: ExperimentProgress) -> None:
        told.append(progress)
        if progress.virtual_seconds >= 10:
            raise Stopped

    result = sim.run(tiny(tmp_path), seed=3, folder=tmp_path / "out", progress=watch)
    assert result.stopped
    assert result.broken is None
    assert [progress.virtual_seconds for progress in told] == [float(second) for second in range(1, 11)]
    assert told[-1].population == 5
    assert told[-1].rate > 0
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["complete"] is False


def test_cores_import_neither_torch_nor_matplotlib_and_seeds_no_trio() -> None:
    program = (
        "import sys, sim.seeds;"
        "print([name for name in ('trio', 'torch', 'matplotlib') if name in sys.modules]);"
        "import sim.experiment, sim.cli, sim.worlds.cores;"
        "print([name for name in ('torch', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["[]", "[]"]
