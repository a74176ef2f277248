"""Sweeps of scenarios: which combinations are played, which are skipped, and the final table."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sim
from sim.cli import run as sim_command
from sim.experiment import ExperimentProgress, Stopped
from sim.scenario import to_toml
from sim.sweep import SweepRun, folder_name, split_values
from tests.sim.tiny import DEAF, digest, tiny, written


def swept(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], list[str]]:
    """Run the command; return the exit code, the JSON document, and the other lines."""
    code = sim_command([*words, "--json", "--jobs", "2"])
    told = capsys.readouterr()
    return code, json.loads(told.out), told.err.splitlines()


def test_a_sweep_plays_every_combination_once_and_resumes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario, out = written(tmp_path), tmp_path / "out"
    words = [scenario, "--set", "seconds=15", "--sweep", "nodes=4,5", "--out", str(out)]
    code, document, talk = swept(capsys, *words, "--seed", "3")
    assert code == 0
    assert talk[0] == f"2 runs; into {out}"
    assert [(run["values"], run["seed"]) for run in document["runs"]] == [
        ({"nodes": "4"}, 3),
        ({"nodes": "5"}, 3),
    ]
    digests = [run["digest"] for run in document["runs"]]
    assert digest(tmp_path, seed=3) not in digests, "progress is not shown out of 30 seconds"
    # This is the state of two interrupted plays: one was killed while its summary was being written, the
    # other was stopped.
    kept = (out / "nodes=4" / "seed=3" / "summary.json").stat().st_mtime_ns
    half = out / "nodes=5" / "seed=3" / "summary.json"
    half.write_text(half.read_text()[:100])
    code, document, talk = swept(capsys, *words, "--seed", "3")
    assert code == 0
    assert talk[0] == f"2 runs, 1 of them done before; into {out}"
    assert [run["digest"] for run in document["runs"]] == digests
    assert (out / "nodes=4" / "seed=3" / "summary.json").stat().st_mtime_ns == kept
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert {row["nodes"] for row in rows} == {"4", "5"}
    (found,) = [row for row in rows if row["nodes"] == "5" and row["figure"] == "lookups_found_share"]
    assert (found["median"], found["min"], found["max"]) == ("1", "1", "1")
    assert not list(out.rglob("*.png"))


def test_only_a_complete_summary_of_the_same_play_counts_as_done(tmp_path: Path) -> None:
    scenario = tiny(tmp_path, seconds=5)
    sim.run(scenario, seed=3, folder=tmp_path / "run")
    run = SweepRun((), 3, tmp_path / "run", to_toml(scenario))
    assert run.summary() is not None
    assert replace(run, seed=4).summary() is None
    assert replace(run, text=to_toml(tiny(tmp_path, seconds=6))).summary() is None
    assert replace(run, folder=tmp_path).summary() is None
    sim.run(scenario, seed=3, folder=tmp_path / "run", progress=stop)
    assert run.summary() is None, "a play that was stopped before its end counts as done"


def stop(_: ExperimentProgress) -> None:
    raise Stopped


def test_a_broken_sweep_names_the_play_and_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    scenario = written(tmp_path)
    flags = [
        word for key, value in DEAF.items() if key != "network.loss" for word in ("--set", f"{key}={value}")
    ]
    words = [scenario, *flags, "--sweep", "network.loss=0.0,1.0", "--out", str(tmp_path / "out")]
    code, document, talk = swept(capsys, *words, "--seed", "3")
    assert code == 6
    assert [run["broken"] is None for run in document["runs"]] == [True, False]
    assert any(line.startswith("broken: network.loss=1.0 seed=3: ") for line in talk)
    assert talk[-2] == "error: an invariant broke in 1 of 2 runs"
    command = f"python -m node sim {scenario} --seed 3 {' '.join(flags)} --set network.loss=1.0"
    assert talk[-1] == f"  do: {command}"
    # A broken run is not repeated, and still counts as broken.
    code, _, talk = swept(capsys, *words, "--seed", "3")
    assert (code, talk[0]) == (6, f"2 runs, 2 of them done before; into {tmp_path / 'out'}")


VALUES = ("1", "0.05", "lan", "[2,3]", "[a, [b,c]]", '"a,b"', "'x]'", "{a = [1,2]}")


@settings(max_examples=50)
@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=5))
def test_a_comma_within_brackets_or_quotes_does_not_separate_values(values: list[str]) -> None:
    assert split_values(", ".join(values)) == values


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(["nodes", "churn.trace"]), st.text(max_size=5)), min_size=1, max_size=2
    )
)
def test_a_play_folder_is_named_by_its_values_without_subfolders(values: list[tuple[str, str]]) -> None:
    name = folder_name(tuple(values))
    assert Path(name).name == name
    assert "\0" not in name
    assert name.isascii()
