"""What commands say at their edges: stopped half way, given the wrong file, short of a reason."""

import pytest

from node.cli.render import capacity_text
from node.cli.screen import EventScreen
from node.cli.train import unwatched
from node.errors import UsageError
from node.planning.request import graph_of

RUN = "9272200099369bd1"
CAPACITY = {"device": "cpu", "memory_free_bytes": 4e9, "memory_total_bytes": 8e9, "flops_per_second": 0.0}


def test_who_stops_watching_is_told_how_to_watch_again_and_where_the_result_will_be() -> None:
    assert unwatched(RUN, "") == ["stopped watching; the run goes on: `peerloom runs watch 92722000`"]
    assert unwatched(RUN, "my weights") == [
        "stopped watching; the run goes on: `peerloom runs watch 92722000`",
        "  its result, once it is done: `peerloom runs fetch 92722000 --out 'my weights'`",
    ]


def test_who_stops_before_the_run_was_accepted_is_not_told_that_it_goes_on() -> None:
    (said,) = unwatched("", "file")
    assert "before the run began" in said


@pytest.mark.parametrize(("reason", "ending"), [("", "placing"), ("2 are needed", "placing: 2 are needed")])
def test_a_state_without_a_reason_has_no_colon(reason: str, ending: str) -> None:
    event = {"kind": "RunChanged", "at_seconds": 0.0, "run": RUN, "state": "placing", "reason": reason}
    (line,) = EventScreen().lines(event)
    assert line.endswith(f"run 92722000 {ending}")


@pytest.mark.parametrize(("cores", "said"), [(1, "1 core,"), (2, "2 cores,")])
def test_cores_are_counted(cores: int, said: str) -> None:
    assert said in capacity_text({**CAPACITY, "cores": cores, "location": ""})


def test_a_plan_of_a_run_file_asks_for_its_model() -> None:
    with pytest.raises(UsageError, match=r"examples/digits\.toml: a run, not a model"):
        graph_of("examples/digits.toml")
