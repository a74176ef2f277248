"""`peerloom demo`: a swarm on this machine trains a model, loses a replica, and continues.

This command checks first, cleans up at the end, and writes the results; `node.demo.scenario` runs the demo
itself. It is synchronous and loads neither trio nor torch.
"""

import contextlib
import json
import re
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.options import AsJson
from node.cli.render import seconds_text, show, show_json
from node.cli.signals import StopFlag, Stopped
from node.demo.answer import Answered, SplitAnswer
from node.demo.capture_process import Capturing
from node.demo.processes import NodeEnded, SwarmProcesses
from node.demo.report import Story
from node.demo.scenario import MODEL, PAGE_NODE, STEPS, Play, run_text
from node.demo.screen import DemoScreen
from node.errors import EXIT_FORCED, RunFailed, UsageError
from node.invocation import install_command
from node.paths import short_path

LINGER_SECONDS = 0.2
_OF_A_DEMO = re.compile(rb"# What `[^`]+ demo` trained")
"""The beginning of every run file that a demo writes, by which it is recognized."""
STEPS_MIN, STEPS_MAX = 10, 100_000

RESULT_NAME = "result.json"
PICTURE_NAME = "loss.png"
RUN_NAME = "RUN.toml"
GRAPH_NAME = "model.peerloom"
WEIGHTS_NAME = "model.safetensors"


def demo(
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the results.")] = "demo-out",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the nodes' output, in DIR/logs.")] = False,
    steps: Annotated[int, typer.Option("--steps", min=STEPS_MIN, max=STEPS_MAX, hidden=True)] = STEPS,
    as_json: AsJson = False,
) -> None:
    """Train on five nodes of this machine, kill one, then have a split model answer and kill another."""
    begun = time.monotonic()
    folder = Path(out).expanduser()
    _prepare(folder, steps)
    story = Story(steps)
    try:
        stream = sys.stderr if as_json else sys.stdout
        weights, answered, seconds = _play(story, folder, stream, keep=keep, begun=begun)
    except Stopped:
        _tidy(folder)
        show(["stopped; no node is left running"], sys.stderr)
        raise typer.Exit(EXIT_FORCED) from None
    except NodeEnded as error:
        show([f"  {line}" for line in error.lines], sys.stderr)
        raise
    document = story.result() | {"weights": weights, "answer": answered.document()}
    document["picture"] = _draw(story, folder / PICTURE_NAME)
    document["total_seconds"] = round(seconds, 3)
    (folder / RESULT_NAME).write_text(json.dumps(document, indent=2) + "\n")
    if as_json:
        show_json(document)
    if story.missing is not None:
        raise RunFailed(story.missing, f"look: {short_path(folder / RESULT_NAME)}")
    took = seconds_text(document["total_seconds"])
    show(
        [f"Done in {took}. Next: `peerloom` (this machine),", "  `peerloom sim` (200 simulated)"],
        sys.stderr if as_json else None,
    )


def _prepare(folder: Path, steps: int) -> None:
    """Check the folder and its files before anything starts, and write the run's file. Raises UsageError."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("scikit-learn")
    except PackageNotFoundError:
        raise UsageError(
            "the demo's digits come with scikit-learn, which is not installed",
            install_command("peerloom[demo]"),
        ) from None
    run_file = folder / RUN_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()) and not _is_of_a_demo(run_file):
            raise UsageError(
                f"--out {folder}: it contains files that are not a demo's",
                "choose an empty folder, or a new one",
            )
        for name in (RESULT_NAME, PICTURE_NAME, WEIGHTS_NAME):
            (folder / name).unlink(missing_ok=True)  # a failed demo must not leave an older demo's result
        run_file.write_text(run_text(run_file, steps))
    except OSError as error:
        raise UsageError(f"--out {folder}: {(error.strerror or str(error)).lower()}") from None


def _tidy(folder: Path) -> None:
    """Remove the folder of a demo that was stopped before it had a result."""
    with contextlib.suppress(OSError):
        if [path.name for path in folder.iterdir()] == [RUN_NAME]:
            (folder / RUN_NAME).unlink()
            folder.rmdir()


def _is_of_a_demo(run_file: Path) -> bool:
    return run_file.is_file() and _OF_A_DEMO.match(run_file.read_bytes()) is not None


def _play(
    story: Story, folder: Path, stream: Any, *, keep: bool, begun: float
) -> tuple[dict[str, Any], Answered, float]:
    """Play the demo, and clean up in any case. Return the path of the weights, the answer, and the seconds
    from `begun` to the end.

    Raises:
        Stopped: by Ctrl-C.
        PeerloomError: the demo failed.
    """
    stop, screen = StopFlag(), DemoScreen(stream)
    nodes_folder = Path(tempfile.mkdtemp(prefix="peerloom-demo-"))
    # Not calibrated: the run file gives the number of stages, so calibrating five nodes would only delay the
    # demo.
    swarm = SwarmProcesses(
        nodes_folder, f"demo-{secrets.token_hex(4)}", stop.pause, with_page=PAGE_NODE, calibrate=False
    )
    capturing = Capturing(folder / RUN_NAME, nodes_folder / GRAPH_NAME)

    def force() -> None:
        capturing.close()
        swarm.kill_all()
        shutil.rmtree(nodes_folder, ignore_errors=True)
        screen.close()

    with stop.heeded(force):
        try:
            play = Play(swarm, capturing, screen, story, stop)
            play.start_nodes()
            play.train()
            weights = play.fetch(folder / WEIGHTS_NAME)
            answered = SplitAnswer(swarm, screen, stop.pause).play(weights["fetched_from"])
            if stream.isatty():
                screen.close()
            show([f"    {line}" for line in answered.lines()], stream)
            seconds = time.monotonic() - begun
            if stream.isatty() and play.page:
                _linger(play.page, screen, stop)
            return weights, answered, seconds
        except Stopped:
            screen.close()
            show(["stopping... (Ctrl-C again: immediately)"], sys.stderr)
            raise
        finally:
            screen.close()
            capturing.close()
            swarm.close()
            if keep:
                swarm.keep_logs(folder / "logs")
            shutil.rmtree(nodes_folder, ignore_errors=True)


def _linger(address: str, screen: DemoScreen, stop: StopFlag) -> None:
    """Keep the page open for the person at this terminal, until Ctrl-C."""
    screen.close()
    show([f"The page stays at {address} until Ctrl-C."], sys.stderr)
    with contextlib.suppress(Stopped):
        while True:
            stop.pause(LINGER_SECONDS)


def _draw(story: Story, path: Path) -> str | None:
    """Draw the picture. Return its path, or None if it cannot be drawn here."""
    assert story.victim is not None, "the story has no lost replica"
    from node.demo.loss_plot import draw

    try:
        draw(
            path,
            losses=story.losses,
            seconds=[event["seconds"] for event in story.committed],
            killed_after=story.steps_before_kill,
            victim=story.victim.name,
            title=f"{MODEL} on digits, split over five nodes, one of them killed",
        )
    except ImportError:
        show([f"no picture: matplotlib is not installed ({install_command('matplotlib')})"], sys.stderr)
        return None
    return str(path)
