"""Simulate a hundred SWIM members, kill one, and show when the others notice its death. Takes a second.

    python examples/simulated_swarm.py

The cores are the same as in a real node; only the network and the clock are simulated.
"""

from functools import partial

from crypto.contact import make_address
from crypto.identity import PeerId
from gossip.member import MemberDown, Profile
from gossip.settings import SwimSettings
from gossip.swim import Swim
from node.services.driver import Sends
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.seeds import HashSigner, seeded_peer, seeded_rng

PEERS = 100
SEED = 7
KILLED_AT_SECONDS = 20.0
END_SECONDS = 40.0


def join(through: PeerId, core: Swim, now: float) -> Sends:
    """Join the swarm through an earlier member."""
    return list(core.join(now, [through]))


def main() -> None:
    """Run the experiment and print its results."""
    peers = [seeded_peer(SEED, index) for index in range(PEERS)]
    heard: list[float] = []

    def publish(now: float, _: object, event: object) -> None:
        if isinstance(event, MemberDown) and event.peer == peers[-1]:
            heard.append(now - KILLED_AT_SECONDS)

    model = NetworkModel(nearest_seconds=0.005, farthest_seconds=0.08, loss=0.02)
    engine = Engine(SimLinks(model, SEED), publish=publish)
    for index, peer in enumerate(peers):
        address = make_address(f"10.0.0.{index + 1}", 9747, peer)
        swim = Swim(
            HashSigner(peer, "example", SEED),
            Profile(f"n{index}", (address,)),
            SwimSettings.lan(),
            seeded_rng(SEED, peer),
            incarnation=1,
            now=0.0,
        )
        engine.add(peer, swim)
        # Each peer joins through an earlier one, so no member is special.
        through = peers[index // 2]
        if index:
            engine.call(0.1 + index * 0.01, peer, partial(join, through))
    engine.kill(peers[-1], KILLED_AT_SECONDS)
    engine.run(END_SECONDS)
    heard.sort()
    print(f"{PEERS} members, 2 % loss, {engine.counters['delivered']} messages in {END_SECONDS:.0f} s")
    print(f"{len(heard)} of {PEERS - 1} know of the death; first {heard[0]:.1f} s, last {heard[-1]:.1f} s")


if __name__ == "__main__":
    main()
