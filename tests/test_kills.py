"""After SIGKILL to any one process at any point of a run, the run succeeds or fails with a reason, and leaves
nothing behind.

Real processes, a minute a case: PEERLOOM_KILLS=full, as in `make soak`, kills each victim at each point at
which it exists.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kills import Command, Playground, playground
from tests.stack import Model, simple_cnn

pytestmark = pytest.mark.skipif(
    os.environ.get("PEERLOOM_KILLS") != "full", reason="a minute a case: PEERLOOM_KILLS=full"
)
STEPS = 6
POINTS: dict[str, Callable[[Command], bool]] = {
    "submit": lambda _: True,
    "place": lambda command: command.last("RunAccepted") is not None,
    "plan": lambda command: command.last("RunPlanned") is not None,
    "train": lambda command: command.last("StepCommitted") is not None,
    "collect": lambda command: command.last("RunEvaluated") is not None,
}
CASES = [
    ("command", "submit"),
    ("command", "place"),
    ("command", "train"),
    ("command", "collect"),
    ("requester", "submit"),
    ("requester", "place"),
    ("requester", "plan"),
    ("requester", "train"),
    ("requester", "collect"),
    ("provider", "submit"),
    ("provider", "place"),
    ("provider", "train"),
    ("provider", "collect"),
    ("stage", "place"),
    ("stage", "train"),
    ("committer", "plan"),
    ("committer", "train"),
    ("committer", "collect"),
    ("trainer", "plan"),
    ("trainer", "train"),
    ("trainer", "collect"),
]
"""`plan` is the end of placement, when the committer and the trainers are known."""


@pytest.fixture
def captured() -> Model:
    """Start the nodes before the test's time limit begins, because this loads torch."""
    return simple_cnn()


@pytest.mark.parametrize(
    ("victim", "point"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_killed_process_leaves_no_run_slot_process_or_file(
    victim: str, point: str, tmp_path: Path, captured: Model
) -> None:
    with playground(tmp_path, captured.data) as ground:
        command = ground.train(steps=STEPS)
        if point == "submit":
            ground._wait(
                lambda: any(
                    path.name.startswith("peerloom-command-") for path in (tmp_path / "tmp").iterdir()
                ),
                "the command does not begin",
            )
        command.until(POINTS[point])
        kill(ground, command, victim)
        code = command.end()
        if victim != "command":
            said = command.errors
            assert code == 0 or (said and len(said) <= 3), f"code {code}: {said}"
            assert (code == 0) == command.out.exists(), "a file is incomplete"
        outcomes = ground.settle()
        if victim in ("stage", "provider") or (victim, point) in (
            ("command", "train"),
            ("command", "collect"),
        ):
            assert set(outcomes) <= {"done"}, "two others continue"
        ground.assert_clean()


def kill(ground: Playground, command: Command, victim: str) -> None:
    """Send SIGKILL to the process in this role now; the requester's node is the first."""
    plan = command.last("RunPlanned")
    match victim:
        case "command":
            command.process.kill()
        case "requester":
            ground.kill_node("a")
        case "provider":
            ground.kill_node("c")
        case "stage":
            ground.kill_stage()
        case "committer":
            assert plan is not None
            ground.kill_node(ground.name_of(plan["planner"]))
        case "trainer":
            assert plan is not None
            ground.kill_node(ground.name_of(plan["trainers"][-1]))
