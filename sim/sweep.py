"""Many experiments: each combination of values with each of several seeds, in parallel processes, resumable.

    peerloom sim churn --sweep nodes=100,300,1000 --seeds 5 --jobs 2 --out out

Each run is a `peerloom sim` process with its own folder, such as `out/nodes=300/seed=4`. A run whose folder
has a complete summary of the same scenario is not repeated. The results are printed as a table and written as
sweep.csv.
"""

import csv
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any
from urllib.parse import quote

import typer

from node.cli.render import seconds_text, show, show_json, table
from node.cli.signals import StopFlag, Stopped
from node.errors import EXIT_FORCED, CheckFailed, PeerloomError, UsageError
from node.paths import short_path
from sim.command import ExperimentRequest
from sim.report.files import SCENARIO_NAME, SUMMARY_NAME
from sim.scenario import load, to_toml, with_values

SCHEMA = "peerloom.sim.sweep/1"
TABLE_NAME = "sweep.csv"
LOG_NAME = "log.txt"
RUNS_MAX = 10_000
"""Maximum number of runs. A larger sweep is probably a typing error: at a second per run it takes hours."""
_FOLDER_NAME_MAX = 150
_LOOK_SECONDS = 0.05

FIGURES = {
    "entries_right_share": ("entries right %", 100.0, ("membership", "entries_right_share_mean")),
    "crash_dead_seconds_p50": ("dead after s", 1.0, ("membership", "dead_seconds", "p50")),
    "crash_known_to_all_seconds_p95": ("known p95 s", 1.0, ("membership", "known_to_all_seconds", "p95")),
    "false_deaths": ("false deaths", 1.0, ("membership", "false_deaths")),
    "lookups_found_share": ("found %", 100.0, ("dht", "lookups_found_share")),
    "lookup_seconds_p95": ("lookup p95 s", 1.0, ("dht", "lookup_seconds", "p95")),
    "lookup_rounds_mean": ("rounds", 1.0, ("dht", "lookup_rounds_mean")),
    "sent_bytes_per_node_second": ("kB/s a node", 1e-3, ("traffic", "sent_bytes_per_node_second")),
    "steps": ("steps", 1.0, ("runs", "0", "steps")),
    "times_real_time": ("x real time", 1.0, ("times_real_time",)),
}
"""The figures by column name in the file: their heading and scale in the printed table, and their path in a
summary."""

Values = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SweepRun:
    """One experiment of a sweep: the `values` of the swept keys, and the folder of its files."""

    values: Values
    seed: int
    folder: Path
    text: str
    """The scenario with all values. If the folder has the results of any other scenario, they do not
    count."""

    @property
    def name(self) -> str:
        return " ".join((*(f"{key}={value}" for key, value in self.values), f"seed={self.seed}"))

    def summary(self) -> dict[str, Any] | None:
        """Return the run's results; None if it has not ended."""
        try:
            if (self.folder / SCENARIO_NAME).read_text(encoding="utf-8") != self.text:
                return None
            found = json.loads((self.folder / SUMMARY_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        whole = isinstance(found, dict) and found.get("complete") is True and found.get("seed") == self.seed
        return found if whole else None


def sweep(wanted: ExperimentRequest, sweeps: Sequence[str], *, seeds: int, jobs: int) -> None:
    """Run the missing experiments, and show the results of all.

    Raises:
        UsageError: a value, or a combination of values, makes no valid scenario.
        CheckFailed: an invariant broke in some run.
        PeerloomError: some run did not end.
    """
    runs = list(_runs(wanted, sweeps, seeds))
    missing = [run for run in runs if run.summary() is None]
    if not wanted.quiet:
        there = f", {len(runs) - len(missing)} of them done before" if len(missing) < len(runs) else ""
        show([f"{len(runs)} runs{there}; into {short_path(_folder(wanted))}"], sys.stderr)
    stopped = _play_all(wanted, missing, jobs or os.cpu_count() or 1)
    done = [(run, summary) for run in runs if (summary := run.summary()) is not None]
    _tell(wanted, done)
    if stopped:
        show([f"stopped; repeat the command to play the other {len(runs) - len(done)} runs"], sys.stderr)
        raise typer.Exit(EXIT_FORCED)
    _fail(wanted, runs, done)


def _runs(wanted: ExperimentRequest, sweeps: Sequence[str], seeds: int) -> Iterator[SweepRun]:
    axes = [_axis(text) for text in sweeps]
    keys = [key for key, _ in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UsageError(f"--sweep {key} is given twice. Put all its values into one --sweep.")
    count = seeds
    for _, choices in axes:
        count *= len(choices)
    if count > RUNS_MAX:
        raise UsageError(f"--sweep: {count} runs are too many; the maximum is {RUNS_MAX}")
    scenario = with_values(load(wanted.scenario), wanted.values())
    for combination in itertools.product(*(choices for _, choices in axes)):
        values = tuple(zip(keys, combination, strict=True))
        text = to_toml(with_values(scenario, dict(values), source="--sweep"))
        folder = _folder(wanted) / folder_name(values) if values else _folder(wanted)
        for seed in range(wanted.seed, wanted.seed + seeds):
            yield SweepRun(values, seed, folder / f"seed={seed}", text)


def _axis(text: str) -> tuple[str, list[str]]:
    key, _, rest = text.partition("=")
    parts = split_values(rest)
    if not (key.strip() and all(parts)):
        raise UsageError(f"--sweep {text}: expected KEY=A,B,C, such as nodes=100,300,1000")
    if len(set(parts)) < len(parts):
        raise UsageError(f"--sweep {text}: a value is repeated")
    return key.strip(), parts


def split_values(text: str) -> list[str]:
    """Split `1,[2,3],"a,b"` into its three values."""
    parts, depth, quoted = [""], 0, ""
    for letter in text:
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "\"'":
            quoted = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def folder_name(values: Values) -> str:
    """Return a name such as `nodes=300,network.loss=0.05`; other characters of a value are escaped as in a
    URL."""
    name = ",".join(f"{key}={quote(value, safe='.,-+=')}" for key, value in values)
    if len(name) > _FOLDER_NAME_MAX:
        raise UsageError(f"--sweep: {name[:60]}... is too long for the name of a folder")
    return name


def _folder(wanted: ExperimentRequest) -> Path:
    return Path(wanted.out or f"sim-out/{load(wanted.scenario).name}").expanduser()


# Running


def _play_all(wanted: ExperimentRequest, missing: Sequence[SweepRun], jobs: int) -> bool:
    """Run the missing experiments; return whether the user stopped them. Experiments in progress at a stop
    are ended, and are repeated next time."""
    stop = StopFlag()
    waiting = list(reversed(missing))
    running: dict[str, tuple[SweepRun, subprocess.Popen[bytes], IO[bytes], float]] = {}
    began, ended = time.monotonic(), 0

    def end_all() -> None:
        for _, process, _, _ in running.values():
            process.terminate()
        for _, process, log, _ in running.values():
            process.wait()
            log.close()

    with stop.heeded(end_all):
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop()
                    running[run.name] = (run, *_start(wanted, run), time.monotonic())
                stop.pause(_LOOK_SECONDS)
                for name, (run, process, log, since) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[name]
                    log.close()
                    ended += 1
                    if not wanted.quiet:
                        left = (time.monotonic() - began) / ended * (len(missing) - ended)
                        took = time.monotonic() - since
                        show(
                            [_ended_line(run, process.returncode, took, ended, len(missing), left)],
                            sys.stderr,
                        )
        except Stopped:
            return True
        finally:
            end_all()
    return False


def _start(wanted: ExperimentRequest, run: SweepRun) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        log = (run.folder / LOG_NAME).open("wb")
    except OSError as error:
        raise UsageError(f"{run.folder}: {(error.strerror or str(error)).lower()}") from None
    flags = ["--quiet", "--plots" if wanted.plots else "--no-plots"]
    if wanted.events_max is not None:
        flags += ["--events", str(wanted.events_max)]
    words = ["-P", "-m", "sim", *wanted.words(run.values, run.seed), "--out", str(run.folder), *flags]
    # The process imports the same copy of the code, from whatever folder it is started.
    path = os.pathsep.join(
        (str(Path(__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep))
    )
    process = subprocess.Popen(  # noqa: S603 - this program, with words that were checked
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        process_group=0,  # only this process receives Ctrl-C; it stops each of the others once
        env=os.environ | {"PYTHONPATH": path.rstrip(os.pathsep)},
    )
    return process, log


def _ended_line(run: SweepRun, code: int, took: float, ended: int, count: int, left: float) -> str:
    how = {0: "ok", CheckFailed.exit_code: "broken"}.get(code, f"failed with {code}")
    line = f"{ended} of {count}  {run.name}  {how} in {seconds_text(took)}"
    return line + (f"  about {seconds_text(round(left))} left" if ended < count else "")


# Results


def _tell(wanted: ExperimentRequest, done: Sequence[tuple[SweepRun, Mapping[str, Any]]]) -> None:
    points: dict[Values, list[Mapping[str, Any]]] = {}
    for run, summary in done:
        points.setdefault(run.values, []).append(summary)
    spans = {values: _spans(summaries) for values, summaries in points.items()}
    if done:
        _write(_folder(wanted) / TABLE_NAME, spans)
    if wanted.as_json:
        show_json(_document(done, spans))
    elif spans:
        show(_lines(spans, {values: len(summaries) for values, summaries in points.items()}))


Span = tuple[float, float, float]
"""Median, minimum and maximum over the seeds."""


def _spans(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Span]:
    spans = {}
    for name, (_, _, path) in FIGURES.items():
        known = [value for summary in summaries if (value := _at(summary, path)) is not None]
        if known:
            spans[name] = (median(known), min(known), max(known))
    return spans


def _at(summary: Any, path: Sequence[str]) -> float | None:
    for key in path:
        if isinstance(summary, list):
            summary = summary[int(key)] if int(key) < len(summary) else None
        elif isinstance(summary, Mapping):
            summary = summary.get(key)
    return float(summary) if isinstance(summary, int | float) else None


def _lines(spans: Mapping[Values, Mapping[str, Span]], counts: Mapping[Values, int]) -> list[str]:
    names = [name for name in FIGURES if any(name in figures for figures in spans.values())]
    keys = [key for key, _ in next(iter(spans))]
    header = [*keys, "seeds", *(FIGURES[name][0] for name in names)]
    rows = [
        [
            *(value for _, value in values),
            str(counts[values]),
            *(_cell(figures.get(name), FIGURES[name][1]) for name in names),
        ]
        for values, figures in spans.items()
    ]
    return [*table(header, rows), "each value: the median, with the minimum and maximum over the seeds"]


def _cell(span: Span | None, scale: float) -> str:
    if span is None:
        return "-"
    middle, least, most = (f"{scale * value:.4g}" for value in span)
    return middle if least == most else f"{middle} ({least}-{most})"


def _write(path: Path, spans: Mapping[Values, Mapping[str, Span]]) -> None:
    keys = [key for key, _ in next(iter(spans))]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*keys, "figure", "median", "min", "max"])
        for values, figures in spans.items():
            for name, span in figures.items():
                writer.writerow(
                    [*(value for _, value in values), name, *(f"{figure:.9g}" for figure in span)]
                )


def _document(
    done: Sequence[tuple[SweepRun, Mapping[str, Any]]], spans: Mapping[Values, Mapping[str, Span]]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "runs": [
            {
                "values": dict(run.values),
                "seed": run.seed,
                "folder": str(run.folder),
                "digest": summary["digest"],
                "broken": summary["broken"],
            }
            for run, summary in done
        ],
        "points": [
            {
                "values": dict(values),
                "figures": {
                    name: dict(zip(("median", "min", "max"), span, strict=True))
                    for name, span in figures.items()
                },
            }
            for values, figures in spans.items()
        ],
    }


def _fail(
    wanted: ExperimentRequest, runs: Sequence[SweepRun], done: Sequence[tuple[SweepRun, Mapping[str, Any]]]
) -> None:
    """Report failures. Raises PeerloomError if there are any."""
    ended = {run.name for run, _ in done}
    lost = [run for run in runs if run.name not in ended]
    for run in lost:
        show([f"failed: {run.name}: {_last_words(run)}"], sys.stderr)
    broken = [(run, summary["broken"]) for run, summary in done if summary["broken"] is not None]
    for run, what in broken:
        at = f"{what['invariant']} at {what['at_seconds']:.3f} s"
        show([f"broken: {run.name}: {at}: {what['what']}", f"  again: {what['repeat']}"], sys.stderr)
    if broken:
        raise CheckFailed(
            f"an invariant broke in {len(broken)} of {len(runs)} runs",
            wanted.command(broken[0][0].values, broken[0][0].seed),
        )
    if lost:
        raise PeerloomError(f"{len(lost)} of {len(runs)} runs failed", f"look: {lost[0].folder / LOG_NAME}")


def _last_words(run: SweepRun) -> str:
    try:
        lines = (run.folder / LOG_NAME).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "it never began"
    return next((line for line in lines if line.startswith("error:")), "it said nothing")
