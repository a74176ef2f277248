"""What runs in a namespace of `test_namespaces`: a network that beacons, hears and echoes.

python -m tests.node.namespaced LETTER         be there, and answer
python -m tests.node.namespaced LETTER visit   go to each address of the first neighbour that is heard, say
                                               for each what came back, as lines of JSON, and end
"""

import json
import os
import sys
from collections import Counter
from random import Random

import trio

from crypto.contact import Address
from crypto.swarm import Swarm
from node.seams import RealClock
from node.services.neighbours import Neighbours
from node.transport.multicast import BEACON_PORT
from node.transport.network import RealNetwork
from tests.node.nets import PING, make_network, running

EVERYWHERE = [("0.0.0.0", 0), ("::", 0)]
GIVE_UP_SECONDS = 40.0


async def live(letter: str, *, visits: bool) -> None:
    network = make_network(letter, listen=EVERYWHERE, beacon_port=BEACON_PORT)
    inbox = network.inbox(PING)
    heard_send, heard = trio.open_memory_channel[tuple[Address, ...]](8)
    async with running(network), trio.open_nursery() as nursery:
        assert network.local is not None
        neighbours = Neighbours(
            network.local,
            network.peer,
            Swarm("test"),
            RealClock(),
            Random(letter),
            os.urandom,
            counters=Counter(),
            heard=lambda _, addresses: heard_send.send_nowait(tuple(addresses)),
        )
        nursery.start_soon(neighbours.run)
        with trio.move_on_after(GIVE_UP_SECONDS):
            if visits:
                for address in await heard.receive():
                    await visit(address)
            else:
                while True:
                    for sender, message in await inbox.take(trio.current_time() + GIVE_UP_SECONDS):
                        network.send(sender, PING, message)
        nursery.cancel_scope.cancel()


async def visit(address: Address) -> None:
    """A newcomer of its own for each address, so that none is known by another one."""
    newcomer: RealNetwork = make_network(address.kind[-1], listen=EVERYWHERE)
    newcomer.inbox(PING)
    async with running(newcomer):
        peer = await newcomer.identify(address)
        newcomer.learn(peer, [address])
        newcomer.send(peer, PING, address.host.encode())
        messages = await newcomer.inbox(PING).take(trio.current_time() + GIVE_UP_SECONDS)
        back = [message.decode() for sender, message in messages if sender == peer]
        sys.stdout.write(json.dumps({"host": address.host, "back": back}) + "\n")


if __name__ == "__main__":
    trio.run(lambda: live(sys.argv[1], visits="visit" in sys.argv[2:]))
