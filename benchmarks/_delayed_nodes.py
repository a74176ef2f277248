"""Real nodes on loopback whose messages to each other are delayed by a chosen time: each is reached only
through a proxy.

A node announces its proxy's address, so all connections to it go through the proxy, which delays traffic in
both directions. The system's own tool for this (netem) is missing in many containers. The proxies carry no
datagrams, so connections are TCP.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from node.cli.client import ask
from node.demo.processes import SwarmProcesses

HOST = "127.0.0.1"
CHUNK_BYTES = 1 << 16
SECONDS_MAX = 60.0


class DelayingProxies:
    """Proxies in one thread. `delay_seconds` may be changed at any time."""

    def __init__(self) -> None:
        self.delay_seconds = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def open(self, port: int) -> int:
        """Open a proxy to this port; return the proxy's port."""

        async def begin() -> int:
            server = await asyncio.start_server(lambda r, w: self._serve(port, r, w), HOST, 0)
            return int(server.sockets[0].getsockname()[1])

        return asyncio.run_coroutine_threadsafe(begin(), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(HOST, port)
        except OSError:
            writer.close()
            return
        for each in (writer, back):
            each.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await asyncio.gather(self._carry(reader, back), self._carry(there, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        newest = 0.0
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                # Never before earlier data, even after the delay was shortened.
                newest = max(newest, self._loop.time() + self.delay_seconds)
                self._loop.call_at(newest, self._write, writer, data)
        self._loop.call_at(max(newest, self._loop.time()), writer.close)

    def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class DelayedNodes:
    """A swarm of delayed nodes with their data below `folder`. Call `close` at the end."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self.proxies = DelayingProxies()
        self._swarm = SwarmProcesses(folder, "delays", time.sleep, calibrate=False)
        self._swarm.launch(names)
        join = None
        for name in names:
            port = free_port()
            announced = f"{HOST}:{self.proxies.open(port)}"
            # The last flags override earlier ones, with which the swarm listens on any port.
            flags = ["--listen", f"{HOST}:{port}", "--announce", announced]
            self._swarm.start(name, join, flags)
            join = join or announced

    def peer(self, name: str) -> str:
        return self._swarm.nodes[name].peer

    def ask(self, name: str, command: str, arguments: dict[str, Any] | None = None, **more: Any) -> Any:
        return ask(self.folder / name, command, arguments, seconds=SECONDS_MAX, **more)

    def token_times(self, name: str, service: str, prompt: Sequence[int], tokens: int) -> list[float]:
        """Return the time when the prompt was sent, and the arrival time of each token of its answer."""
        times = [time.perf_counter()]
        asked = {"service": service, "question": {"prompt": list(prompt), "tokens_max": tokens}}

        def on_event(event: dict[str, Any]) -> None:
            if "piece" in event:
                times.append(time.perf_counter())

        self.ask(name, "generate", asked, on_event=on_event)
        return times

    def close(self) -> None:
        self.proxies.delay_seconds = 0.0
        self._swarm.close()
        self.proxies.close()
