"""Links whose remote process dies, over real sockets. Its host refuses the next connection, which proves the
death.
"""

import trio

from node.pipeline.links import Links
from node.seams import RealClock, Stream
from tests.node.nets import BULK, acquaint, make_network, running, until


async def test_a_refused_connection_proves_a_dead_peer_without_datagrams() -> None:
    heard: list[bytes] = []
    alice, bob = make_network("a"), make_network("b")

    async def take(stream: Stream) -> None:
        while True:
            heard.append(await stream.receive())

    async def nothing(*_: object) -> None: ...

    bob.handle(BULK, take)
    broken: list[bool] = []
    async with running(alice), trio.open_nursery() as nursery:
        links = Links(
            alice,
            BULK,
            RealClock(),
            deliver=nothing,
            on_reconnected=lambda _: None,
            on_stuck=lambda _: None,
            on_broken=lambda peer: broken.append(links.is_closed(peer)),
        )
        await nursery.start(links.run)
        async with running(bob):
            acquaint(alice, bob)
            links.send(bob.peer, b"here")
            await until(lambda: bool(heard))
            assert not links.is_closed(bob.peer)
        await until(lambda: any(broken))
        nursery.cancel_scope.cancel()
