"""A paused run names the machines whose return would end the pause: on screens, in `runs show`, and in
JSON."""

from dataclasses import replace
from types import MappingProxyType

from crypto.identity import peer_text, short_peer
from node import events
from node.cli.runs import run_lines
from node.cli.screen import EventScreen
from node.state import RunView, State, apply
from node.state_documents import event_document, run_document
from partition.plan.quorum import QuorumLost
from partition.run.pauses import stage_missing, votes_missing
from tests.test_screens import peer

RUN = "0123456789abcdef"
KNOWN, UNKNOWN = peer(2), peer(3)
JOINED = events.MemberJoined(at=1.0, peer=KNOWN, name="lab-2", addresses=(), found_through="join")
PAUSED = events.RunChanged(
    at=2.0,
    run=RUN,
    state="paused",
    reason=votes_missing(QuorumLost(0, 1, 2, (KNOWN, UNKNOWN))),
    waits_for=(KNOWN, UNKNOWN),
)


def test_screens_name_the_machines_a_pause_waits_for() -> None:
    screen = EventScreen()
    screen.lines(event_document(JOINED))
    (line,) = screen.lines(event_document(PAUSED))
    assert f"lab-2 {short_peer(KNOWN)}, {short_peer(UNKNOWN)}" in line


def test_runs_show_names_awaited_machines_until_a_pause_ends() -> None:
    view = RunView(RUN, "gpt", "text", 9, KNOWN, "running")
    state = apply(replace(State(), runs=MappingProxyType({RUN: view})), JOINED)
    state = apply(state, PAUSED)
    document = run_document(state.runs[RUN])
    assert document["waits_for"] == [
        {"peer": peer_text(KNOWN), "name": "lab-2"},
        {"peer": peer_text(UNKNOWN), "name": ""},
    ]
    assert any(f"lab-2 {short_peer(KNOWN)}, {short_peer(UNKNOWN)}" in line for line in run_lines(document))
    goes_on = events.RunChanged(at=3.0, run=RUN, state="running", reason="a majority is there again")
    assert run_document(apply(state, goes_on).runs[RUN])["waits_for"] == []


def test_runs_show_names_peers_and_states_its_reasons() -> None:
    planned = events.RunPlanned(
        at=1.0,
        run=RUN,
        plan="cd" * 8,
        height=0,
        trainer=KNOWN,
        planner=KNOWN,
        layers=((0, 3),),
        stages=((KNOWN, UNKNOWN),),
    )
    document = run_document(RunView(RUN, "gpt", "text", 9, KNOWN, "running", plan=planned))
    lines = run_lines(document | {"names": {peer_text(KNOWN): "lab-2"}})
    known, unknown = short_peer(KNOWN), short_peer(UNKNOWN)
    assert f"  asked for by  lab-2 {known}" in lines
    assert f"  stage 1       layers 0-2 on lab-2 {known}, {unknown}" in lines


def test_a_lost_stage_names_its_former_holder() -> None:
    said = stage_missing("stage 2 of 2 has no replica left", (KNOWN, UNKNOWN))
    assert said.endswith(f"; it goes on when {short_peer(KNOWN)} or {short_peer(UNKNOWN)} is back")
    assert stage_missing("nobody of the run is left", ()) == "nobody of the run is left"
