"""How screens show the paths to other peers."""

import pytest

from node.cli.peers import peers_lines
from node.cli.status import status_lines
from node.state_documents import peers_document, status_document
from tests.test_screens import NOW, state


@pytest.mark.parametrize(
    ("way", "is_relay_known", "rate", "told"),
    [
        ("direct", False, 10**8, ""),
        ("punched", False, None, "spoken to by a punched path"),
        ("punched", False, 12_500_000, "spoken to by a punched path at 100 Mbit/s"),
        ("relayed", True, 1_230_000, "spoken to through RELAY at 9.84 Mbit/s"),
        ("relayed", False, None, "spoken to through ...aaaaaa"),
    ],
)
def test_the_path_to_a_peer_is_shown_with_relay_and_cost(
    way: str, is_relay_known: bool, rate: int | None, told: str
) -> None:
    document = peers_document(state(), NOW)
    first, other = document["peers"][:2]
    relay = other["peer"] if is_relay_known else "1" + "a" * 51
    first["path"] = {
        "way": way,
        "relay": relay if way == "relayed" else None,
        "round_trip_seconds": 0.02,
        "bytes_per_second": rate,
    }
    lines = "\n".join(peers_lines(document))
    assert told.replace("RELAY", other["name"]) in lines
    assert bool(told) == ("spoken to" in lines)


def test_direct_paths_count_as_traffic_and_broken_streams_not_as_refusals() -> None:
    counters = {
        "paths_direct": 1,
        "links_measured": 1,
        "streams_opened": 2,
        "streams_broken": 3,
        "streams_refused_busy": 4,
    }
    lines = status_lines(status_document(state(), NOW, counters))
    assert " ".join(" ".join(lines[-3:]).split()) == (
        "traffic streams opened 2 broken streams broken 3 refused streams refused busy 4"
    )
