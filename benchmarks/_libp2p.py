"""py-libp2p as a rival of our streams, if the extra `bench` is installed: Noise and yamux over TCP.

Its packages are imported only once they are known to be installed.
"""

import importlib.util
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import trio
from _pipes import HOST, PipeLine, fill, serve_pipe

PROTOCOL = "/benchmark/pipe/1"
WRITE_BYTES_MAX = 2**16
"""Maximum number of bytes that py-libp2p writes in one call without an error."""


def is_installed() -> bool:
    return importlib.util.find_spec("libp2p") is not None


class LibPipe:
    """A `Pipe` over one of py-libp2p's streams."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    async def send_all(self, data: memoryview) -> None:
        for start in range(0, len(data), WRITE_BYTES_MAX):
            await self._stream.write(bytes(data[start : start + WRITE_BYTES_MAX]))

    async def receive_into(self, view: memoryview) -> None:
        await fill(view, self._stream.read)

    def close(self) -> None:
        """Do nothing: opening the next connection ends this one."""


def _address(port: int) -> Any:
    from multiaddr import Multiaddr

    return Multiaddr(f"/ip4/{HOST}/tcp/{port}")


async def serve_libp2p(connection: Connection) -> None:
    """Run the far side; send its port and its id."""
    from libp2p import new_host

    async def serve(stream: Any) -> None:
        await serve_pipe(LibPipe(stream))

    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    host = new_host()
    host.set_stream_handler(PROTOCOL, serve)
    async with host.run(listen_addrs=[_address(port)]):
        connection.send((port, str(host.get_id())))
        await trio.sleep_forever()


@asynccontextmanager
async def libp2p_line(port: int, peer: str) -> AsyncIterator[PipeLine]:
    """Yield a connected `PipeLine`."""
    from libp2p import new_host
    from libp2p.peer.id import ID
    from libp2p.peer.peerinfo import PeerInfo

    # The first host keeps its connection; the second reconnects each time.
    host, dialler, there = new_host(), new_host(), ID.from_string(peer)

    async def connect(host: Any) -> LibPipe:
        await host.disconnect(there)
        await host.connect(PeerInfo(there, [_address(port)]))
        return LibPipe(await host.new_stream(there, [PROTOCOL]))

    async with host.run(listen_addrs=[_address(0)]), dialler.run(listen_addrs=[_address(0)]):
        yield PipeLine(await connect(host), partial(connect, dialler))
