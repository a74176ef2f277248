"""The HTTP API of models on real sockets: keys, limits, and clients that hang up, are silent, or send
garbage.
"""

import json
import ssl
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.config import resolve
from node.errors import UsageError
from node.web import model_api, quotas
from node.web.keys import KEYS_NAME, KeyRing
from node.web.quotas import QueueFull, RequestQueue
from node.web.settings import WebSettings
from tests.node.web.models_world import ANSWER, NAME, ignore, models
from tests.node.web.world import Served

COMPLETIONS = "/v1/completions"
ASKED: dict[str, Any] = {"model": NAME, "prompt": "hi", "max_tokens": 4}
LONG: dict[str, Any] = {**ASKED, "max_tokens": 4_000}


async def post(page: Served, key: str, body: Any, path: str = COMPLETIONS) -> tuple[int, dict[str, str], Any]:
    """Return (status, headers, document) of one request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, headers, answer = await page.ask(path, method="POST", body=data, authorization=f"Bearer {key}")
    return status, headers, json.loads(answer)


def request(page: Served, key: str, body: Any, path: str = COMPLETIONS) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {page.host}\r\nx-api-key: {key}\r\n"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


async def until(holds: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not holds():  # noqa: ASYNC110 - what the door does sets no event of ours
            await trio.sleep(0.005)


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_key_is_needed_even_on_this_machine(path: str) -> None:
    async with models() as (page, said, key):
        for given_key in ("", "pl-wrong", key[:-1], page.page.token):
            status, headers, document = await post(page, given_key, ASKED, path)
            assert status == 401
            assert headers["x-request-id"]
            assert "keys new" in document["error"]["message"]
        assert not said.wishes
        assert (await page.ask("/health"))[0] == 200
        assert (await page.ask("/v1/models"))[0] == 401


async def test_a_revoked_key_is_refused_and_keys_are_stored_hashed() -> None:
    async with models() as (page, _, key):
        ring = page.page.models.keys
        stored = page.node.seams.storage.read(KEYS_NAME)
        assert key.encode() not in stored
        assert KeyRing(page.node.seams).find({"x-api-key": key}) is not None
        listed: Any = await ring.handlers["keys.list"]({}, ignore)
        assert key not in json.dumps(listed)
        await ring.handlers["keys.revoke"]({"key": listed["keys"][0]["id"]}, ignore)
        assert (await post(page, key, ASKED))[0] == 401
        with pytest.raises(UsageError, match="no key has the name"):
            await ring.handlers["keys.revoke"]({"key": "x"}, ignore)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_ends_when_its_client_hangs_up(is_streamed: bool) -> None:
    async with models(text="bytes", seconds=0.02) as (page, said, key):
        stream = await trio.open_tcp_stream("127.0.0.1", page.port)
        await stream.send_all(request(page, key, {**LONG, "stream": is_streamed}))
        await until(lambda: said.going == 1)
        if is_streamed:
            assert await stream.receive_some(100)
        await stream.aclose()
        await until(lambda: said.going == 0)  # the whole answer would take 80 s


async def test_requests_over_a_keys_limit_wait_and_are_then_refused() -> None:
    async with models(text="bytes", limits=WebSettings(waiting_max=1), seconds=0.01) as (page, said, _):
        made: Any = await page.page.models.keys.handlers["keys.new"]({"in_flight": 1}, ignore)
        key = made["key"]
        streams: list[trio.SocketStream] = []
        queue = page.page.models.queue
        for _ in range(2):
            streams.append(await trio.open_tcp_stream("127.0.0.1", page.port))
            await streams[-1].send_all(request(page, key, LONG))
            await until(lambda: queue.going + queue.waiting == len(streams))
        status, headers, document = await post(page, key, ASKED)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert document["error"]["type"] == "rate_limit_error"
        assert len(said.wishes) == 1
        await streams[0].aclose()
        await until(lambda: len(said.wishes) == 2)
        await streams[1].aclose()
        await until(lambda: not queue.going and not queue.waiting)


def test_waiting_requests_of_different_keys_are_served_in_turn() -> None:
    queue = RequestQueue(WebSettings().waiting_max, total_max=1)
    first = queue.enter(0, "a")
    waiting = [queue.enter(0, key) for key in "aaabb"]
    order = []
    turn = first
    for now in range(1, 6):
        (turn,) = queue.leave(now, turn)
        order.append(turn.key)
    assert order == ["a", "b", "a", "b", "a"]
    assert queue.leave(9, turn) == []
    assert (queue.going, queue.waiting) == (0, 0)
    assert all(each.at is not None for each in waiting)


def test_a_full_queue_says_when_to_retry() -> None:
    queue = RequestQueue(WebSettings().waiting_max)
    for _ in range(WebSettings().waiting_max + 1):
        queue.enter(0, "a", 1)
    with pytest.raises(QueueFull) as full:
        queue.enter(0, "a", 1)
    assert 1 <= full.value.seconds <= quotas.RETRY_SECONDS_MAX
    assert queue.enter(0, "b", 1).at == 0


async def test_a_long_body_is_read_with_a_key_up_to_its_limit() -> None:
    async with models(text="bytes", limits=WebSettings(body_bytes_max=200_000)) as (page, _, key):
        status, _, document = await post(page, key, {**ASKED, "prompt": "x" * 150_000})
        assert (status, document["error"]["code"]) == (400, "context_length_exceeded")
        status, _, document = await post(page, key, {**ASKED, "prompt": "x" * 250_000})
        assert (status, document["error"]["message"]) == (
            413,
            "the body is too long; at most 200000 bytes are allowed",
        )
        assert (await post(page, "", {**ASKED, "prompt": "x" * 250_000}))[0] == 401


WORDS = st.sampled_from(
    ["model", "prompt", "messages", "input", "role", "content", "user", NAME, "stream", "n", "tools", "stop",
     "type", "max_tokens", "temperature", "logit_bias", "text", "seed"]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)
BODIES = st.binary(max_size=60) | st.dictionaries(WORDS, VALUES, max_size=8).map(
    lambda found: json.dumps({"model": NAME, "max_tokens": 2, **found}).encode()
)
PATHS = st.sampled_from([*model_api.FORMS, model_api.COUNT_PATH, "/v1/models/x", "/v1/none"])


@pytest.mark.parametrize(
    "count",
    [60, pytest.param(1_000, marks=pytest.mark.slow)],
)
def test_malformed_requests_get_a_clear_answer(count: int) -> None:
    """Every answer is either a 200 with the requested content or a 4xx with a reason. No request affects the
    next one.
    """

    @given(st.lists(st.tuples(PATHS, BODIES), min_size=20, max_size=20))
    @settings(
        max_examples=count // 20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example],
        derandomize=True,
    )
    def rubbish(asked: list[tuple[str, bytes]]) -> None:
        async def main() -> None:
            async with models() as (page, said, key):
                for path, body in asked:
                    answer = await page.ask(path, method="POST", body=body, authorization=f"Bearer {key}")
                    assert answer[0] in (200, 400, 404), answer
                    if answer[0] != 200:
                        assert json.loads(answer[2])["error"]["message"]
                assert (await post(page, key, ASKED))[2]["choices"][0]["text"] == ANSWER[:3]
                assert said.going == 0

        trio.run(main)

    rubbish()


async def test_two_hundred_silent_connections_interrupt_no_stream() -> None:
    async with models(text="bytes", seconds=0.005) as (page, _, key), AsyncExitStack() as silent:
        async with trio.open_nursery() as nursery:
            answered: list[int] = []

            async def ask() -> None:
                answered.append((await post(page, key, {**ASKED, "max_tokens": 100}))[0])

            async def is_served() -> bool:
                with suppress(IndexError):  # refused without an answer
                    await ask()
                    return True
                return False

            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked(0.1)  # this one is being answered
            for _ in range(200):
                with suppress(OSError):
                    stream = await trio.open_tcp_stream("127.0.0.1", page.port)
                    silent.push_async_callback(stream.aclose)
            with trio.fail_after(30):
                while not await is_served():  # noqa: ASYNC110 - silent ones make room within a second
                    await trio.sleep(0.05)
        assert answered == [200, 200]


async def test_counting_tokens_waits_in_the_queue_like_an_answer() -> None:
    asked = {"model": NAME, "messages": [{"role": "user", "content": "a"}]}
    async with models() as (page, _, key):
        assert (await post(page, key, asked, "/v1/messages/count_tokens"))[0] == 200
        page.page.models.queue.waiting_max = 0
        assert (await post(page, key, asked, "/v1/messages/count_tokens"))[0] == 429


async def test_a_long_body_is_parsed_like_a_short_one() -> None:
    padded = {**ASKED, "padding": "x" * 200_000}
    async with models(text="bytes") as (page, _, key):
        assert (await post(page, key, padded))[0] == 200
        status, _, document = await post(page, key, {**padded, "temperature": "warm"})
        assert (status, document["error"]["param"]) == (400, "temperature")


async def test_a_client_that_sends_a_body_slowly_is_cut_off() -> None:
    async with models(limits=WebSettings(request_seconds_max=0.2, long_request_seconds_max=0.2)) as (
        page,
        _,
        key,
    ):
        answer = await page.raw(request(page, key, ASKED)[:-5])
        assert b" 408 " in answer.partition(b"\r\n")[0]


def test_keys_never_leave_this_machine_unencrypted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unencrypted") as refused:
        resolve({"web": "0.0.0.0:9748"}, {})
    assert "--web-cert" in (refused.value.do or "")
    assert resolve({"web": "0.0.0.0:9748", "web_proxy": True}, {}).web.is_shared
    assert resolve({"web": "0.0.0.0:9748", "web_cert": str(tmp_path / "x.pem")}, {}).web.is_shared
    assert not resolve({}, {}).web.is_shared
    with pytest.raises(UsageError, match="nothing is served"):
        resolve({"web": "off", "web_proxy": True}, {})


async def test_a_public_server_uses_tls_and_serves_no_page(tmp_path: Path) -> None:
    cert = tmp_path / "cert.pem"
    cert.write_bytes(certificate())
    async with models(web=resolve({"web": "127.0.0.1:0", "web_cert": str(cert)}, {}).web) as (page, _, key):
        opened = page.node.state.page
        assert opened is not None
        assert opened.models.startswith("https://")
        context = ssl.create_default_context(cafile=str(cert))
        port = int(opened.models.rpartition(":")[2])

        async def over_tls(data: bytes) -> bytes:
            plain = await trio.open_tcp_stream("127.0.0.1", port)
            async with trio.SSLStream(
                plain, context, server_hostname="localhost", https_compatible=True
            ) as stream:
                await stream.send_all(data)
                return bytes(await stream.receive_some(4_000))

        assert b" 200 " in await over_tls(request(page, key, ASKED))
        for path in ("/", "/metrics", "/api/view"):
            head = f"GET {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
            shown = f"{head}x-peerloom-token: {page.page.token}\r\n\r\n"
            assert b" 404 " in (await over_tls(shown.encode())).partition(b"\r\n")[0]
        from_page = request(page, key, ASKED).replace(
            b"x-api-key", b"origin: https://evil.example\r\nx-api-key"
        )
        assert b" 403 " in (await over_tls(from_page)).partition(b"\r\n")[0]
        async with await trio.open_tcp_stream("127.0.0.1", port) as plain:
            await plain.send_all(request(page, key, ASKED))
            with suppress(trio.BrokenResourceError):
                assert b"HTTP" not in await plain.receive_some(100)


def certificate() -> bytes:
    """Return a self-signed certificate for localhost, and its key."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form = serialization.PrivateFormat.PKCS8
    return made.public_bytes(pem) + key.private_bytes(pem, form, serialization.NoEncryption())


def test_an_unreadable_certificate_is_an_error_at_the_start(tmp_path: Path) -> None:
    from node.web.page import _tls_of

    with pytest.raises(UsageError, match=r"--web-cert .*no such file"):
        _tls_of(resolve({"web_cert": str(tmp_path / "none.pem")}, {}).web)
