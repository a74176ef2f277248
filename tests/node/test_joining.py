"""Joining through several addresses simultaneously, on 127.0.0.1."""

from collections import Counter
from collections.abc import Sequence

import trio

from crypto.contact import make_address
from crypto.identity import PeerId
from node.events import JoinTried
from node.seams import RealClock
from node.services.bootstrap import Bootstrap
from tests.node.nets import make_network, running


async def test_a_silent_seed_does_not_delay_one_that_answers() -> None:
    alice, bob = make_network("a"), make_network("b")
    silent = trio.socket.socket()
    await silent.bind(("127.0.0.1", 0))
    silent.listen()
    tried: list[JoinTried] = []
    found: list[PeerId] = []
    answered = trio.Event()

    def on_found(peers: Sequence[PeerId]) -> None:
        found.extend(peers)
        answered.set()

    async def is_other() -> bool:
        return False

    async with running(alice, bob), trio.open_nursery() as nursery:
        addresses = [make_address("127.0.0.1", silent.getsockname()[1]), *bob.addresses]
        joining = Bootstrap(
            alice,
            RealClock(),
            [(address,) for address in addresses],
            publish=tried.append,
            found=on_found,
            is_alone=lambda: not found,
            is_member=lambda peer: peer in found,
            counters=Counter(),
            is_other=is_other,
        )
        nursery.start_soon(joining.run)
        with trio.fail_after(30):
            await answered.wait()
        assert found == [bob.peer]
        # The node is still waiting for the silent seed.
        assert [event.peer for event in tried] == [bob.peer]
        nursery.cancel_scope.cancel()
    silent.close()
