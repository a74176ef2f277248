"""Requests for a port mapping: a core with a router written from the RFCs, and nodes behind real NATs."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.transport.portmap import (
    LATER_SECONDS,
    LIFETIME_SECONDS,
    REFRESH_SECONDS,
    TRIES_MAX,
    PortMapper,
    PortMapping,
)
from tests.lab.nat import Internet, Site, internet, named, probers
from tests.lab.network import FULL
from tests.lab.nodes import PORT, LabNode, swarm, wait_until
from tests.lab.router import Router

HOST, EXTERNAL = "192.168.1.10", "45.1.0.2"
SECONDS_MAX = 40.0


class RecordingRouter(Router):
    """A router without nftables; `rules` records the changes that it would have made to its map."""

    def __init__(self, protocol: str, external: str) -> None:
        self.rules: list[tuple[str, str, int]] = []
        super().__init__(protocol, external, lambda *told: self.rules.append(told[:3]))


def mapper(now: float = 0.0) -> PortMapper:
    return PortMapper(HOST, PORT, Random(1).randbytes, now)


def talk(core: PortMapper, router: Router, now: float, packets: list[bytes] | None = None) -> None:
    """Carry the core's packets to the router, and the router's answers back."""
    waiting = core.wake(now) if packets is None else packets
    while waiting:
        waiting += core.receive(now, router.answer(waiting.pop(0), HOST))


@pytest.mark.parametrize("protocol", ["pcp", "nat-pmp"])
def test_a_router_is_asked_in_every_protocol_it_may_support(protocol: str) -> None:
    core, router = mapper(), RecordingRouter(protocol, EXTERNAL)
    talk(core, router, 0.0)
    assert core.mapping == PortMapping(EXTERNAL, PORT, True, "pcp" if protocol == "pcp" else "nat-pmp")
    assert core.deadline == REFRESH_SECONDS
    talk(core, router, 0.0, core.end())
    assert not router.granted
    assert router.rules == [(what, kind, PORT) for what in ("add", "delete") for kind in ("tcp", "udp")]


def test_a_silent_router_is_asked_in_each_protocol_and_again_later() -> None:
    core, now, asked = mapper(), 0.0, []
    while core.outcome == "asking":
        asked += [packet[0] for packet in core.wake(core.deadline)[:1]]
        now, deadline = core.deadline, core.deadline
        assert deadline >= now
    assert asked == [2, 0] * (TRIES_MAX // 2)
    assert core.outcome == "no answer"
    assert core.deadline > LATER_SECONDS


def test_a_refusal_is_reported_and_retried_later() -> None:
    core = mapper()
    talk(core, RecordingRouter("refusing", EXTERNAL), 0.0)
    assert (core.outcome, core.reason) == ("refused", "not authorised")
    assert core.deadline == LATER_SECONDS
    talk(core, RecordingRouter("nat-pmp", EXTERNAL), LATER_SECONDS)
    assert core.outcome == "mapped"


def test_a_mapping_is_renewed_within_a_minute_of_a_router_reboot() -> None:
    core = mapper()
    talk(core, RecordingRouter("pcp", EXTERNAL), 0.0)
    after = RecordingRouter("pcp", "45.9.9.9")
    talk(core, after, core.deadline)
    assert len(after.granted) == 2
    assert core.mapping == PortMapping("45.9.9.9", PORT, True, "pcp")


def test_an_unconfirmed_mapping_expires() -> None:
    core = mapper()
    talk(core, RecordingRouter("pcp", EXTERNAL), 0.0)
    for now in count(1):
        core.wake(float(now))
        if core.mapping is None:
            break
    assert now == LIFETIME_SECONDS


def test_if_a_port_is_mapped_for_another_host_the_next_is_used() -> None:
    core, router = mapper(), RecordingRouter("nat-pmp", EXTERNAL)
    router.granted["tcp", "192.168.1.11", PORT] = PORT
    talk(core, router, 0.0)
    assert core.mapping == PortMapping(EXTERNAL, PORT + 1, False, "nat-pmp")


@given(st.lists(st.binary(max_size=80)))
def test_nonsense_answers_change_nothing(packets: list[bytes]) -> None:
    core = mapper()
    core.wake(0.0)
    for packet in packets:
        core.receive(0.1, b"\x02\x81" + packet)
        core.receive(0.1, b"\x00\x82\x00\x00" + packet)
    assert core.mapping is None


@pytest.mark.skipif(not FULL, reason="needs four nodes and four routers: set PEERLOOM_LAB=full")
def test_a_node_maps_a_port_and_removes_the_mapping(tmp_path: Path) -> None:
    sites = [Site("public"), named("home", "pmp", "a"), named("home", "pcp", "b"), named("home", "off", "c")]
    sites.append(named("home", "upnp", "d"))
    kinds = {"pmp": "nat-pmp", "pcp": "pcp", "off": "pcp", "upnp": "upnp"}
    with (
        internet(sites) as lab,
        swarm(lab, tmp_path) as nodes,
        probers(lab, "public") as at,
        ExitStack() as ends,
    ):
        for site, kind in kinds.items():
            router = lab.start_router(site, kind)
            ends.callback(router.wait)
            ends.callback(router.kill)
        nodes["c"].start(MAP="false")
        nodes.start(["a", "b", "d"])
        nodes["c"].ready()
        for node, site in ((nodes["a"], "pmp"), (nodes["b"], "pcp"), (nodes["d"], "upnp")):
            there = f"{lab.public(site)}:{PORT}"
            wait_for(node, partial(has_address, there))
            assert at["public"]("connect", port=0, to=(lab.public(site), PORT), greets=False)
            wait_for(
                node, partial(has_text, f"192.168.1.1 maps {there} to this node ({kinds[site].upper()})")
            )
        assert not mapped(lab, "off")
        assert not any(text.startswith("45.") for text in nodes["c"].status["addresses"])
        for node, site in ((nodes["a"], "pmp"), (nodes["b"], "pcp"), (nodes["d"], "upnp")):
            assert mapped(lab, site)
            node.leave()
            assert not mapped(lab, site)


def wait_for(node: LabNode, condition: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until a node's status meets the condition."""
    wait_until(lambda: condition(node.status), SECONDS_MAX, lambda: str(node.status))


def has_address(there: str, document: dict[str, Any]) -> bool:
    return there in document["addresses"]


def has_text(text: str, document: dict[str, Any]) -> bool:
    """Return whether a status reports this mapped port."""
    found = document["reachability"]
    return found is not None and found["mapping"] == text


def mapped(lab: Internet, site: str) -> str:
    """Return the ports that a router forwards to the inside."""
    found = json.loads(lab.in_router(site, "nft -j list map ip nat forwarded"))["nftables"]
    return "".join(str(each["map"].get("elem", "")) for each in found if "map" in each)
