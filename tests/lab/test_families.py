"""Nodes probe IPv4 and IPv6 each by itself: here behind a router that firewalls IPv6 and translates IPv4."""

from functools import partial
from pathlib import Path

import pytest

from tests.lab.nat import Site, internet, named
from tests.lab.network import FULL
from tests.lab.nodes import PORT, LabNode, swarm, wait_until

SECONDS_MAX = 240.0
"""A peer that has answered is asked anew after a minute, and there are four."""
TEXTS = {
    "hub": (
        "TCP and UDP not translated; IPv6: TCP",
        "IPv4 lets new hosts in, IPv6 lets new hosts in",
    ),
    "hidden": (
        "TCP and UDP translated to another port for each peer: peers behind a router come through relays; "
        "IPv6: TCP",
        "IPv4 lets in only hosts that this node wrote to, IPv6 lets in only hosts that this node wrote to",
    ),
}  # fmt: skip


def router_text(node: LabNode) -> str:
    found = node.status["reachability"]
    return "" if found is None else str(found["nat"])


@pytest.mark.skipif(not FULL, reason="five nodes and a minute: PEERLOOM_LAB=full")
def test_a_firewall_of_ipv6_is_told_from_none(tmp_path: Path) -> None:
    public = [Site(name, has_ipv6=True) for name in ("hub", "second", "third", "fourth")]
    with internet([*public, named("firewall6", "hidden")]) as lab, swarm(lab, tmp_path) as nodes:
        nodes["hub"].start()
        nodes["hub"].ready()
        nodes.start(["second", "third", "fourth", "hidden"], "--join", f"{lab.public('hub')}:{PORT}")
        for name in TEXTS:
            wait_until(
                partial(knows, nodes[name], TEXTS[name]), SECONDS_MAX, partial(router_text, nodes[name])
            )


def knows(node: LabNode, texts: tuple[str, ...]) -> bool:
    return all(text in router_text(node) for text in texts)
