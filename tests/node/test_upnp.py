"""UPnP port mapping with a real router on loopback, and limits against a hostile router."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from node.transport.portmap import LATER_SECONDS, LIFETIME_SECONDS, REFRESH_SECONDS
from node.transport.portmap_driver import PortMappingState
from node.transport.upnp import (
    DESCRIPTION_BYTES_MAX,
    ELEMENTS_MAX,
    SERVICES,
    UpnpFault,
    answer,
    control_point,
    location,
)
from node.transport.upnp_driver import ANSWERS_MAX, UpnpMapper
from tests.lab.upnp_router import UpnpRouter

NOW = 1_000.0
HOST, EXTERNAL, PORT = "127.0.0.1", "45.1.0.2", 9747


class Clock:
    """A clock that stands still unless it is set."""

    now = NOW

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return NOW


@pytest.fixture
def router() -> Iterator[UpnpRouter]:
    with UpnpRouter(HOST, EXTERNAL) as made:
        yield made


def mapper(router: UpnpRouter, port: int = PORT) -> UpnpMapper:
    return UpnpMapper(HOST, HOST, port, Clock(), ssdp_port=router.ssdp_port)


def asked(router: UpnpRouter, times: int = 1) -> UpnpMapper:
    made = mapper(router)
    for _ in range(times):
        trio.run(made.act)
    return made


def state(made: UpnpMapper) -> PortMappingState:
    return PortMappingState(HOST, made.outcome, made.mapping, made.reason)


def test_a_router_renews_and_removes_a_port_mapping(router: UpnpRouter) -> None:
    made = asked(router, 2)
    assert router.granted == {
        (transport, PORT): (HOST, PORT, LIFETIME_SECONDS) for transport in ("tcp", "udp")
    }
    assert state(made).text == f"{HOST} maps {EXTERNAL}:{PORT} to this node (UPNP)"
    assert str(state(made).address) == f"/ip4/{EXTERNAL}/tcp/{PORT}"
    assert made.deadline <= NOW + REFRESH_SECONDS
    trio.run(made.end)
    assert not router.granted


def test_if_another_machine_has_a_port_the_next_is_mapped(router: UpnpRouter) -> None:
    router.taken = {("tcp", PORT), ("udp", PORT + 1)}
    made = asked(router)
    assert made.mapping is not None
    assert (made.mapping.port, made.mapping.has_udp) == (PORT + 1, False)
    trio.run(made.end)
    assert not router.granted


def test_a_router_with_only_permanent_leases_is_asked_for_those(router: UpnpRouter) -> None:
    router.permanent_only = True
    assert asked(router).outcome == "mapped"
    assert {seconds for _, _, seconds in router.granted.values()} == {0}


def test_a_refusal_is_reported_and_retried_later(router: UpnpRouter) -> None:
    router.refuses = True
    made = asked(router)
    assert state(made).text == f"{HOST} maps no port: not authorised"
    assert made.deadline > NOW + LATER_SECONDS / 2
    router.refuses = False
    trio.run(made.act)
    assert made.outcome == "mapped"


def asked_by(clock: Clock, router: UpnpRouter) -> UpnpMapper:
    made = UpnpMapper(HOST, HOST, PORT, clock, ssdp_port=router.ssdp_port)
    trio.run(made.act)
    assert made.mapping is not None
    return made


def test_a_failed_refresh_keeps_the_address_while_the_lease_is_valid(router: UpnpRouter) -> None:
    clock = Clock()
    made = asked_by(clock, router)
    router.refuses = True
    while clock.now < NOW + LIFETIME_SECONDS - REFRESH_SECONDS:
        clock.now = made.deadline
        trio.run(made.act)
        assert (made.outcome, made.mapping is not None) == ("mapped", True)
        assert made.deadline == clock.now + REFRESH_SECONDS
    clock.now = made.deadline
    trio.run(made.act)
    assert (made.outcome, made.mapping, made.reason) == ("refused", None, "not authorised")
    assert made.deadline == clock.now + REFRESH_SECONDS
    router.refuses = False
    trio.run(made.act)
    assert made.outcome == "mapped"


def test_a_router_with_a_new_url_after_a_reboot_is_found_again(router: UpnpRouter) -> None:
    clock = Clock()
    made = asked_by(clock, router)
    before, router.control = len(router.calls), "/ctl/new"
    point = made._point
    assert point is not None
    made._point = replace(point, port=1)
    clock.now = made.deadline
    trio.run(made.act)
    assert (made.outcome, len(router.calls) > before, made._point.path) == ("mapped", True, "/ctl/new")
    assert made.deadline == clock.now + REFRESH_SECONDS


@pytest.mark.parametrize("seconds", [REFRESH_SECONDS, 2 * LIFETIME_SECONDS])
def test_a_mapping_is_removed_even_after_a_failed_refresh(router: UpnpRouter, seconds: float) -> None:
    router.permanent_only = True
    clock = Clock()
    made = asked_by(clock, router)
    router.refuses = True
    clock.now += seconds
    trio.run(made.act)
    router.refuses = False
    assert router.granted
    trio.run(made.end)
    assert not router.granted


def test_a_router_behind_a_router_is_shown_but_not_announced(router: UpnpRouter) -> None:
    router.external = "100.64.0.2"
    made = asked(router)
    assert state(made).address is None
    assert "behind another router" in state(made).text


@pytest.mark.parametrize("external", ["", "not-an-address", "::1", "1.2.3.4.5"])
def test_an_invalid_external_address_maps_nothing(router: UpnpRouter, external: str) -> None:
    router.external = external
    assert asked(router).outcome == "refused"
    assert not router.granted


@pytest.fixture
def victim() -> Iterator[tuple[int, list[bytes]]]:
    """Yield a port of another machine, and the bytes that arrived there."""
    came: list[bytes] = []
    with closing(socket.create_server(("127.0.0.2", 0))) as listening:

        def accept() -> None:
            while True:
                try:
                    link, _ = listening.accept()
                except OSError:
                    return
                came.append(b"connected")
                link.close()

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1], came


def found_at(url: str) -> bytes:
    """Return an answer to a search."""
    return f"HTTP/1.1 200 OK\r\nLOCATION: {url}\r\n\r\n".encode()


@pytest.mark.parametrize("how", ["location", "control", "redirect"])
def test_no_other_machine_is_dialled_for_a_router(
    router: UpnpRouter, victim: tuple[int, list[bytes]], how: str
) -> None:
    port, came = victim
    url = f"http://127.0.0.2:{port}/elsewhere"
    setattr(router, how, url)
    if how == "location":
        router.first_answers = (found_at(url),) * ANSWERS_MAX  # as many as the search examines
    assert asked(router).outcome == "refused"
    assert not came


JUNK = (
    b"NOTIFY * HTTP/1.1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nST: upnp:rootdevice\r\n\r\n",
    found_at("http://127.0.0.2:9/x"),
)


def test_a_router_is_found_despite_irrelevant_answers(router: UpnpRouter) -> None:
    router.first_answers = JUNK
    assert asked(router).outcome == "mapped"


def test_a_search_without_a_usable_answer_reports_its_last_reason(router: UpnpRouter) -> None:
    # All descriptions that the search examines are fetched concurrently.
    router.first_answers, router.location = (JUNK * ANSWERS_MAX)[-ANSWERS_MAX:], ""
    made = asked(router)
    assert (made.outcome, made.reason) == ("refused", "it names an address on another machine")


BOMB = b"""<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbbbbbbb"><!ENTITY c "&b;&b;&b;&b;">]>
<a><serviceType>&c;&c;&c;</serviceType></a>"""
HUGE = {
    "long": b"<root>" + b" " * DESCRIPTION_BYTES_MAX + b"</root>",
    "deep": b"<a>" * 1_000 + b"</a>" * 1_000,
    "wide": b"<root>" + b"<a/>" * (ELEMENTS_MAX + 1) + b"</root>",
    "entities": BOMB,
    "none": b"",
    "no xml": b"{}",
    "no service": b"<root><device/></root>",
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_hostile_description_is_refused(router: UpnpRouter, kind: str) -> None:
    router.description = HUGE[kind]
    made = asked(router)
    assert made.outcome == "refused"
    assert made.reason
    assert router.calls == []


def test_a_machine_without_upnp_is_asked_again_later() -> None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as silent:
        silent.bind((HOST, 0))
        made = UpnpMapper(HOST, HOST, PORT, Clock(), ssdp_port=silent.getsockname()[1], search_seconds=0.1)
        trio.run(made.act)
    assert made.outcome == "no answer"
    assert made.deadline > NOW + LATER_SECONDS / 2


def description(control: str, encoding: str = "utf-8", base: str = "") -> bytes:
    return (
        f'<?xml version="1.0" encoding="{encoding}"?><root><URLBase>{base}</URLBase>'
        f"<serviceType>{SERVICES[0]}</serviceType><controlURL>{control}</controlURL></root>"
    ).encode()


ENCODINGS = ["gb2312", "big5", "foo", "hex", "idna", "utf-16", "utf-7", "rot13"]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_document_in_an_unreadable_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(UpnpFault, match="not XML"):
        control_point(description("/\u4e2d", encoding), HOST, 80, "/")


@pytest.mark.parametrize("url", ["http://[", "//[/x", "http://\u2100/", "http://[::1", "http://a:b/"])
def test_an_invalid_url_is_refused(url: str) -> None:
    for document in (description(url), description("/ctl", base=url)):
        with pytest.raises(UpnpFault, match="an address"):
            control_point(document, HOST, 80, "/")


@given(st.binary(max_size=200))
def test_nonsense_from_a_router_raises_only_the_refusal(data: bytes) -> None:
    for read in (
        lambda: location(b"HTTP/1.1 200 OK\r\nLOCATION: http://" + data + b"\r\n", HOST),
        lambda: location(data, HOST),
        lambda: control_point(data, HOST, 80, "/"),
        lambda: control_point(b"<a>" + data + b"</a>", HOST, 80, "/"),
        lambda: answer(500, data),
        lambda: answer(500, b"<errorCode>" + data + b"</errorCode>"),
    ):
        with pytest.raises(UpnpFault):
            read()
