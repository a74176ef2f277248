"""The daemon, `peerloom`: the process around one node, from its start to its end, which has a time limit.

Not here: the node itself (`node.runtime`).
"""

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import trio

from node.alerts.service import Alerts
from node.config import Config
from node.containment import keep_running
from node.errors import EXIT_DONE, EXIT_FORCED, EXIT_UNEXPECTED, JoinTimeout, PeerloomError
from node.events import Event, MemberJoined
from node.recording.recorder import Recorder, open_record
from node.runtime import Node
from node.services.notify_socket import NotifySocket
from node.text import counted
from node.web.page import Page

END_SECONDS_MAX = 13.0
"""Maximum seconds from the request to leave to the end of the process: handing over takes up to eight,
leaving the swarm one."""
KEPT_BYTES = 16 << 20
"""How much freed memory the heap keeps."""
MAPPED_BYTES = 2 << 20
"""Allocations below this size come from the heap; larger ones are mapped, and returned to the system when
freed."""
_OVER = ("done", "failed", "stopped")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def main(
    config: Config,
    *,
    require_join_seconds: float | None = None,
    report: Callable[[Event], None] | None = None,
    record: Path | None = None,
) -> int:
    """Run a node until it is told to leave, recorded in the file `record`; return the exit code.

    Raises PeerloomError.
    """
    recorder = None if record is None else open_record(record, "--record")
    spare_imports()
    keep_freed_memory()
    try:
        return trio.run(_serve, config, require_join_seconds, report, recorder)
    finally:
        if recorder is not None:
            recorder.close()


def spare_imports() -> None:
    """Exclude imported objects from garbage collection, since they live as long as the process.

    A full collection blocked the event loop for 40 ms because of these 60,000 objects alone.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Make the heap keep some of the freed memory. By default glibc returns the memory of a step's sums and
    takes it again, zeroed page by page, for the next step: 900 pages a step for two small replicas."""
    # C libraries other than glibc lack this function, and may not need it.
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        set_option(_M_TRIM_THRESHOLD, KEPT_BYTES)


async def _serve(
    config: Config,
    require_join_seconds: float | None,
    report: Callable[[Event], None] | None,
    recorder: Recorder | None,
) -> int:
    try:
        with ExitStack() as stack:
            await _serve_until_told(config, require_join_seconds, report, recorder, stack)
    except* PeerloomError as group:
        raise _first(group) from None
    return EXIT_DONE


async def _serve_until_told(
    config: Config,
    require_join_seconds: float | None,
    report: Callable[[Event], None] | None,
    recorder: Recorder | None,
    stack: ExitStack,
) -> None:
    """Serve until the node is told to leave; from then on `stack` limits how long leaving takes."""
    supervisor = NotifySocket.take(os.environ)
    async with Node(config, report=report, recorder=recorder) as node, trio.open_nursery() as nursery:
        stack.enter_context(_stopped_by_signals(node.stopping))
        nursery.start_soon(keep_running, "alerts", Alerts(node).run)
        if config.web.address is not None:
            page = Page(node)
            node.handlers |= {"page": page.tell, **page.models.keys.handlers}
            nursery.start_soon(keep_running, "page", page.run)
        if require_join_seconds is not None:
            nursery.start_soon(_require_join, node, require_join_seconds)
        supervisor.tell(READY=1)
        nursery.start_soon(keep_running, "service supervisor", supervisor.keep_alive, lambda: _status(node))
        await node.stopping.wait()
        supervisor.tell(STOPPING=1, STATUS="leaving the swarm")
        if sys.stderr.isatty():
            # Handing over takes some seconds. Without this line, a person might press Ctrl-C again and
            # interrupt it.
            sys.stderr.write("leaving... (Ctrl-C again: at once)\n")
        stack.enter_context(_forced_end())
        nursery.cancel_scope.cancel()


def _status(node: Node) -> str:
    """Return a line for `systemctl status`."""
    alive = sum(member.status == "alive" for member in node.state.members.values())
    runs = sum(run.status not in _OVER for run in node.state.runs.values())
    return f"{node.config.name}, swarm {node.config.swarm.name}: sees {counted(alive, 'other node')}, " + (
        counted(runs, "run") if runs else "no run"
    )


@contextmanager
def _forced_end() -> Iterator[None]:
    """End the process if the block does not end in time for any reason, such as a computing thread or a
    hanging disk. Nothing more is lost than in a crash; the stages' processes end with this one."""
    timer = threading.Timer(END_SECONDS_MAX, _end_now)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end_now() -> None:
    line = f"left without finishing: it had not ended after {END_SECONDS_MAX:.0f} s"
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
    os._exit(EXIT_UNEXPECTED)


@contextmanager
def _stopped_by_signals(stopping: trio.Event) -> Iterator[None]:
    """Set `stopping` at the first Ctrl-C. The second ends the process immediately, even while the node is
    leaving."""
    token = trio.lowlevel.current_trio_token()
    is_told = False

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's shape
        nonlocal is_told
        if is_told or stopping.is_set():
            os._exit(EXIT_FORCED)
        is_told = True
        token.run_sync_soon(stopping.set)

    signals = signal.SIGINT, signal.SIGTERM
    before = [signal.signal(number, on_signal) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


async def _require_join(node: Node, seconds: float) -> None:
    with node.watch() as events, trio.move_on_after(seconds):
        if any(member.status == "alive" for member in node.state.members.values()):
            return
        async for event in events:
            if isinstance(event, MemberJoined):
                return
    raise JoinTimeout(
        f"nobody answered within the {seconds:g} s of --require-join",
        "check the addresses above, or leave --require-join away to keep trying",
    )


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
