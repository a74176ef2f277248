"""A run in local mode reports its newest averaging round in `runs show` and in its document."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import msgspec

from crypto.identity import peer_text, short_peer
from node import averaging_events
from node.cli.runs import run_lines
from node.state import RunView, State, apply
from node.state_documents import run_document
from tests.test_screens import peer

RUN = "0123456789abcdef"
ONE, OTHER = peer(1), peer(2)
AVERAGED = averaging_events.AveragingEnded(
    at=2.0,
    run=f"run:{RUN}",
    outcome="ok",
    reason="",
    step=40,
    members=3,
    averaged=(ONE, OTHER),
    seconds=1.5,
    sent_bytes=10,
    received_bytes=20,
    rounding=0.01,
)


def began() -> State:
    view = RunView(RUN, "gpt", "text", 90, ONE, "running")
    return replace(State(), runs=MappingProxyType({RUN: view}))


def shown(state: State) -> list[str]:
    return [line for line in run_lines(run_document(state.runs[RUN])) if line.startswith("  last round")]


def test_a_run_shows_its_newest_round_with_peers_and_error() -> None:
    state = began()
    assert run_document(state.runs[RUN])["last_round"] is None
    assert shown(state) == []
    state = apply(state, AVERAGED)
    assert run_document(state.runs[RUN])["last_round"] == {
        "round": 1,
        "step": 40,
        "peers": [peer_text(ONE), peer_text(OTHER)],
        "error": "",
        "rounding": 0.01,
        "aggregate": "mean",
        "liars_max": 0,
        "seconds": 1.5,
    }
    (line,) = shown(state)
    assert line.endswith(f"1, at step 40: averaged with {short_peer(ONE)}, {short_peer(OTHER)}")
    (line,) = shown(apply(state, replace_event(AVERAGED, aggregate="trimmed-mean", liars_max=1)))
    assert line.endswith(f"{short_peer(OTHER)}; trimmed-mean, which survives 1 liars")
    failed = replace_event(AVERAGED, run=f"run:{RUN}:1", outcome="failed", reason="nobody else was ready")
    state = apply(state, failed)
    last = run_document(state.runs[RUN])["last_round"]
    assert (last["round"], last["peers"], last["error"]) == (2, [], "nobody else was ready")
    (line,) = shown(state)
    assert line.endswith("2, at step 40: nothing averaged: nobody else was ready")


def test_rounds_with_other_names_do_not_belong_to_a_run() -> None:
    state = began()
    for name in (RUN, f"step:{RUN}", "run:fedcba9876543210", "run:"):
        state = apply(state, replace_event(AVERAGED, run=name))
    assert run_document(state.runs[RUN])["last_round"] is None


def replace_event(event: averaging_events.AveragingEnded, **changed: Any) -> averaging_events.AveragingEnded:
    averaged = () if changed.get("outcome") == "failed" else event.averaged
    return msgspec.structs.replace(event, averaged=averaged, **changed)
