"""Nodes behind real NATs reach each other directly exactly if the mappings allow it.

`test_nat.py` shows that a plain dial fails there, and that each router maps and filters as its name says.
"""

import time
from collections.abc import Callable, Collection
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from node.cli.client import ask
from tests.lab.nat import PRESETS, Internet, Site, can_be_direct, internet, named
from tests.lab.network import FULL
from tests.lab.nodes import PORT, LabNode, LabSwarm, swarm, wait_until

SECONDS_MAX = 90.0
MATRIX_SECONDS_MAX = 240.0
DIRECT = ("direct", "punched")


def path(node: LabNode, other: LabNode) -> dict[str, Any]:
    """Return the path that a node reports to another node."""
    rows = {row["name"]: row.get("path") for row in ask(node.data_dir, "peers")["peers"]}
    return rows.get(other.name) or {"way": "none", "datagrams": False}


def start(lab: Internet, nodes: LabSwarm) -> None:
    """Start all nodes; they join through the first."""
    first, *others = nodes.nodes
    nodes.start([first])
    nodes.start(others, JOIN=f"{lab.public(first)}:{PORT}")


def wait_for(nodes: LabSwarm, condition: Callable[[], bool], seconds: float = SECONDS_MAX) -> None:
    """Wait until the condition holds; on failure, show the paths that all nodes report."""

    def told() -> str:
        return "\n".join(
            f"{one.name}-{other.name}: {path(one, other)}"
            for one in nodes.up
            for other in nodes.up
            if one is not other
        )

    wait_until(condition, seconds, told)


@pytest.mark.slow
def test_two_nodes_behind_routers_connect_directly_without_the_relay(tmp_path: Path) -> None:
    sites = [Site("hub"), Site("second"), named("home", "a"), named("home", "b")]
    with internet(sites) as lab, swarm(lab, tmp_path) as nodes:
        start(lab, nodes)
        a, b = nodes["a"], nodes["b"]

        def is_direct(ways: Collection[str] = DIRECT) -> bool:
            paths = path(a, b), path(b, a)
            return all(each["way"] in ways and each["datagrams"] for each in paths)

        wait_for(nodes, lambda: is_direct(["punched"]))
        text = "TCP and UDP translated alike for all peers, so hole punching can work"
        wait_for(nodes, lambda: router_text(a) == text)
        lab.reboot("a")
        wait_for(nodes, lambda: not is_direct())
        # The other router still lets in packets from this address, so a plain dial may succeed first.
        wait_for(nodes, is_direct)
        nodes["hub"].kill()
        nodes["second"].kill()
        wait_for(nodes, lambda: a.members["hub"] not in ("alive", "suspect"))
        assert is_direct()
        assert a.members["b"] == b.members["a"] == "alive"


@pytest.mark.slow
def test_one_public_node_is_enough_to_punch_again_through_a_rebooted_router(tmp_path: Path) -> None:
    with (
        internet([Site("hub"), named("home", "a"), named("home", "b")]) as lab,
        swarm(lab, tmp_path) as nodes,
    ):
        start(lab, nodes)
        a, b = nodes["a"], nodes["b"]

        def is_direct() -> bool:
            return all(each["way"] in DIRECT for each in (path(a, b), path(b, a)))

        wait_for(nodes, is_direct)
        for _ in range(2):
            lab.reboot("a", is_strict=True)
            wait_for(nodes, lambda: not is_direct())
            wait_for(nodes, is_direct)


@pytest.mark.slow
def test_two_nodes_without_relays_connect_through_a_peer_that_both_know(tmp_path: Path) -> None:
    with (
        internet([Site("hub"), named("home", "a"), named("home", "b")]) as lab,
        swarm(lab, tmp_path) as nodes,
    ):
        nodes.start(["hub"], RELAY="false")
        nodes.start(["a", "b"], JOIN=f"{lab.public('hub')}:{PORT}", RELAY="false")
        a, b = nodes["a"], nodes["b"]
        wait_for(nodes, lambda: all(each["way"] == "punched" for each in (path(a, b), path(b, a))))
        assert all("circuits_carried" not in node.status["counters"] for node in nodes.up)


def router_text(node: LabNode) -> str:
    found = node.status["reachability"]
    return "" if found is None else str(found["nat"])


@pytest.mark.skipif(not FULL, reason="PEERLOOM_LAB=full plays every pair")
@pytest.mark.parametrize("is_diagonal", [False, True], ids=["unlike", "alike"])
def test_every_pair_gets_a_direct_path_exactly_if_the_mappings_allow_it(
    is_diagonal: bool, tmp_path: Path
) -> None:
    hub, second = Site("hub", has_ipv6=True), Site("second", has_ipv6=True)
    hidden = [named(preset, preset) for preset in PRESETS if preset != "public"]
    pairs = [*combinations([hub, *hidden], 2)]
    if is_diagonal:
        twins = [named(preset, f"{preset}2") for preset in PRESETS if preset != "public"]
        pairs = [(hub, second), *zip(hidden, twins, strict=True)]
        hidden += twins
    with internet([hub, second, *hidden]) as lab, swarm(lab, tmp_path) as nodes:
        start(lab, nodes)
        began = time.monotonic()
        since: dict[tuple[str, str, str], float] = {}

        def is_done() -> bool:
            for one, other in pairs:
                for transport in ("tcp", "udp"):
                    found = ways(nodes, one, other)[transport]
                    if all(found):
                        since.setdefault((one.name, other.name, transport), time.monotonic() - began)
            return len(since) == sum(
                can_be_direct(one, other, transport) for one, other in pairs for transport in ("tcp", "udp")
            )

        failure = ""
        try:
            wait_until(is_done, MATRIX_SECONDS_MAX, lambda: "not all")
        except AssertionError as error:
            failure = str(error)
        print(matrix(pairs, since))  # noqa: T201
        for one, other in pairs:
            for transport in ("tcp", "udp"):
                is_direct = (one.name, other.name, transport) in since
                assert is_direct == can_be_direct(one, other, transport), (one.name, other.name, transport)
        assert not failure


def ways(nodes: LabSwarm, one: Site, other: Site) -> dict[str, tuple[bool, bool]]:
    """Return whether each of two nodes reports a direct path to the other, by transport."""
    ends = nodes[one.name], nodes[other.name]
    paths = path(ends[0], ends[1]), path(ends[1], ends[0])
    return {
        "tcp": (paths[0]["way"] in DIRECT, paths[1]["way"] in DIRECT),
        "udp": (paths[0]["datagrams"], paths[1]["datagrams"]),
    }


def matrix(pairs: list[tuple[Site, Site]], since: dict[tuple[str, str, str], float]) -> str:
    """Return a table of the seconds after which each pair was direct. `-` means never; `!` marks a result
    that contradicts the mappings."""
    rows = [f"{'':24}{'tcp':>8}{'udp':>8}"]
    for one, other in pairs:
        cells = []
        for transport in ("tcp", "udp"):
            seconds = since.get((one.name, other.name, transport))
            mark = "" if (seconds is not None) == can_be_direct(one, other, transport) else "!"
            cells.append(mark + ("-" if seconds is None else f"{seconds:.1f} s"))
        rows.append(f"{one.name + ' - ' + other.name:24}{cells[0]:>8}{cells[1]:>8}")
    return "\n".join(rows)
