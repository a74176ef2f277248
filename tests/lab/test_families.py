"""Nodes probe IPv4 and IPv6 separately: here they are behind a router with an IPv6 firewall and an IPv4
NAT."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.lab.nat import Site, internet, named
from tests.lab.network import FULL
from tests.lab.nodes import PORT, LabNode, swarm, wait_until

SECONDS_MAX = 120.0
IPV6 = "IPv6: TCP( and UDP)? not translated"
"""If datagrams go over IPv4 alone, nothing is known about UDP over IPv6."""
PATTERNS = {
    "hub": (
        f"TCP and UDP not translated; {IPV6}",
        "IPv4 lets new hosts in, IPv6 lets new hosts in",
    ),
    "hidden": (
        "TCP and UDP translated to a different port for each peer, so peers behind a router need a relay; "
        + IPV6,
        "IPv4 lets in only hosts that this node has contacted, "
        "IPv6 lets in only hosts that this node has contacted",
    ),
}


def router_text(node: LabNode) -> str:
    found = node.status["reachability"]
    return "" if found is None else str(found["nat"])


@pytest.mark.skipif(not FULL, reason="five nodes and a minute: PEERLOOM_LAB=full")
def test_a_node_detects_whether_ipv6_is_behind_a_firewall(tmp_path: Path) -> None:
    public = [Site(name, has_ipv6=True) for name in ("hub", "second", "third", "fourth")]
    with internet([*public, named("firewall6", "hidden")]) as lab, swarm(lab, tmp_path) as nodes:
        nodes["hub"].start()
        nodes["hub"].ready()
        nodes.start(["second", "third", "fourth", "hidden"], "--join", f"{lab.public('hub')}:{PORT}")
        for name in PATTERNS:
            wait_until(
                partial(knows, nodes[name], PATTERNS[name]), SECONDS_MAX, partial(router_text, nodes[name])
            )


def knows(node: LabNode, patterns: tuple[str, ...]) -> bool:
    return all(re.search(pattern, router_text(node)) for pattern in patterns)
