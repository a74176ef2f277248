"""The cost of the web page for the node: five watchers and a thousand members that come and go, scrapes, and
bad requests.

The node's side is a separate process (`tests.node.web.world`: state and events without a swarm), so its
processor time and memory are those of the page alone; watchers and senders run here. If this machine has a
browser (`tests.browser`), also the time to the first view, the frames per second while panning, and the
browser's memory.
"""

import multiprocessing
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from random import Random
from typing import Any

import psutil
import pytest
import trio
from _figures import Goal, arguments, leave, report

from node.events import MemberLost
from node.web.assets import Assets
from tests.browser import opened
from tests.node.web.world import STARTED, Served, Told, joined, peer, run_events, served, started, stream

MEMBERS = 1_000
WATCHERS = 5
CHANGES_SECONDS = 0.2
"""Interval of changes: five members per second are lost or come back, and a step is committed, as in a lively
swarm with a run."""
SCRIPT_BYTES, VIEW_BYTES = 100_000, 200_000
PAN_SECONDS = 5.0
LEVEL_SECONDS = 300.0


def serve(pipe: Connection) -> None:
    """Run the node's side: send its port, then make events until ended."""
    node = Told()
    steps = run_events(steps=100_000)
    for event in [
        started(),
        *(joined(n, location=f"region-{n % 5}") for n in range(1, MEMBERS + 1)),
        *steps[:50],
    ]:
        node.publish(event)

    async def happen() -> None:
        number = 0
        while True:
            await trio.sleep(CHANGES_SECONDS)
            number += 1
            who = 1 + number % MEMBERS
            node.publish(MemberLost(at=STARTED + number, peer=peer(who), reason="no ack for 6 s"))
            node.publish(
                joined(1 + (number - 20) % MEMBERS, at=STARTED + number, location=f"region-{who % 5}")
            )
            node.publish(steps[50 + number])

    async def main() -> None:
        async with served(node) as page, trio.open_nursery() as nursery:
            nursery.start_soon(happen)
            pipe.send(page.port)

    trio.run(main)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def watch(page: Served, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Return the processor's share with watchers, and with the same events but no watcher."""
    begun = cpu_seconds(process)
    await trio.sleep(seconds)
    alone = (cpu_seconds(process) - begun) / seconds
    told = 0

    async def follow(task_status: trio.TaskStatus[None]) -> None:
        nonlocal told
        async with stream(page) as messages:
            await messages.next()
            task_status.started()
            while True:
                await messages.next()
                told += 1

    async with trio.open_nursery() as nursery:
        for _ in range(WATCHERS):
            await nursery.start(follow)
        begun = cpu_seconds(process)
        for _ in range(max(1, int(seconds / 15))):
            await page.ask("/metrics")
        await trio.sleep(seconds)
        watched = (cpu_seconds(process) - begun) / seconds
        nursery.cancel_scope.cancel()
    deltas = told / seconds / WATCHERS
    return {
        "case": "watchers",
        "alone": round(alone, 4),
        "watched": round(watched, 4),
        "deltas": round(deltas, 1),
    }


async def scrape(page: Served, process: psutil.Process, count: int) -> dict[str, Any]:
    """Return the growth of memory over the scrapes after the first tenth."""
    for _ in range(count // 10):
        await page.ask("/metrics")
    before, begun = process.memory_info().rss, time.perf_counter()
    for _ in range(count):
        await page.ask("/metrics")
    took = (time.perf_counter() - begun) / count
    grown = process.memory_info().rss - before
    return {"case": "scrapes", "count": count, "grown_bytes": grown, "milliseconds": round(1e3 * took, 2)}


async def level(page: Served, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Return the memory of the node's side while five pages are open and it is scraped every second: its
    growth after the first fifth of the time, and its peak after that."""

    async def follow() -> None:
        async with stream(page) as messages:
            while True:
                await messages.next()

    found: list[int] = []
    async with trio.open_nursery() as nursery:
        for _ in range(WATCHERS):
            nursery.start_soon(follow)
        until = trio.current_time() + seconds
        while trio.current_time() < until:
            await page.ask("/metrics")
            found.append(process.memory_info().rss)
            await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    after = found[len(found) // 5 :]
    return {
        "case": "level",
        "seconds": seconds,
        "scrapes": len(found),
        "grown_bytes": after[-1] - after[0],
        "highest_bytes": max(after),
    }


async def attack(page: Served, process: psutil.Process, count: int) -> dict[str, Any]:
    """Send bad requests. Each gets a status or a closed connection, and the next good one is served."""
    rng = Random(7)
    before, statuses = process.memory_info().rss, dict[str, int]()
    limit = trio.CapacityLimiter(32)

    async def send(data: bytes) -> None:
        async with limit:
            answer = await page.raw(data + b"\r\n\r\n", seconds=30)
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "ended"
        statuses[status] = statuses.get(status, 0) + 1

    async with trio.open_nursery() as nursery:
        for number in range(count):
            kinds = (
                rng.randbytes(rng.randrange(1, 200)),
                b"GET /%d HTTP/1.1\r\nhost: evil.example" % number,
                b"POST /api/actions/leave HTTP/1.1\r\nhost: localhost\r\nconnection: close",
                b"GET / HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1",
                b"PUT /%d HTTP/1.1\r\nhost: localhost\r\nconnection: close" % number,
            )
            nursery.start_soon(send, kinds[number % len(kinds)])
    alive = (await page.ask("/api/view"))[0] == 200
    grown = process.memory_info().rss - before
    return {"case": "bad requests", "count": count, "alive": alive, "grown_bytes": grown, **statuses}


def look(port: int, seconds: float) -> dict[str, Any]:
    """Return the time to the first view, the frames per second while panning, and the script's memory, in a
    real browser."""
    with opened(viewport={"width": 1280, "height": 900}) as page:
        begun = time.perf_counter()
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_function("document.querySelectorAll('tbody tr').length >= 100")
        first = time.perf_counter() - begun
        box = page.locator("canvas").bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 200)
        page.mouse.down()
        page.evaluate(
            "() => { window.frames_ = 0;"
            " const tick = () => { window.frames_++; requestAnimationFrame(tick) };"
            " requestAnimationFrame(tick) }"
        )
        begun, moves = time.perf_counter(), 0
        while time.perf_counter() - begun < PAN_SECONDS:
            moves += 1
            page.mouse.move(box["x"] + 300 + 100 * (moves % 2), box["y"] + 200)
        frames = page.evaluate("window.frames_") / (time.perf_counter() - begun)
        page.mouse.up()
        heap = "() => { globalThis.gc && gc(); return performance.memory.usedJSHeapSize }"
        page.wait_for_timeout(3_000)
        before = page.evaluate(heap)
        page.wait_for_timeout(1e3 * seconds)
        grown = page.evaluate(heap) - before
        return {
            "case": "browser",
            "first_view_seconds": round(first, 3),
            "frames_per_second": round(frames, 1),
            "heap_grown_bytes": grown,
            "heap_seconds": seconds,
            "complaints": len(page.complaints),
        }


def main() -> int:
    flags = arguments(__doc__ or "")
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
        child.start()
        stack.callback(child.join)
        stack.callback(child.kill)
        port = ours.recv()
        process = psutil.Process(child.pid)

        async def measure() -> None:
            page = Served(Told(), None, port)  # type: ignore[arg-type]  # the page itself is over there
            status, _, body = await page.ask("/api/view")
            rows.append(
                {"case": "sizes", "view": len(body), "scripts": Assets().script_bytes, "status": status}
            )
            rows.append(await watch(page, process, 6 if flags.quick else 30))
            rows.append(await scrape(page, process, 100 if flags.quick else 600))
            rows.append(await level(page, process, 6 if flags.quick else LEVEL_SECONDS))
            rows.append(await attack(page, process, 1_000 if flags.quick else 10_000))

        trio.run(measure)
        try:
            rows.append(look(port, 5 if flags.quick else 120))
        except pytest.skip.Exception as reason:
            rows.append({"case": "browser", "skipped": str(reason)})
    by_case = {row["case"]: row for row in rows}
    shares = by_case["watchers"]
    goals = [
        Goal("scripts, bytes", by_case["sizes"]["scripts"], "<=", SCRIPT_BYTES),
        Goal("a view of 1,000 members, bytes", by_case["sizes"]["view"], "<=", VIEW_BYTES),
        Goal("share of a core for 5 watchers", shares["watched"] - shares["alone"], "<=", 0.01),
        Goal("memory growth by scrapes, bytes", by_case["scrapes"]["grown_bytes"], "<=", 2 << 20),
        Goal("memory growth while watched, bytes", by_case["level"]["grown_bytes"], "<=", 4 << 20),
        Goal("alive after bad requests", float(by_case["bad requests"]["alive"]), ">=", 1.0),
        Goal("memory growth by bad requests, bytes", by_case["bad requests"]["grown_bytes"], "<=", 8 << 20),
    ]
    if "frames_per_second" in by_case["browser"]:
        browser = by_case["browser"]
        goals += [
            Goal("first view, seconds", browser["first_view_seconds"], "<=", 1.0),
            Goal("frames per second while panning", browser["frames_per_second"], ">=", 30.0),
            Goal("heap growth, bytes", browser["heap_grown_bytes"], "<=", 4 << 20),
        ]
    return report("page", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
