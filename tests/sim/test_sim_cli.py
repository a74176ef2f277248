"""The simulator's command line: arguments, output, files and exit codes."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from node.main import run as node_command
from sim.cli import run as sim_command
from sim.experiment import ExperimentProgress
from sim.report.screen import ProgressScreen, progress_line
from sim.scenario import BUILT_IN
from tests.sim.tiny import DEAF, digest, written
from tests.source import ROOT

DEAF_FLAGS = [word for key, value in DEAF.items() for word in ("--set", f"{key}={value}")]


def in_process(words: Sequence[str], folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ...` as a shell in `folder` would, and return the result."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_built_in_scenarios_are_listed_with_their_topics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sim_command(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["SCENARIO", "NODES", "TIME", "ABOUT"]
    assert [line.split()[0] for line in lines[1:]] == list(BUILT_IN)
    assert sim_command(["--list", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "peerloom.sim.list/1"
    assert [row["name"] for row in document["scenarios"]] == list(BUILT_IN)


def test_a_printed_scenario_includes_the_values_from_the_command_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert sim_command(["churn", "--print"]) == 0
    text = capsys.readouterr().out
    assert "#" in text, "the comments are included"
    assert sim_command(["churn", "--print", "--set", "nodes=33", "--set", "network.loss=0.25"]) == 0
    changed = tomllib.loads(capsys.readouterr().out)
    assert (changed["nodes"], changed["network"]["loss"]) == (33, 0.25)
    assert changed["seconds"] == tomllib.loads(text)["seconds"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chrun"], "there is no scenario 'chrun'; did you mean 'churn'?"),
        (["missing.toml"], "missing.toml: no such file or directory"),
        (["lan", "--set", "nodes"], "--set nodes: expected KEY=VALUE"),
        (["lan", "--set", "nodes=many"], "want a whole number, 1 to 100000"),
        (["lan", "--set", "network.los=0.1"], "did you mean 'loss'?"),
        (["lan", "--sweep", "nodes"], "--sweep nodes: expected KEY=A,B,C"),
        (["lan", "--sweep", "nodes=1,,2"], "expected KEY=A,B,C"),
        (["lan", "--sweep", "nodes=10,10"], "a value is repeated"),
        (["lan", "--sweep", "nodes=10", "--sweep", "nodes=20"], "--sweep nodes is given twice"),
        (["lan", "--sweep", "nodes=10,many"], "want a whole number"),
        (
            ["lan", "--sweep", "nodes=10,20", "--seeds", "9999"],
            "19998 runs are too many; the maximum is 10000",
        ),
        (["lan", "--sed", "3"], "unknown flag --sed; did you mean"),
        (["lan", "--seed", "three"], "invalid value for '--seed'"),
    ],
)
def test_errors_have_at_most_three_lines(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim_command(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
    assert told.err.startswith("error: ")
    assert len(told.err.splitlines()) <= 3


def test_the_node_has_the_same_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = []
    scenario = written(tmp_path)
    for words in (
        ["--list"],
        ["wan", "--print"],
        ["lna"],
        ["lan", "--set", "a.b=c"],
        [scenario, "--json", "--sed"],
    ):
        ours = sim_command(words), *capsys.readouterr()
        theirs = node_command(["sim", *words]), *capsys.readouterr()
        said.append(theirs[0])
        assert theirs == ours
    assert said == [0, 0, 2, 2, 2]
    with pytest.raises(SystemExit):
        raise SystemExit(node_command(["sim", "--help"]))
    assert "--sweep" in capsys.readouterr().out


def test_a_run_shows_its_figures_on_stdout_and_writes_its_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    scenario = written(tmp_path)
    assert sim_command([scenario, "--seed", "3", "--set", "nodes=6", "--out", str(out), "--no-plots"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert lines[0].startswith("tiny  6 nodes, 30.0 s in ") or lines[0].startswith("tiny  6 nodes, 30 s in ")
    subjects = [line.split()[0] for line in lines[1:]]
    assert subjects == ["population", "views", "mistakes", "lookups", "stores", "traffic", "digest"]
    assert told.err.splitlines() == [
        f"written to {out}: summary.json, metrics.csv, events.jsonl, scenario.toml"
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "events.jsonl", "metrics.csv", "scenario.toml", "summary.json",
    ]  # fmt: skip


def test_with_json_stdout_has_only_the_summary(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert sim_command([written(tmp_path), "--seed", "3", "--json", "--quiet"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["digest"] == digest(tmp_path, seed=3)
    assert told.err == ""


def test_a_broken_invariant_exits_with_six_and_its_command_repeats_it(tmp_path: Path) -> None:
    scenario = Path(written(tmp_path)).name
    words = ["-m", "node", "sim", scenario, "--seed", "3", *DEAF_FLAGS, "--json"]
    first = in_process(words, tmp_path, PYTHONHASHSEED="1")
    assert first.returncode == 6
    *events, error, do = first.stderr.splitlines()
    assert events[0] == f"the last {len(events) - 1} events before it:"
    assert "PeerStarted" in first.stderr
    for told in ("error: membership does not hold at ", " s, seed 3: "):
        assert told in error
    command = do.removeprefix("  do: ")
    flags = " ".join(DEAF_FLAGS)
    assert command == f"{sys.executable} -m node sim {scenario} --seed 3 {flags}"
    again = in_process([*shlex.split(command)[1:], "--json"], tmp_path, PYTHONHASHSEED="2")
    assert again.returncode == 6
    assert again.stderr == first.stderr
    summaries = [json.loads(done.stdout) for done in (first, again)]
    assert summaries[0]["digest"] == summaries[1]["digest"]
    assert summaries[0]["broken"] == summaries[1]["broken"]
    assert summaries[0]["broken"]["repeat"] == command


def test_ctrl_c_ends_the_simulation_cleanly_with_partial_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: ProgressScreen, progress: ExperimentProgress) -> None:
        if progress.virtual_seconds == 10.0:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ProgressScreen, "update", interrupted)
    assert sim_command([written(tmp_path), "--out", str(tmp_path / "out"), "--no-plots"]) == 130
    assert "stopped before its end" in capsys.readouterr().out.splitlines()[0]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["complete"], summary["virtual_seconds"]) == (False, 11.0)


def test_progress_shows_position_speed_and_remaining_time() -> None:
    progress = ExperimentProgress(120.0, 600.0, 1.5, 197, 5_000)
    assert progress_line("churn", progress) == "churn  120 of 600 s  197 up  80x real time  6 s left"
    assert (
        progress_line("churn", ExperimentProgress(0.0, 600.0, 0.0, 0, 0))
        == "churn  0 of 600 s  0 up  0x real time"
    )


def test_a_missing_matplotlib_is_reported_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sim_command([written(tmp_path), "--quiet", "--out", str(tmp_path / "out")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"no pictures: matplotlib is not installed ({sys.executable} -m pip install matplotlib)"
