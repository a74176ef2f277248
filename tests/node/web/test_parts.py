"""The pure parts of the page: the history, the curves of runs, what-if predictions, and the static files."""

import re
import tomllib
from hashlib import sha256
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import events
from node.config import resolve
from node.history import EventHistory
from node.invocation import program
from node.quantities import read_memory
from node.state import State, apply
from node.web import charts, limits, whatif
from node.web.assets import FOLDER, Assets
from node.web.views import peer_key
from tests.node.web.world import STARTED, joined, peer, run_events, started

RUN = "ab" * 8
SCRIPT_BYTES_MAX = 116_000
"""Maximum size of all scripts: what a slow link loads within a second. The libraries take 64 kB, and each
view some kilobytes."""


def state_of(*happened: events.Event) -> State:
    state = State()
    for event in happened:
        state = apply(state, event)
    return state


@given(st.integers(1, 20), st.integers(0, 60), st.integers(-5, 80))
def test_a_reader_gets_every_event_after_its_number(kept: int, count: int, after: int) -> None:
    history = EventHistory(kept)
    happened = [events.NodeStopped(at=float(number)) for number in range(1, count + 1)]
    for event in happened:
        history.append(event)
    expected = [(number, event) for number, event in enumerate(happened, 1) if number > count - kept]
    assert history.after(after) == [each for each in expected if each[0] > after]
    assert history.dropped == max(0, count - kept)


def test_a_full_curve_covers_the_whole_run_and_gets_coarser() -> None:
    course = charts.Charts()
    for event in run_events(steps=5 * charts.POINTS_MAX):
        course.take(event)
    kept = course.courses[RUN]
    assert charts.POINTS_MAX / 2 <= len(kept.points) <= charts.POINTS_MAX + 1
    assert kept.points[0][0] == 0
    assert (kept.points[-1][0] or 0) >= 5 * charts.POINTS_MAX - kept.stride
    steps = [point[0] or 0 for point in kept.points]
    assert {later - earlier for earlier, later in pairwise(steps)} == {kept.stride}


def test_the_numbers_of_runs_and_marks_are_bounded() -> None:
    course = charts.Charts()
    for number in range(charts.RUNS_MAX + 10):
        run = f"{number:016x}"
        for event in run_events(run, steps=0):
            course.take(event)
    for number in range(charts.MARKS_MAX + 50):
        course.take(events.RunChanged(at=STARTED, run=run, state="degraded", reason=str(number)))
    assert len(course.courses) == charts.RUNS_MAX
    assert len(course.courses[run].marks) == charts.MARKS_MAX


def test_a_newcomer_in_a_later_plan_is_marked_as_a_join() -> None:
    course = charts.Charts()
    for event in run_events():
        course.take(event)
    plan = next(event for event in run_events() if isinstance(event, events.RunPlanned))
    changed = events.RunPlanned(
        **{name: getattr(plan, name) for name in plan.__struct_fields__}
        | {"height": 1, "stages": ((peer(1), peer(7)), (peer(3), peer(4)))}
    )
    _, marks = course.take(changed)
    assert [mark[2] for _, mark in marks] == ["plan", "join"]
    assert peer_key(peer(7)) in marks[1][1][3]


def test_a_death_is_marked_even_after_a_plan_without_the_dead_peer() -> None:
    course = charts.Charts()
    for event in run_events():
        course.take(event)
    plan = next(event for event in run_events() if isinstance(event, events.RunPlanned))
    course.take(msgspec.structs.replace(plan, height=1, stages=((peer(2),), (peer(3), peer(4)))))
    _, marks = course.take(events.MemberLost(at=STARTED + 20, peer=peer(1), reason="no ack"))
    assert [(run, mark[2]) for run, mark in marks] == [(RUN, "death")]


def test_the_page_writes_commands_in_the_form_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PEERLOOM_PROGRAM", "'/a \"b/bin/peerloom'")
    program.cache_clear()
    try:
        page = Assets().serve("index.html", None).body.decode()
    finally:
        program.cache_clear()
    assert 'data-program="&#x27;/a &quot;b/bin/peerloom&#x27;" data-elsewhere="peerloom"' in page
    assert "<code>&#x27;/a &quot;b/bin/peerloom&#x27; status</code>" in page


def test_the_slowest_stage_takes_twice_as_long_without_one_replica() -> None:
    state = state_of(started(), *(joined(number) for number in range(1, 5)), *run_events())
    view = state.runs[RUN]
    slower = whatif.document(state, view, {peer_key(peer(1))})
    assert slower["is_feasible"]
    assert slower["predicted_seconds"] == 2 * slower["step_seconds"]
    same = whatif.document(state, view, {peer_key(peer(3))})
    assert same["predicted_seconds"] == same["step_seconds"]


def test_a_run_that_lost_a_whole_stage_needs_a_spare() -> None:
    happened = [started(), *(joined(number) for number in range(1, 5)), *run_events()]
    both = {peer_key(peer(1)), peer_key(peer(2))}
    state = state_of(*happened)
    nobody = whatif.document(state, state.runs[RUN], both)
    assert not nobody["is_feasible"]
    assert "no other member" in nobody["text"]
    state = state_of(*happened, joined(9))
    assert "1 spare" in whatif.document(state, state.runs[RUN], both)["text"]


def test_vendored_files_equal_the_published_ones() -> None:
    folder = FOLDER / "vendor"
    files = tomllib.loads((folder / "vendored.toml").read_text())["file"]
    named = {"vendored.toml"}
    for file in files:
        named |= {file["name"], *file["license_files"]}
        assert sha256((folder / file["name"]).read_bytes()).hexdigest() == file["sha256"]
    assert {path.name for path in folder.iterdir()} == named


def test_all_scripts_together_stay_small() -> None:
    assert 0 < Assets().script_bytes <= SCRIPT_BYTES_MAX


def test_the_page_loads_nothing_from_other_servers() -> None:
    wrong = []
    for path in [*FOLDER.glob("*.js"), *FOLDER.glob("*.css"), *FOLDER.glob("*.html")]:
        text = path.read_text()
        wrong += [f"{path.name}: {found}" for found in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text)]
        for name in re.findall(r'(?:from|src=|href=) ?"(/static/[^"]+)"', text):
            assert (FOLDER / name.removeprefix("/static/")).is_file(), (
                f"{path.name} loads {name}, which does not exist"
            )
    assert wrong == []


def test_the_page_shows_limits_as_a_user_writes_them() -> None:
    shown = limits.document(resolve({}, {}))
    assert (shown["disk"], shown["scratch"], shown["upload"], shown["cores"]) == (
        "16GiB",
        "16GiB",
        "any",
        "all",
    )
    given = resolve({"memory": "12GB", "upload": "10Mbit/s"}, {})
    assert (limits.document(given)["memory"], limits.document(given)["upload"]) == ("12GB", "10 Mbit/s")
    assert read_memory(str(given.resources.disk)) == given.resources.disk
