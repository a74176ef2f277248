"""`peerloom sim replay FILE...`: replays recorded nodes and reports where they diverge.

The exit code is 0 if every call of a core came out as recorded, 6 if one did not, and 2 if a file is not a
record or was changed.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.options import AsJson
from node.cli.render import show, show_json
from node.errors import CheckFailed, UsageError
from node.paths import short_path
from sim.replay.player import Played, play

NAME = "replay"
TIMES_MAX = 10_000

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help=("Records, played one after the other."))
    ],
    times: Annotated[
        int,
        typer.Option(
            "--times", metavar="N", min=1, max=TIMES_MAX, help=("Play each record this many times.")
        ),
    ] = 1,
    events: Annotated[
        bool, typer.Option("--events", help="Show the events that the nodes reported, by time.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Replay what a node started with --record FILE wrote: the same cores, in virtual time."""
    rows = [row for name in files for row in _play(Path(name).expanduser(), times)]
    if as_json:
        show_json({"schema": "peerloom.replay/1", "records": [_document(*row) for row in rows]})
    else:
        show([*(_timeline(rows) if events else ()), *(_line(*row) for row in rows)])
    damaged = next((f"{short_path(path)}: {each.damage}" for path, each, _ in rows if each.damage), None)
    if damaged is not None:
        raise UsageError(damaged, "a record is readable only up to the place where it was cut off or changed")
    wrong = next((f"{short_path(path)}: {each.diverged}" for path, each, _ in rows if each.diverged), None)
    if wrong is not None:
        raise CheckFailed(f"the replay differs from the record: {wrong}")


Row = tuple[Path, Played, float]


def _play(path: Path, times: int) -> list[Row]:
    rows = []
    for _ in range(times):
        began = time.perf_counter()
        try:
            played = play(path)
        except OSError as error:
            raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
        rows.append((path, played, time.perf_counter() - began))
    return rows


def _line(path: Path, played: Played, seconds: float) -> str:
    name = played.about.get("name") or short_path(path)
    turns = played.turns.total()
    said = "as recorded" if played.is_same else "NOT as recorded"
    end = f"; the record ends: {played.over}" if played.over else "; the record has no end entry"
    return (
        f"{name}: {turns} turns of {len(played.turns)} kinds of cores, {played.learnt} events of theirs and "
        f"{len(played.events)} for people, {said}: {played.seconds:.1f} s in {seconds:.1f} s{end}"
    )


def _timeline(rows: Sequence[Row]) -> list[str]:
    """Return the events for people from all records, ordered by the times of their nodes."""
    first = {path: played for path, played, _ in rows}
    lines = [
        (float(event.get("at_seconds", 0.0)), f"{played.about.get('name', path)}  {_text(event)}")
        for path, played in first.items()
        for event in played.events
    ]
    return [
        f"{time.strftime('%H:%M:%S', time.gmtime(at))}.{int(at % 1 * 1000):03d}  {text}"
        for at, text in sorted(lines)
    ]


def _text(event: dict[str, Any]) -> str:
    hidden = ("kind", "at", "at_seconds")
    found = [(key, value) for key, value in event.items() if key not in hidden and value not in ("", None)]
    shown = [f"{key}={str(value)[:60]}" for key, value in found]
    return f"{event.get('kind')} {' '.join(shown[:6])}"


def _document(path: Path, played: Played, seconds: float) -> dict[str, Any]:
    return {
        "file": str(path),
        "node": played.about,
        "is_same": played.is_same,
        "diverged": played.diverged,
        "damage": played.damage,
        "turns": dict(sorted(played.turns.items())),
        "events_of_cores": played.learnt,
        "events_for_people": len(played.events),
        "derived_from_cores": played.derived,
        "recorded_seconds": played.seconds,
        "seconds": seconds,
        "over": played.over,
    }
