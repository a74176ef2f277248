"""Messages of commands in unusual cases: when they are interrupted, get the wrong file, or lack a reason."""

import re
from pathlib import Path
from typing import Any

import pytest

from node.cli.render import capacity_text, data_text
from node.cli.runs import run_lines
from node.cli.screen import EventScreen
from node.cli.train import unwatched
from node.errors import UsageError
from node.planning.request import graph_of

RUN = "9272200099369bd1"
CAPACITY = {"device": "cpu", "memory_free_bytes": 4e9, "memory_total_bytes": 8e9, "flops_per_second": 0.0}


def test_interrupting_a_watch_names_the_commands_that_resume_it() -> None:
    assert unwatched(RUN, "") == ["stopped watching; the run goes on: `peerloom runs watch 92722000`"]
    assert unwatched(RUN, "my weights") == [
        "stopped watching; the run goes on: `peerloom runs watch 92722000`",
        "  its result, once it is done: `peerloom runs fetch 92722000 --out 'my weights'`",
    ]


def test_an_interrupt_before_a_run_began_does_not_claim_that_it_runs() -> None:
    (said,) = unwatched("", "file")
    assert "before the run began" in said


def test_data_read_from_this_machine_is_named_by_its_file() -> None:
    assert data_text("digits") == "digits"
    assert data_text("b4" * 32) == "data b4b4b4b4"
    assert data_text("b4" * 32, {"source": "tables/iris.csv"}) == "iris.csv"


@pytest.mark.parametrize(("reason", "ending"), [("", "placing"), ("2 are needed", "placing: 2 are needed")])
def test_a_state_without_a_reason_has_no_colon(reason: str, ending: str) -> None:
    event = {"kind": "RunChanged", "at_seconds": 0.0, "run": RUN, "state": "placing", "reason": reason}
    (line,) = EventScreen().lines(event)
    assert line.endswith(f"run 92722000 {ending}")


@pytest.mark.parametrize(("cores", "said"), [(1, "1 core,"), (2, "2 cores,")])
def test_cores_are_written_in_singular_and_plural(cores: int, said: str) -> None:
    assert said in capacity_text({**CAPACITY, "cores": cores, "location": ""})


def test_planning_with_a_run_file_asks_for_its_model() -> None:
    with pytest.raises(UsageError, match=r"examples/digits\.toml: a run, not a model"):
        graph_of("examples/digits.toml")


def test_a_run_file_given_in_place_of_a_model_names_its_model(tmp_path: Path) -> None:
    (tmp_path / "RUN.toml").write_text('model = "my_model.py:build"\n')
    with pytest.raises(UsageError) as caught:
        graph_of(str(tmp_path / "RUN.toml"))
    assert "plan my_model.py:build" in str(caught.value.do)


def test_a_note_on_a_run_is_shown_in_every_state() -> None:
    told = {"kind": "RunChanged", "at_seconds": 0.0, "run": "0123456789abcdef", "state": "running"}
    screen = EventScreen(names={"12D3KooWabcdef": "lab-2"})
    alone = "alone since step 40, without ...abcdef"
    assert screen.lines({**told, "reason": "as planned", "is_note": False}) == []
    (line,) = screen.lines({**told, "reason": alone, "is_note": True})
    assert line.endswith("   run 01234567 running: alone since step 40, without lab-2 ...abcdef")


def test_the_time_of_a_state_is_shown_with_its_reason() -> None:
    run: dict[str, Any] = {
        "run": "0123456789abcdef",
        "model": "gpt",
        "data": "digits",
        "status": "degraded",
        "step": 41,
    }
    run |= {"steps": 100, "loss": None, "accuracy": None, "detail": "", "requester": "12D3KooWabcdef"}
    run |= {"reason": "alone since step 40", "reason_since": "2026-01-01T12:31:07.000Z", "result": ""}
    shown = "\n".join(run_lines({**run, "plan": None, "steps_lost": 0, "microbatches_replayed": 0}))
    assert re.search(r"why           alone since step 40 \(since \d\d:\d\d:\d\d\)", shown)


def test_a_machine_that_sends_less_says_why() -> None:
    told = {"kind": "OfferChanged", "at_seconds": 0.0, "may_serve": True, "reason": "", "unread": []}
    lines = EventScreen().lines({**told, "sends_less": "its link is metered"})
    assert [line[11:] for line in lines] == ["serves others", "sends less now: its link is metered"]
