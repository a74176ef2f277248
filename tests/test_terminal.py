"""Screens on a terminal: colours, and lines that fit into 80 columns even with real machines' names."""

import errno
import io
import os
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.contact import parse_address
from node import events
from node.cli.checkpoint import checkpoint_lines
from node.cli.peers import peers_lines
from node.cli.receipts import receipts_lines
from node.cli.render import PASTED, WIDTH, error_lines, folded, show
from node.cli.runs import run_lines, runs_lines
from node.cli.screen import EventScreen
from node.cli.serve import service_lines
from node.cli.status import status_lines
from node.commands import _not_fetched
from node.errors import Unreachable, UsageError
from node.planning.screen import plan_lines
from node.state import State, apply
from node.state_documents import event_document, peers_document, status_document
from node.text import fold
from node.transport.handshake import _no_connection
from tests.test_screens import HISTORY, NOW, peer, state

NAMES = {1: "raspberry-pi-4", 2: "workstation-2", 3: "lap", 4: "lab-4"}
ADDRESS = "/ip4/192.168.100.120/tcp/9747"
STAGE = {
    "stage": 1, "first_layer": 0, "last_layer": 11, "seconds": 0.041, "memory_bytes": 9_800_000_000,
    "memory_offered_bytes": 22_100_000_000, "sent_bytes": 2_100_000, "sent_seconds": 0.0172,
}  # fmt: skip
PLAN: Mapping[str, Any] = {
    "stages": [
        STAGE | {"peers": [NAMES[1]]},
        STAGE | {"stage": 2, "first_layer": 12, "last_layer": 23, "peers": ["mbp", *NAMES.values()]},
    ],
    "slowest": {"stage": 2, "waits_for": "link"}, "left_out": [{"peer": "lab-5", "reason": "0.9 GB free"}],
    "help": {"change": "another lab-1", "gain": 0.44}, "what_if": None, "objective": "throughput",
    "goal": None,
    "tokens_per_second": 18_400.0, "samples_per_second": 18.4, "bubble": 0.11, "reasons": ["it is best"],
    "alone": {"peer": "lab-1", "samples_per_second": 9.6}, "step_seconds": 948.0,
    "timeline": [
        {"peer": "lab-4", "start_seconds": 0.0, "end_seconds": 948.0, "microbatch": 3, "direction": "forward"}
    ],
    "utilisation": [{"peer": "lab-4", "share": 1.0}],
}  # fmt: skip
RECEIPT = {
    "run": "0123456789abcdef", "provider": "12D3KooW000001", "requester": "12D3KooW000002",
    "measurer": "12D3KooW000003", "kind": "checkpoint", "size_bytes": 123_400_000, "microbatches": 0,
    "at": "2026-11-28T15:07:40.702Z",
}  # fmt: skip
SERVICE: Mapping[str, Any] = {
    "name": "SmolLM2-135M", "service": "0123456789abcdef", "context": 8_192, "run": "", "replicas": 2,
    "stages": [[{"peer": "12D3KooW000001", "sessions": 1, "tokens_max": 65_536, "tokens": 1_024}]],
    "first_seconds": 0.31, "tokens_per_second": 18.2,
}  # fmt: skip
CHECKPOINT: Mapping[str, Any] = {
    "run": "0123456789abcdef", "model": "simple-cnn", "step": 4_800, "steps": 5_625, "samples": 307_200,
    "size_bytes": 656_000_000, "stages": 2, "stages_here": [1], "copies": 3,
    "created": "2026-11-28T15:07:39.874Z",
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def realistic(event: events.Event) -> events.Event:
    """Return the event with names and addresses as long as those of real machines."""
    if isinstance(event, events.MemberJoined):
        names = {peer(number): name for number, name in NAMES.items()}
        return replace(event, name=names[event.peer], addresses=(ADDRESS,), found_through=NAMES[1])
    if isinstance(event, events.NodeStarted):
        return replace(event, name=NAMES[1], addresses=(ADDRESS,), is_open=True, is_private=True)
    return event


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the status and the peers of a node with such names."""
    folded_state = State()
    for event in map(realistic, HISTORY):
        folded_state = apply(folded_state, event)
    counters = {"datagrams_sent": 73_000, "messages_refused_protocol": 7, "streams_broken": 2}
    return status_document(folded_state, NOW, counters), peers_document(folded_state, NOW)


def tables() -> list[str]:
    """Return the lines of all tables, which are made for 80 columns and are not folded."""
    status, peers = documents()
    names = {row["peer"]: row["name"] for row in peers["peers"]} | {status["peer"]: status["name"]}
    lines = [*peers_lines(peers), *runs_lines(status, names), *checkpoint_lines([CHECKPOINT])]
    lines += receipts_lines({"earned": [RECEIPT], "issued": [RECEIPT], "peers": []})
    return [*lines, *plan_lines(PLAN)[:5], *service_lines(SERVICE, {})]


def test_no_row_of_a_table_is_wider_than_80_columns() -> None:
    assert [line for line in tables() if len(line) > WIDTH] == []


def test_no_line_of_a_screen_is_wider_than_80_columns() -> None:
    screen = EventScreen(seeds=2)
    lines = [line for event in HISTORY for line in screen.lines(event_document(realistic(event)))]
    status, _ = documents()
    lines += [*status_lines(status), *(line for run in status["runs"] for line in run_lines(run))]
    unreachable = Unreachable("unknown", "nobody is known to hold these weights")
    for error in (
        UsageError(
            "run 3b2f7656 was requested by raspberry-pi-4 ...FWoxzj, and only its requester may stop it",
            "leave",
        ),
        _not_fetched("3b2f765609ab8f0a", "", unreachable),
        _not_fetched("3b2f765609ab8f0a", "stopped", unreachable),
    ):
        lines += error_lines(error)
    assert len(lines) > 90
    lines += plan_lines(PLAN, explain=True)
    # A pasted command stays on one line at any width.
    lines = [part for line in lines for part in folded(line, WIDTH) if not line.startswith(PASTED)]
    assert [line for line in lines if len(line) > WIDTH] == []


@given(
    st.lists(st.text("abc:", min_size=1, max_size=12), min_size=1), st.sampled_from(("  ", "  label   ", ""))
)
def test_folding_keeps_all_words_and_the_width(words: list[str], begins: str) -> None:
    line = begins + " ".join(words)
    lines = fold(line, 40)
    assert " ".join(lines).split() == line.split()
    assert all(len(part) <= 40 for part in lines)


def test_folded_text_is_indented_and_commands_stay_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    line = "15:07:40   3 others could not reach this node: it takes none of their stages; `peerloom doctor`"
    show([line, "  do: " + "x " * 60], terminal := Terminal())
    assert terminal.getvalue().splitlines() == [
        "15:07:40   3 others could not reach this node: it takes none of their stages;",
        "           python -m node doctor",
        "  do: " + "x " * 59 + "x",
    ]
    show([line], piped := io.StringIO())
    assert len(piped.getvalue().splitlines()) == 1


def test_a_terminal_gets_colours_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    show(["error: [red]x[/red] \x1b[2J"], coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    show(["error: x \x1b[2J"], plain)
    assert "\x1b[31merror:\x1b[0m" in coloured.getvalue()
    assert "[red]x[/red] ?[2J" in coloured.getvalue()
    assert plain.getvalue() == "error: x ?[2J\n"


def test_a_failed_connection_is_reported_without_pythons_own_text() -> None:
    error = OSError(errno.EHOSTUNREACH, "Error connecting to ('192.168.7.99', 9747): No route to host")
    told = _no_connection(parse_address("192.168.7.99:9747"), error).detail
    assert told == f"192.168.7.99:9747 cannot be reached: {os.strerror(errno.EHOSTUNREACH).lower()}"


def test_status_reports_a_private_swarm() -> None:
    status, _ = documents()
    assert status_lines(status)[0].endswith("swarm default, private")
    assert status_lines(status_document(state(), NOW, {}))[0].endswith("swarm default")


def test_an_unchanged_offer_is_not_reported_again() -> None:
    screen = EventScreen()
    offer = event_document(events.OfferChanged(at=NOW, may_serve=False, reason="on battery"))
    assert [len(screen.lines(offer)) for _ in range(2)] == [1, 0]


def test_a_checkpoint_line_names_no_step_beyond_the_run() -> None:
    screen = EventScreen()
    asked = events.RunAccepted(at=NOW, run="r", model="m", data="digits", steps=15, requester=peer(1))
    screen.lines(event_document(asked))
    kept = events.CheckpointKept(
        at=NOW, run="r", step=0, checkpoint="ab", copies=2, size_bytes=56_100, next_steps=40
    )
    assert screen.lines(event_document(kept))[0].endswith("56.1 kB on 2 peers")
    assert "up to 5 steps" in screen.lines(event_document(replace(kept, next_steps=5)))[0]


def test_missing_remembered_peers_are_reported_only_by_a_lone_node() -> None:
    gone = events.JoinTried(
        at=NOW, address="/ip4/10.0.0.7/tcp/9747", outcome="refused", detail="gone", found_by="memory"
    )
    alone = apply(State(), gone)
    joined = events.MemberJoined(at=NOW, peer=peer(2), name="b", addresses=(), found_through="")
    assert "gone" in "\n".join(status_lines(status_document(alone, NOW, {})))
    assert "gone" not in "\n".join(status_lines(status_document(apply(alone, joined), NOW, {})))
    assert EventScreen().lines(event_document(gone))[0].endswith("gone  (met before)")
