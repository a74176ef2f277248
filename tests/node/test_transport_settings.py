"""Contradictory settings of the transport are refused; each rule is tested separately."""

from dataclasses import replace
from typing import Any

import pytest

from node.services.autonat_core import REACH
from node.services.relays.settings import RELAYS
from node.transport.settings import PATHS, TRANSPORT

CONTRADICTIONS: list[tuple[Any, dict[str, Any], str]] = [
    (TRANSPORT, {"handshake_seconds": 0.0}, "handshake"),
    (TRANSPORT, {"stall_seconds": 0.0}, "stall"),
    (TRANSPORT, {"vanished_seconds": 5.0}, "look_seconds"),
    (TRANSPORT, {"half_open_max": 0}, "half_open_max"),
    (TRANSPORT, {"inbound_per_peer_max": 256}, "inbound_per_peer_max < inbound_per_network_max"),
    (TRANSPORT, {"inbound_max": 255}, "inbound_per_peer_max < inbound_per_network_max"),
    (TRANSPORT, {"patience_seconds": -1.0}, "patience"),
    (TRANSPORT, {"refusals_max": -1}, "refusals_max"),
    (PATHS, {"ping_seconds": 16.0}, "idle_ping_seconds"),
    (PATHS, {"silent_seconds": 4.0}, "silent, doubted, dead"),
    (PATHS, {"dead_seconds": 2.5}, "silent, doubted, dead"),
    (PATHS, {"watch_seconds": 2.5}, "watch_seconds above 0"),
    (PATHS, {"late_seconds": 0.5}, "below late_seconds"),
    (PATHS, {"per_peer_max": 513}, "per_peer_max"),
    (PATHS, {"per_relay_max": 513}, "per_relay_max"),
    (RELAYS, {"lost_seconds": 61.0}, "lost_seconds"),
    (RELAYS, {"publish_look_seconds": 1_201.0}, "publish_look_seconds"),
    (RELAYS, {"look_seconds": 16.0}, "look_seconds"),
    (RELAYS, {"search_seconds_max": 14.0}, "search_seconds_max"),
    (REACH, {"soon_seconds": 301.0}, "soon"),
    (REACH, {"later_seconds": 1_201.0}, "a third of an hour"),
]


@pytest.mark.parametrize(("usual", "changed", "rule"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_settings_that_contradict_each_other_are_refused(
    usual: Any, changed: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ValueError, match=rule):
        replace(usual, **changed)
