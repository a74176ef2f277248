"""Slow, silent and huge clients use limited memory, and do not slow down other streams."""

import gc
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
import trio

from node.web import door
from node.web.settings import WebSettings
from tests.node.web.models_world import ignore, models
from tests.node.web.test_models_door import ASKED, request
from tests.node.web.world import Served
from tests.source import ROOT

TOKEN_SECONDS = 0.02
FORMS = {"short": (40, (6, 6, 2, 40)), "long": (1_500, (40, 40, 40, 200))}
"""Number of tokens whose times are measured, and the numbers of slow readers, slow senders, huge bodies and
silent connections."""
SLACK_SECONDS = {"short": 0.1, "long": 0.004}
"""Tolerance in addition to the 20 %. Three test processes share two cores; alone, the delay is one turn of
the scheduler."""
GROWTH_BYTES_MAX = 200 << 20


class _Threads:
    """An executor like a node's: slow work does not run on the event loop."""

    async def run(self, work: Callable[[], Any]) -> Any:
        return await trio.to_thread.run_sync(work)


async def gaps(page: Served, key: str, tokens: int) -> list[float]:
    """Return the seconds between events of a stream that reads as fast as it can."""
    found: list[float] = []
    async with await trio.open_tcp_stream("127.0.0.1", page.port) as stream:
        await stream.send_all(request(page, key, {**ASKED, "max_tokens": tokens, "stream": True}))
        last, received = None, b""
        async for chunk in stream:
            received = (received + chunk)[-64:]
            if b'"text":"' in chunk:
                now = trio.current_time()
                if last is not None:
                    found.append(now - last)
                last = now
        assert b"[DONE]" in received
    return found


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@asynccontextmanager
async def started(command: list[str]) -> AsyncIterator[None]:
    """Run a process while the block lasts, from its first output on."""
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        with trio.fail_after(60):
            assert await process.stdout.receive_some(100)
        yield
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


@pytest.mark.parametrize("form", ["short", pytest.param("long", marks=pytest.mark.slow(seconds=180))])
async def test_a_stream_keeps_its_pace_despite_abusive_clients(form: str) -> None:
    tokens, counts = FORMS[form]
    async with models(text="bytes", seconds=TOKEN_SECONDS) as (page, said, key):
        page.node.seams.executor = _Threads()
        made: Any = await page.page.models.keys.handlers["keys.new"]({"in_flight": 40}, ignore)
        quiet = p95(await gaps(page, key, tokens))
        gc.collect()
        before = psutil.Process().memory_info().rss
        command = [sys.executable, "-m", "tests.node.web.impatient", str(page.port), made["key"]]
        async with started([*command, *map(str, counts)]):
            busy = p95(await gaps(page, key, tokens))
            server = page.page._door
            assert server is not None
            assert server.bodies_bytes <= door.BODIES_BYTES_MAX + WebSettings().body_bytes_max
            assert psutil.Process().memory_info().rss - before <= GROWTH_BYTES_MAX
        print(f"\np95 between tokens: {quiet * 1e3:.1f} ms alone, {busy * 1e3:.1f} ms beside them")  # noqa: T201
        assert busy <= 1.2 * quiet + SLACK_SECONDS[form]
        with trio.fail_after(30):
            while said.going:  # noqa: ASYNC110 - what the door does sets no event of ours
                await trio.sleep(0.01)
