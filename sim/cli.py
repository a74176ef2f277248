"""`peerloom sim`, also started as the module `sim`: plays a scenario and reports its results.

Results go to stdout, messages to stderr. Exit codes are those of `node.errors`: 2 if a flag or a scenario is
wrong, 6 if an invariant broke, 130 if the run was stopped. Sweeps over many runs are in `sim.sweep`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.cli.errors import dispatch
from node.cli.options import AsJson
from node.cli.render import show, show_json, table
from node.cli.signals import StopFlag
from node.errors import EXIT_DONE, EXIT_FORCED, CheckFailed, UsageError
from node.invocation import install_command, simulator
from node.paths import short_path
from sim.command import ExperimentRequest

if TYPE_CHECKING:
    from sim.experiment import ExperimentProgress, InvariantViolation, Result

DEFAULT = "lan"
"""The scenario that is played if none is named: small, calm, and over within seconds."""
SEEDS_MAX = 10_000

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    context: typer.Context,
    scenario: Annotated[
        str, typer.Argument(metavar="[NAME|FILE]", help="A built-in scenario, or a TOML file.")
    ] = DEFAULT,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of all random choices.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, such as network.loss=0.1."),
    ] = None,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Write files and pictures here.")] = "",
    events: Annotated[
        int | None, typer.Option("--events", metavar="N", min=0, help="Maximum lines in events.jsonl.")
    ] = None,
    plots: Annotated[
        bool | None, typer.Option("--plots/--no-plots", help="Draw pictures (PNG); a sweep only if asked to.")
    ] = None,
    list_them: Annotated[bool, typer.Option("--list", help="List the built-in scenarios.")] = False,
    print_it: Annotated[bool, typer.Option("--print", help="Print the scenario's file.")] = False,
    sweep: Annotated[
        list[str] | None, typer.Option("--sweep", metavar="KEY=A,B,C", help="Play with each of these values.")
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            "--seeds", metavar="N", min=1, max=SEEDS_MAX, help=("Play this many seeds, from --seed.")
        ),
    ] = 1,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=0, help="Parallel runs; 0: one per core.")
    ] = 0,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Try a whole swarm in virtual time: play a scenario, check it, measure it."""
    many = bool(sweep) or seeds > 1
    wanted = ExperimentRequest(
        program=context.command_path,
        scenario=scenario,
        settings=tuple(settings or ()),
        seed=seed,
        out=out,
        events_max=events,
        plots=not many if plots is None else plots,
        as_json=as_json,
        quiet=quiet,
    )
    if list_them:
        _list(as_json=as_json)
    elif print_it:
        _print(wanted)
    elif many:
        from sim.sweep import sweep as play_all

        play_all(wanted, tuple(sweep or ()), seeds=seeds, jobs=jobs)
    else:
        _play(wanted)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises nothing."""
    chosen, rest, program = _chosen(arguments, simulator())
    return dispatch(chosen, rest, program)


def _chosen(arguments: Sequence[str], program: str) -> tuple[typer.Typer, list[str], str]:
    """Return the command to run, its arguments and its name. `replay` is a command, not a scenario."""
    if arguments and arguments[0] == "replay":
        from sim.replay.cli import app as replaying

        return replaying, list(arguments[1:]), f"{program} replay"
    return app, list(arguments), program


def call(arguments: Sequence[str], program: str) -> int:
    """Run a command line for a program that contains this one: like `run`, but errors are raised.

    Raises PeerloomError, and typer's usage errors.
    """
    chosen, rest, name = _chosen(arguments, program)
    code = chosen(rest, prog_name=name, standalone_mode=False)
    return code if isinstance(code, int) else EXIT_DONE


def _list(*, as_json: bool) -> None:
    from sim.scenario import BUILT_IN, load

    known = [load(name) for name in BUILT_IN]
    if as_json:
        rows = [
            {"name": each.name, "nodes": each.nodes, "seconds": each.seconds, "about": each.about}
            for each in known
        ]
        show_json({"schema": "peerloom.sim.list/1", "scenarios": rows})
        return
    cells = [(each.name, str(each.nodes), f"{each.seconds:.0f} s", each.about) for each in known]
    show(table(("SCENARIO", "NODES", "TIME", "ABOUT"), cells))


def _print(wanted: ExperimentRequest) -> None:
    """Print a scenario: a built-in one with its comments, or one with changed values as it would be
    played."""
    from sim.scenario import load, text_of, to_toml, with_values

    if wanted.settings:
        text = to_toml(with_values(load(wanted.scenario), wanted.values()))
    else:
        load(wanted.scenario)
        text = text_of(wanted.scenario)
    sys.stdout.write(text)


def _play(wanted: ExperimentRequest) -> None:
    from sim.experiment import run as play
    from sim.report.events_file import EVENTS_MAX
    from sim.report.screen import ProgressScreen
    from sim.scenario import load, with_values

    scenario = with_values(load(wanted.scenario), wanted.values())
    folder = _folder(wanted.out)
    stop = StopFlag()
    screen = None if wanted.quiet else ProgressScreen(sys.stderr, scenario.name)

    def on_progress(progress: "ExperimentProgress") -> None:
        stop.pause()  # raises Stopped, which ends the experiment in order
        if screen is not None:
            screen.update(progress)

    def force() -> None:
        if screen is not None:
            screen.close()

    with stop.heeded(force):
        try:
            result = play(
                scenario,
                seed=wanted.seed,
                folder=folder,
                events_max=EVENTS_MAX if wanted.events_max is None else wanted.events_max,
                progress=on_progress,
                repeat=wanted.command(),
            )
        finally:
            force()
        pictures = draw(folder, result) if folder is not None and wanted.plots else []
    _tell(wanted, folder, result, pictures)


def _tell(wanted: ExperimentRequest, folder: Path | None, result: "Result", pictures: Sequence[str]) -> None:
    """Print the results. Raises CheckFailed if an invariant broke."""
    from sim.report.text import summary_lines

    if wanted.as_json:
        show_json(result.summary)
    else:
        show(summary_lines(result.summary))
    if folder is not None and not wanted.quiet:
        show([f"written to {short_path(folder)}: {', '.join(_written(folder, pictures))}"], sys.stderr)
    if result.broken is not None:
        raise broken_error(result.broken)
    if result.stopped:
        raise typer.Exit(EXIT_FORCED)


def broken_error(broken: "InvariantViolation") -> CheckFailed:
    """Show the last events, and return the error that says what broke and how to repeat it."""
    count = len(broken.lines)
    show([f"the last {count} events before it:", *broken.lines], sys.stderr)
    what = f"{broken.invariant} does not hold at {broken.at_seconds:.3f} s, seed {broken.seed}: {broken.what}"
    return CheckFailed(what, broken.repeat)


def draw(folder: Path, result: "Result") -> list[str]:
    """Draw the pictures and return their names. Without matplotlib, print a message and return no names."""
    try:
        from sim.report.plots import draw_all

        return draw_all(folder, result)
    except ImportError:
        show([f"no pictures: matplotlib is not installed ({install_command('matplotlib')})"], sys.stderr)
        return []


def _written(folder: Path, pictures: Sequence[str]) -> list[str]:
    from sim.report.files import FILE_NAMES

    return [*(name for name in FILE_NAMES if (folder / name).exists()), *pictures]


def _folder(out: str) -> Path | None:
    if not out:
        return None
    folder = Path(out).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None
    return folder
