"""The page's chat over HTTP: access to it, events during an answer, and that nothing is stored."""

import json
from typing import Any

import pytest
import trio

from node.web import chat
from node.web.settings import WebSettings
from node.web.views import peer_key
from tests.node.web.chat_world import SERVICE, chats, question
from tests.node.web.models_world import ANSWER, SAID
from tests.node.web.test_models_door import until
from tests.node.web.world import Served, peer

CHAT = "/api/chat"
JSON = "application/json"


async def told(page: Served, asked: Any) -> list[tuple[str, Any]]:
    """Return (kind, document) of all events of an answer."""
    status, headers, body = await page.ask(
        CHAT, method="POST", body=json.dumps(asked).encode(), content_type=JSON
    )
    assert (status, headers["content-type"]) == (200, "text/event-stream"), body
    lines = [line for line in body.decode().split("\n") if line.startswith(("event: ", "data: "))]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    return [(kind[7:], json.loads(data[6:])) for kind, data in pairs]


def text_of(events: list[tuple[str, Any]]) -> str:
    return "".join(each["text"] for kind, each in events if kind == "piece")


async def test_an_answer_arrives_in_pieces_and_reports_its_figures() -> None:
    async with chats() as (page, said):
        events = await told(page, question(tokens=len(SAID)))
        assert events[0] == ("begin", {"service": SERVICE, "route": [peer_key(peer(1)), peer_key(peer(2))]})
        assert text_of(events) == ANSWER
        kind, end = events[-1]
        assert (kind, end["finish"], end["tokens"]) == ("end", "length", len(SAID))
        assert bytes(said.wishes[0].prompt) == b"user: hi"
        rows = await page.json("/api/services")
        assert rows["services"][0]["layers"] == [[0, 3], [4, None]]
        assert [row["peer"] for row in rows["services"][0]["stages"][1]] == [
            peer_key(peer(2)),
            peer_key(peer(3)),
        ]
        assert (await page.json(f"/api/service-text?service={SERVICE}"))["has_template"]


async def test_a_move_is_reported_before_the_answer_continues() -> None:
    async with chats(moves_after=8, pause_seconds=2 * chat.LOOK_SECONDS) as (page, _):
        events = await told(page, question(tokens=20))
        kinds = [kind for kind, _ in events]
        moved = dict(events)["moved"]
        assert (moved["lost"], moved["reason"]) == ([peer_key(peer(2))], "its stream broke")
        assert moved["route"] == [peer_key(peer(1)), peer_key(peer(3))]
        assert "piece" in kinds[: kinds.index("moved")]
        assert "piece" in kinds[kinds.index("moved") :]


async def test_an_answer_that_fails_shows_the_reason_and_keeps_its_text() -> None:
    async with chats(breaks_after=5) as (page, said):
        events = await told(page, question())
        assert text_of(events) == "Grü"
        assert dict(events)["error"]["error"] == "words: the answer broke off"
        assert events[-1][0] == "end"
        status, _, body = await page.ask(
            CHAT, method="POST", content_type=JSON, body=json.dumps(question("x" * 5_000)).encode()
        )
        assert (status, json.loads(body)["do"]) == (400, "a shorter prompt")
        assert said.going == 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x_peerloom_token": "wrong"}, 401),
        ({"content_type": "text/plain"}, 415),
        ({"origin": "http://evil.example"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
    ],
)
async def test_only_the_owner_of_the_page_is_answered(headers: dict[str, str], status: int) -> None:
    body = json.dumps(question()).encode()
    async with chats() as (page, said):
        fields = {"content_type": JSON, **headers}
        assert (await page.ask(CHAT, method="POST", body=body, **fields))[0] == status
        key: Any = {"x_peerloom_token": "", "x_api_key": "pl-x"}
        assert (await page.ask("/api/services", **key))[0] == 401
        assert not said.wishes


async def test_closing_the_window_ends_its_answer() -> None:
    async with chats(seconds=0.02) as (page, said):
        body = json.dumps(question(tokens=4_000)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {page.host}\r\ncontent-type: {JSON}\r\n"
        head += f"x-peerloom-token: {page.page.token}\r\ncontent-length: {len(body)}\r\n\r\n"
        stream = await trio.open_tcp_stream("127.0.0.1", page.port)
        await stream.send_all(head.encode() + body)
        await until(lambda: said.going == 1)
        assert await stream.receive_some(100)
        await stream.aclose()
        await until(lambda: said.going == 0)  # the whole answer would take 80 s


async def test_events_and_metrics_contain_no_chat_text() -> None:
    async with chats(moves_after=4) as (page, _):
        await told(page, question("the secret of the seventh seal"))
        for path in ("/api/view", "/api/export", "/metrics"):
            _, _, body = await page.ask(path)
            assert b"seventh seal" not in body
            assert ANSWER[:5].encode() not in body


async def test_the_number_of_concurrent_chat_answers_is_limited() -> None:
    async with chats(limits=WebSettings(chats_max=0)) as (page, _):
        status, _, body = await page.ask(
            CHAT, method="POST", body=json.dumps(question()).encode(), content_type=JSON
        )
        assert (status, json.loads(body)["do"]) == (400, "stop one")
        status, _, body = await page.ask(CHAT, method="POST", body=b"[", content_type=JSON)
        assert (status, json.loads(body)["error"]) == (400, "the request needs a service and a question")
