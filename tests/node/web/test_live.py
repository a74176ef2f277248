"""Updates for open pages: snapshots, deltas, and the position from which a page resumes."""

import json
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.lowlevel

from crypto.identity import peer_text
from node import events
from node.content.reading import SourceReading, kept_name
from node.web import live, views
from node.web.settings import WebSettings
from tests.node.web.world import STARTED, Told, joined, peer, run_events, served, started, stream

RUN = "ab" * 8


def told(members: int = 4) -> Told:
    node = Told()
    for event in [started(), *(joined(number) for number in range(1, members + 1)), *run_events()]:
        node.publish(event)
    return node


async def test_a_page_starts_with_a_snapshot_and_continues_with_deltas() -> None:
    async with served(told()) as page, stream(page) as messages:
        kind, _, whole = await messages.next()
        assert kind == "reset"
        assert [row[1] for row in whole["members"]] == ["n1", "n2", "n3", "n4"]
        assert whole["runs"][0]["step"] == 3
        page.node.publish(events.MemberSuspected(at=STARTED, peer=peer(2), by=peer(3)))
        page.node.publish(events.MemberLost(at=STARTED, peer=peer(2), reason="no ack for 1.2 s"))
        kind, _, delta = await messages.next()
        assert kind == "delta"
        (row,) = delta["members"]
        member = dict(zip(whole["member_columns"], row, strict=True))
        assert (member["name"], member["status"], member["reason"]) == ("n2", "dead", "no ack for 1.2 s")
        assert member["noticed_by"] == views.peer_key(peer(3))


async def test_a_death_in_a_run_is_marked_on_its_curve() -> None:
    async with served(told()) as page, stream(page) as messages:
        await messages.next()
        page.node.publish(events.MemberLost(at=STARTED + 20, peer=peer(2), reason="no ack"))
        (mark,) = (await messages.until("marks"))["marks"][RUN]
        assert mark == [STARTED + 20, 3, "death", f"{views.peer_key(peer(2))}: no ack"]
        course = (await page.json(f"/api/run/{RUN}"))["course"]
        assert mark in course["marks"]
        assert [point[2] for point in course["points"]] == [2.3, 1.15, pytest.approx(2.3 / 3)]


async def test_a_run_is_shown_with_how_its_data_was_read() -> None:
    node = told()
    async with served(node) as page:
        assert (await page.json(f"/api/run/{RUN}"))["reading"] == []
        reading = SourceReading(
            "d.csv", "csv, separator ';'", "'kind', by the key `label`", words=["1_1", "11"]
        )
        node.seams.storage.write(kept_name(RUN), msgspec.json.encode(reading))
        lines = (await page.json(f"/api/run/{RUN}"))["reading"]
        assert "data      d.csv: csv, separator ';'" in lines
        assert "label     'kind', by the key `label`" in lines


async def test_a_page_that_lost_its_connection_resumes_where_it_was() -> None:
    async with served(told()) as page, stream(page):
        async with stream(page) as messages:
            _, seen, _ = await messages.next()
        page.node.publish(joined(9))
        async with stream(page, seen) as messages:
            kind, _, delta = await messages.next()
            assert kind == "delta"
            assert [row[1] for row in delta["members"]] == ["n9"]


@pytest.mark.parametrize("last", ["another-life.1", "x", ".", "0" * 999, "\xff.1"])
async def test_a_page_from_before_a_restart_starts_again(last: str) -> None:
    async with served(told()) as page, stream(page, last) as messages:
        assert (await messages.next())[0] == "reset"


async def test_a_page_that_fell_behind_starts_again() -> None:
    async with served(told(), WebSettings(deltas_kept_max=2)) as page, stream(page) as watching:
        _, seen, _ = await watching.next()
        for number in range(20, 24):
            page.node.publish(joined(number))
            await watching.until("members")
        async with stream(page, seen) as messages:
            kind, _, whole = await messages.next()
            assert kind == "reset"
            assert len(whole["members"]) == 8


async def test_all_deltas_together_give_the_whole_state() -> None:
    async with served(told()) as page, stream(page) as messages:
        _, _, whole = await messages.next()
        rows = {row[0]: row for row in whole["members"]}
        for number in range(1, 40):
            page.node.publish(joined(number % 13))
            if number % 5 == 0:
                page.node.publish(events.MemberLeft(at=STARTED + number, peer=peer(number % 13)))
            await trio.lowlevel.checkpoint()
        page.node.publish(joined(99))
        while views.peer_key(peer(99)) not in rows:
            _, _, delta = await messages.next()
            rows |= {row[0]: row for row in delta.get("members", [])}
        expected = (await page.json("/api/view"))["members"]
        assert sorted(rows.values(), key=str) == sorted(expected, key=str)


async def test_no_event_is_encoded_without_an_open_page() -> None:
    async with served(told()) as page:
        deltas = page.page.live
        for number in range(100, 200):
            page.node.publish(joined(number))
            deltas.tick()
        assert not deltas._ring
        assert deltas._snapshot is None


async def test_a_browser_that_reads_nothing_delays_no_other() -> None:
    node = told(200)
    async with served(node) as page, await trio.open_tcp_stream("127.0.0.1", page.port) as asleep:
        await asleep.send_all(f"GET /api/stream HTTP/1.1\r\nhost: {page.host}\r\n\r\n".encode())
        async with stream(page) as messages:
            await messages.next()
            for turn in range(6):
                for number in range(1, 201):
                    node.publish(joined(number, at=STARTED + turn + 1, location=f"place-{turn}"))
                await messages.until("members")
            live_page = page.page.live
            assert live_page._ring_bytes <= live.DELTA_BYTES_KEPT_MAX
            assert (await page.ask("/api/view"))[0] == 200


async def test_a_thousand_peers_fit_into_one_small_snapshot() -> None:
    async with served(told(1_000)) as page:
        _, _, body = await page.ask("/api/view")
        assert len(json.loads(body)["members"]) == 1_000
        assert len(body) <= 200_000


async def test_links_are_shown_only_to_peers_that_were_heard() -> None:
    node = told()
    node.seams.network.heard.add(peer(1))
    node.publish(
        events.JoinTried(at=STARTED, address="x:1", outcome="ok", detail="", peer=peer(1), seconds=0.02)
    )
    async with served(node) as page:
        assert (await page.json("/api/view"))["links"] == {views.peer_key(peer(1)): 0.02}


async def test_members_that_cannot_be_dialled_are_shown_with_their_path() -> None:
    node = told()
    relayed = {"way": "relayed", "relay": peer_text(peer(2)), "bytes_per_second": 1_250_000}
    paths = {peer(1): relayed, peer(2): {"way": "direct", "relay": None, "bytes_per_second": None}}
    node.inbound = SimpleNamespace(path_to=paths.get)
    async with served(node) as page:
        ways = (await page.json("/api/view"))["ways"]
        assert ways == {views.peer_key(peer(1)): "through n2 at 10 Mbit/s"}


async def test_events_are_found_by_number_kind_and_text() -> None:
    async with served(told()) as page:
        found = await page.json("/api/events?kind=MemberJoined&text=N3")
        assert [event["name"] for event in found["events"]] == ["n3"]
        rest = await page.json(f"/api/events?after={found['events'][0]['number']}&count=2")
        assert [event["kind"] for event in rest["events"]] == ["MemberJoined", "RunAccepted"]
        assert rest["last"] == len(page.node.history.after(0))


async def test_an_export_holds_every_event_that_matches() -> None:
    async with served(told(500)) as page:
        _, headers, body = await page.ask("/api/export?kind=MemberJoined")
        assert "attachment" in headers["content-disposition"]
        assert body.count(b'"kind":"MemberJoined"') == 500
