"""The ledger of figures: every benchmark's quick form, compared with the figures of the previous commit.

    make figures            all benchmarks, with nothing else on the machine: half an hour
    make figures QUICK=1    those that would show a slowdown first, in ten minutes

Writes docs/figures.md; the next run compares with its table. A figure that was not measured keeps its row,
with the commit of its measurement. A figure that is worse than before by more than WORSE is marked.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _figures import OPERATORS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "figures.md"
SECONDS_MAX = 180.0
"""Time limit of one benchmark. The quick form takes under 50 s, and three times as long on a busy machine."""
WORSE = 0.15
"""The relative change from which a figure is marked as worse. Smaller changes are noise, because machines are
shared."""
APART = ("cloudmesh", "corpus", "finetune", "headline", "models")
"""Experiments of an hour, each with its own page."""
FIRST = (
    "averaging", "codec", "data_reading", "dht_sockets", "liars", "optimizer_peers", "pipeline", "plan",
    "silence", "simulator", "stage", "transport",
)  # fmt: skip
TITLES = ("benchmark", "figure", "goal", "value", "commit", "before", "ratio", "")
WORDS = {True: "**worse**", False: ""}
MISSED = "goal missed"


@dataclass(frozen=True)
class Figure:
    """One goal of one benchmark. `before` is its value at the previous commit, if it was measured there."""

    benchmark: str
    name: str
    goal: str
    value: float
    commit: str
    before: float | None = None

    @property
    def ratio(self) -> float | None:
        """Return the value relative to the previous one."""
        return self.value / self.before if self.before else None

    @property
    def is_worse(self) -> bool:
        """Return whether the value is worse by more than WORSE, in the direction of its goal."""
        if self.ratio is None:
            return False
        return self.ratio > 1 + WORSE if self.goal.startswith("<") else self.ratio < 1 - WORSE

    @property
    def is_met(self) -> bool:
        operator, bound = self.goal.split()
        return bool(OPERATORS[operator](self.value, float(bound)))


def read_page(text: str) -> list[Figure]:
    """Return the figures of a page that `page` wrote."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    figures = []
    for row in rows:
        if len(row) < len(TITLES) - 1 or row[0] == TITLES[0]:
            continue
        benchmark, name, goal, value, commit, before = row[:6]
        figures.append(
            Figure(benchmark, name, goal, float(value), commit, None if before == "-" else float(before))
        )
    return figures


def page(figures: Iterable[Figure], failures: Mapping[str, str], machine: str) -> str:
    """Return the page: a table that `read_page` reads, and the benchmarks without figures."""
    lines = [
        "# Figures",
        "",
        "Made by `make figures`; do not edit. For each goal of each benchmark's quick form: its value at the",
        f"named commit, its previously measured value, and their ratio; marked if {WORSE:.0%} worse.",
        f"Machine: {machine}. Machines are shared and noisy; `make bench` has the full forms.",
        "",
        "| " + " | ".join(TITLES[:-1]) + " | |",
        "|" + "---|" * len(TITLES),
    ]
    for each in figures:
        marks = [word for word in (WORDS[each.is_worse], "" if each.is_met else MISSED) if word]
        before = "-" if each.before is None else f"{each.before:.4g}"
        ratio = "-" if each.ratio is None else f"{each.ratio:.2f}"
        cells = (each.benchmark, each.name, each.goal, f"{each.value:.4g}", each.commit, before, ratio)
        lines.append("| " + " | ".join((*cells, ", ".join(marks))) + " |")
    if failures:
        lines += ["", "Without a figure:", ""]
        lines += [f"- `{name}`: {reason}" for name, reason in failures.items()]
    return "\n".join(lines) + "\n"


def merged(known: Sequence[Figure], measured: Sequence[Figure]) -> list[Figure]:
    """Return the new figures merged with earlier ones; figures that were not measured now are kept."""
    old = {(each.benchmark, each.name): each for each in known}
    for each in measured:
        found = old.get((each.benchmark, each.name))
        # A figure that is measured again at one commit is still compared with the previous commit.
        before = None if not found else found.before if found.commit == each.commit else found.value
        old[each.benchmark, each.name] = replace(each, before=before)
    ran = {each.benchmark for each in measured}
    now = {(each.benchmark, each.name) for each in measured}
    kept = [each for key, each in old.items() if each.benchmark not in ran or key in now]
    # a stable sort keeps the order of goals within a benchmark
    return sorted(kept, key=lambda each: each.benchmark)


def measure(name: str, commit: str) -> tuple[list[Figure], str, str]:
    """Run a benchmark's quick form; return its figures, its machine, and the reason if there are no
    figures."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--quick", "--json"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX)
        document = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [], "", f"took more than {SECONDS_MAX:.0f} s"
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return [], "", f"exit code {done.returncode}" + (f", {lines[-1]}" if lines else "")
    figures = [
        Figure(name, goal["name"].replace("|", "/"), goal["goal"], goal["value"], commit)
        for goal in document["goals"]
    ]
    return figures, document["machine"], "" if figures else "has no goal"


def names() -> list[str]:
    """Return the benchmarks that have a quick form."""
    found = (path.stem for path in sorted((ROOT / "benchmarks").glob("[a-z]*.py")))
    return [name for name in found if name not in APART]


def main() -> int:
    """Measure and write the page; return 1 if a benchmark yielded nothing or a figure is worse."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--first", action="store_true", help="only those that matter most")
    parser.add_argument("names", nargs="*", help="these benchmarks (all)")
    chosen = parser.parse_args()
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    known = read_page(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else []
    failures: dict[str, str] = {}
    measured: list[Figure] = []
    machine = ""
    for name in chosen.names or (FIRST if chosen.first else names()):
        figures, its, reason = measure(name, commit)
        machine = its or machine
        if reason:
            failures[name] = reason
        measured += figures
        print(f"{name}: {reason or f'{len(figures)} figures'}", flush=True)
    figures = merged(known, measured)
    PAGE.write_text(page(figures, failures, machine), encoding="utf-8")
    worse = [each for each in figures if each.is_worse and each.commit == commit]
    for each in worse:
        print(f"worse: {each.benchmark}, {each.name}: {each.before:.4g} before, now {each.value:.4g}")
    return 1 if failures or worse else 0


if __name__ == "__main__":
    sys.exit(main())
