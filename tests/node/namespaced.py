"""The program that `test_namespaces` runs in a network namespace: it sends beacons, finds neighbours and
echoes.

python -m tests.node.namespaced LETTER echo    send beacons and echo; with a HOST, listen only there
python -m tests.node.namespaced LETTER visit   visit each address of the first neighbour found; print for
                                               each what came back, as a line of JSON; then exit
python -m tests.node.namespaced LETTER move    for each line of standard input send a hundred datagrams to
                                               the neighbour's first address; print how many came back, and
                                               this node's own addresses
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
from node.services.lan_discovery import Neighbours
from node.transport.multicast import BEACON_PORT
from node.transport.network import RealNetwork
from tests.node.nets import PING, make_network, running

EVERYWHERE = [("0.0.0.0", 0), ("::", 0)]
GIVE_UP_SECONDS = 40.0


DATAGRAMS = 100


async def live(letter: str, task: str, *hosts: str) -> None:
    places = [(host, 0) for host in hosts] or EVERYWHERE
    network = make_network(letter, listen=places, beacon_port=BEACON_PORT)
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
            if task == "visit":
                for address in await heard.receive():
                    await visit(address)
            elif task == "move":
                await exchange((await heard.receive())[0])
            else:
                while True:
                    for sender, message in await inbox.take(trio.current_time() + GIVE_UP_SECONDS):
                        network.send(sender, PING, message)
        nursery.cancel_scope.cancel()


async def visit(address: Address) -> None:
    """Visit with a new peer, so that no address is known from an earlier visit."""
    newcomer: RealNetwork = make_network(address.kind[-1], listen=EVERYWHERE)
    newcomer.inbox(PING)
    async with running(newcomer):
        peer = await newcomer.identify(address)
        newcomer.learn(peer, [address])
        newcomer.send(peer, PING, address.host.encode())
        messages = await newcomer.inbox(PING).take(trio.current_time() + GIVE_UP_SECONDS)
        back = [message.decode() for sender, message in messages if sender == peer]
        sys.stdout.write(json.dumps({"host": address.host, "back": back}) + "\n")


async def exchange(address: Address) -> None:
    """Exchange datagrams as one peer throughout, although this machine's address changes in between."""
    mover: RealNetwork = make_network("m", listen=EVERYWHERE)
    inbox = mover.inbox(PING)
    async with running(mover):
        peer = await mover.identify(address)
        mover.learn(peer, [address])
        while await trio.to_thread.run_sync(sys.stdin.readline):
            back = set()
            for number in range(DATAGRAMS):
                mover.send(peer, PING, b"%d" % number)
                back.update(await inbox.take(trio.current_time() + 1))
            mover.look()
            hosts = [address.host for address in mover.addresses]
            sys.stdout.write(json.dumps({"back": len(back), "hosts": hosts}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    trio.run(live, sys.argv[1], sys.argv[2], *sys.argv[3:])
