"""The page's HTTP server on real sockets: what it serves and refuses, and that no client crashes it."""

import json
from contextlib import AsyncExitStack, suppress

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.web import door
from node.web.guard import refuse_action, refuse_stranger
from node.web.settings import WebSettings
from tests.node.web.world import Served, Told, joined, run_events, served, started, stream

METRICS = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


def told() -> Told:
    node = Told()
    for event in [started(), *(joined(number) for number in range(1, 5)), *run_events()]:
        node.publish(event)
    return node


@pytest.mark.parametrize("path", ["/", "/run", f"/run/{'ab' * 8}", "/plan", "/models", "/node", "/events"])
async def test_every_view_has_its_own_url(path: str) -> None:
    async with served(told()) as page:
        status, headers, body = await page.ask(path)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert b'id="page"' in body
        assert "default-src 'none'" in headers["content-security-policy"]


async def test_an_unchanged_file_is_not_sent_again() -> None:
    async with served() as page:
        _, headers, _ = await page.ask("/static/app.js")
        status, _, body = await page.ask("/static/app.js", if_none_match=headers["etag"])
        assert (status, body) == (304, b"")


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/static/../page.py", "GET", 404),
        ("/static/%2e%2e/page.py", "GET", 404),
        ("/nothing", "GET", 404),
        ("/api/run/" + "f" * 16, "GET", 404),
        ("/api/events?after=x", "GET", 400),
        ("/%ff", "GET", 400),
        ("/", "DELETE", 405),
        ("/api/view", "POST", 405),
    ],
)
async def test_an_unknown_path_gets_a_clear_status(path: str, method: str, status: int) -> None:
    async with served() as page:
        answered, _, body = await page.ask(path, method=method)
        assert answered == status
        assert "error" in json.loads(body)


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:9748"},
        {"host": "localhost@evil.example"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_other_origins_and_rebound_host_names_are_refused(headers: dict[str, str], method: str) -> None:
    async with served(told()) as page:
        path = "/api/view" if method == "GET" else "/api/actions/stop"
        body = b"" if method == "GET" else b'{"run": "abababababababab"}'
        status, answered, text = await page.ask(
            path,
            method=method,
            body=body,
            content_type="application/json",
            x_peerloom_token=page.page.token,
            **headers,
        )
        assert status in (403, 421)
        assert not [name for name in answered if name.startswith("access-control")]
        assert b"members" not in text
        assert page.node.asked == []


async def test_an_action_needs_the_token_and_acts_like_its_command() -> None:
    async with served(told()) as page:
        body = b'{"run": "abababababababab"}'
        wanted = {"content_type": "application/json", "origin": f"http://{page.host}"}
        for token in ("", "0" * 32, page.page.token[:-1]):
            refused, _, _ = await page.ask(
                "/api/actions/stop", method="POST", body=body, x_peerloom_token=token, **wanted
            )
            assert refused == 401
        assert page.node.asked == []
        done, _, answer = await page.ask(
            "/api/actions/stop", method="POST", body=body, x_peerloom_token=page.page.token, **wanted
        )
        assert (done, json.loads(answer)) == (200, {"result": {"stopped": True}})
        failed, _, answer = await page.ask(
            "/api/actions/stop", method="POST", body=b"{}", x_peerloom_token=page.page.token, **wanted
        )
        assert (failed, json.loads(answer)["error"]) == (409, "run is not known here")


@pytest.mark.parametrize(
    "path", ["/api/view", "/api/stream", "/api/export", "/api/events", "/api/whatif", f"/api/run/{'ab' * 8}"]
)
async def test_views_of_members_and_runs_need_the_token(path: str) -> None:
    async with served(told()) as page:
        for token in ("", "0" * 32):
            status, _, body = await page.ask(path, x_peerloom_token=token)
            assert status == 401
            assert "page" in json.loads(body)["error"]
        by_query = f"{path}?token={page.page.token}"
        assert b" 401 " not in (await first_line(page, by_query, "GET"))


async def first_line(page: Served, path: str, method: str) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", page.port) as connection:
        await connection.send_all(f"{method} {path} HTTP/1.1\r\nhost: {page.host}\r\n\r\n".encode())
        with trio.fail_after(30):
            return bytes(await connection.receive_some(1_000)).partition(b"\r\n")[0]


async def test_a_scraper_on_this_machine_needs_no_token_for_metrics() -> None:
    async with served(told()) as page:
        assert b" 200 " in (await first_line(page, "/metrics", "GET"))


async def test_the_token_survives_a_restart() -> None:
    node = told()
    async with served(node) as page:
        token = page.page.token
        assert node.state.page is not None
        assert node.state.page.link.endswith(f"/#token={token}")
    node.seams.entropy = lambda count: bytes(count)
    async with served(node) as page:
        assert page.page.token == token


async def test_many_streams_and_silent_connections_do_not_lock_the_owner_out() -> None:
    async with served(told()) as page, trio.open_nursery() as nursery:
        held = [await trio.open_tcp_stream("127.0.0.1", page.port) for _ in range(140)]
        for each in held[:40]:
            with suppress(trio.BrokenResourceError):
                await each.send_all(f"GET /api/stream HTTP/1.1\r\nhost: {page.host}\r\n\r\n".encode())
        with trio.fail_after(20):  # idle ones are closed only after 30 s
            while True:
                with suppress(IndexError):  # refused without an answer
                    status, _, _ = await page.ask("/api/view")
                    break
                await trio.sleep(0.05)
        assert status == 200
        async with stream(page) as messages:
            assert (await messages.next())[0] == "reset"
        for each in held:
            nursery.start_soon(each.aclose)


async def test_the_owner_is_served_soon_despite_200_silent_connections() -> None:
    async with served(told()) as page, AsyncExitStack() as silent:
        for _ in range(200):
            silent.push_async_callback((await trio.open_tcp_stream("127.0.0.1", page.port)).aclose)
        answers = 0
        with trio.fail_after(20):  # idle ones are closed only after 30 s
            while answers < 3:
                with suppress(IndexError):  # refused without an answer
                    assert (await page.ask("/api/view"))[0] == 200
                    answers += 1
                await trio.sleep(0.05)
        server = page.page._door
        assert server is not None
        assert len(server._doorway) <= WebSettings().doorway_max
        assert server.turned_away >= 200 - WebSettings().connections_max - WebSettings().doorway_max


async def connected(page: Served, stack: AsyncExitStack) -> trio.SocketStream:
    """Connect one more client. Return once the server has accepted or refused it."""
    server = page.page._door
    assert server is not None

    def count() -> int:
        return len(server._places) + len(server._doorway) + server.turned_away

    seen = count()
    client = await trio.open_tcp_stream("127.0.0.1", page.port)
    stack.push_async_callback(trio.aclose_forcefully, client)
    with trio.fail_after(30):
        while count() == seen:  # noqa: ASYNC110 - the door has no event for it
            await trio.sleep(0.01)
    return client


async def is_answered(page: Served, client: trio.SocketStream) -> bool:
    head = f"GET /api/view HTTP/1.1\r\nhost: {page.host}\r\nx-peerloom-token: {page.page.token}\r\n\r\n"
    await client.send_all(head.encode())
    with trio.fail_after(30):
        return (await client.receive_some(100)).startswith(b"HTTP/1.1 200")


async def test_newcomers_displace_no_recent_connection_at_the_limit() -> None:
    few = WebSettings(connections_max=1, doorway_max=3, doorway_seconds=60, request_seconds_max=30)
    async with served(told(), few) as page, AsyncExitStack() as stack:
        tricklers = [await connected(page, stack) for _ in range(3)]
        honest = await connected(page, stack)
        for _ in range(10):
            for each in tricklers:
                with suppress(trio.BrokenResourceError):
                    await each.send_all(b"G")
            await connected(page, stack)
        assert await is_answered(page, honest)


async def test_the_oldest_connection_is_evicted_after_its_minimum_time() -> None:
    few = WebSettings(connections_max=1, doorway_max=1, doorway_seconds=0, request_seconds_max=30)
    async with served(told(), few) as page, AsyncExitStack() as stack:
        for _ in range(3):
            await connected(page, stack)
        assert await is_answered(page, await connected(page, stack))


async def test_a_crowd_from_one_address_makes_room_for_other_addresses() -> None:
    few = WebSettings(connections_max=1, doorway_max=3, doorway_seconds=60, request_seconds_max=30)
    async with served(told(), few) as page, AsyncExitStack() as stack:
        for _ in range(4):
            await connected(page, stack)
        server = page.page._door
        assert server is not None
        for each in server._doorway:
            each.source = b"crowd"
        assert await is_answered(page, await connected(page, stack))


def test_a_form_is_not_an_action_even_with_the_token() -> None:
    headers = {"content-type": "text/plain", "x-peerloom-token": "secret"}
    refusal = refuse_action(headers, "secret")
    assert refusal is not None
    assert refusal.status == 415


@pytest.mark.parametrize("host", ["127.0.0.1:9748", "localhost", "LOCALHOST:1", "[::1]:80"])
def test_all_names_of_this_machine_are_served(host: str) -> None:
    assert refuse_stranger("GET", "/", {"host": host}) is None


def test_a_link_from_a_different_site_opens_the_page() -> None:
    headers = {"host": "localhost:1", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert refuse_stranger("GET", "/runs", headers) is None
    assert refuse_stranger("GET", "/api/whatif", headers) is not None
    assert refuse_stranger("POST", "/runs", headers) is not None


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01 this is tls\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nx: " + b"a" * 4 * door.HEADER_BYTES_MAX + b"\r\n\r\n", b" 431 "),
        (b"POST /api/actions/stop HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n"
         + b"a" * 99_999, b" 413 "),
        (b"GET / HTTP/1.1\r\n\r\n", b" 400 "),
    ],
)  # fmt: skip
async def test_bytes_that_are_not_a_request_get_a_status(data: bytes, status: bytes) -> None:
    async with served() as page:
        assert status in (await page.raw(data)).partition(b"\r\n")[0]


async def test_one_connection_serves_many_requests() -> None:
    async with served() as page:
        head = f"GET /api/view HTTP/1.1\r\nhost: {page.host}\r\nx-peerloom-token: {page.page.token}\r\n"
        one, last = f"{head}\r\n".encode(), f"{head}connection: close\r\n\r\n".encode()
        assert (await page.raw(one * 4 + last)).count(b"HTTP/1.1 200") == 5


async def test_slow_requests_are_abandoned() -> None:
    async with served(settings=WebSettings(request_seconds_max=0.1)) as page:
        assert b" 408 " in await page.raw(b"GET / HT")


async def test_idle_connections_are_closed_silently() -> None:
    async with served(settings=WebSettings(idle_seconds_max=0.1)) as page:
        assert await page.raw(b"") == b""


async def test_a_silent_connection_makes_room_for_the_next_one() -> None:
    async with (
        served(settings=WebSettings(connections_max=1, doorway_max=0)) as page,
        await trio.open_tcp_stream("127.0.0.1", page.port) as first,
    ):
        await first.send_all(b"GET")
        with trio.fail_after(20):  # idle ones are closed only after 30 s
            while True:
                if await page.raw(METRICS):
                    break
                await trio.sleep(0.05)
        assert await first.receive_some() == b""


async def test_the_newest_connection_beyond_the_limit_is_closed() -> None:
    async with (
        served(settings=WebSettings(connections_max=1, doorway_max=0)) as page,
        await trio.open_tcp_stream("127.0.0.1", page.port) as first,
    ):
        await first.send_all(b"GET")
        assert await page.raw(b"") == b""


PATHS = [b"/", b"*", b"/api/stream", b"/api/events?after=-1", b"//[", b"/%00", b"/api/actions/"]
NAMES = [b"host", b"Host", b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"x"]
VALUES = [b"localhost", b"5", b"-1", b"chunked", b"100-continue", b"websocket"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.builds(
                lambda method, path, fields, body: (
                    b"%s %s HTTP/1.1\r\n" % (method, path)
                    + b"".join(b"%s: %s\r\n" % each for each in fields)
                    + b"\r\n"
                    + body
                ),
                st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"PRI", b"\0"]),
                st.sampled_from(PATHS),
                st.lists(
                    st.tuples(
                        st.sampled_from(NAMES),
                        st.one_of(
                            st.sampled_from(VALUES),
                            st.binary(max_size=20),
                        ),
                    ),
                    max_size=5,
                ),
                st.binary(max_size=50),
            ),
        ),
        min_size=1,
        max_size=8,
    )
)  # fmt: skip
def test_no_input_crashes_the_server(attempts: list[bytes]) -> None:
    async def check() -> None:
        async with served() as page:
            for attempt in attempts:
                with trio.move_on_after(5):
                    async with await trio.open_tcp_stream("127.0.0.1", page.port) as client:
                        try:
                            await client.send_all(attempt)
                            await client.send_eof()
                            answer = bytearray()
                            async for chunk in client:
                                answer += chunk
                        except trio.BrokenResourceError:
                            continue
                        assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
                        assert not answer.startswith(b"HTTP/1.1 500")
            assert (await page.ask("/api/view"))[0] == 200

    trio.run(check)
