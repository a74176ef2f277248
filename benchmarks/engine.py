"""Messages per CPU second: the same SWIM cores driven by the heap engine and by trio tasks.

Both run the same swarm for the same virtual time, interleaved. The ratio is the reason why large experiments
use the heap.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import trio
from _figures import Goal, arguments, leave, report
from trio.testing import MockClock

from crypto.contact import make_address
from crypto.identity import PeerId
from gossip.member import MemberUp, Profile
from gossip.messages import MESSAGE_BYTES_MAX, Message
from gossip.settings import SwimSettings
from gossip.swim import PROTOCOL, Swim
from node.services.driver import Driver, Sends
from sim.engine import Engine
from sim.network.links import SimLinks
from sim.network.model import NetworkModel
from sim.peer_network import SimNetwork
from sim.ports import Wire
from sim.seams import SimClock, SimNetworkFabric
from sim.seeds import HashSigner, seeded_peer, seeded_rng

SEED = 3
MODEL = NetworkModel(nearest_seconds=0.01, farthest_seconds=0.08)
RATIO_GOAL = 3.0
"""The minimum ratio; below it the engine would not be worth its own code."""


class CountedSwim(Swim):
    """A Swim core that counts received messages, in the same way under both drivers."""

    received = 0

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        CountedSwim.received += 1
        return list(super().receive(now, sender, message))


def cores(count: int) -> list[tuple[PeerId, Swim]]:
    """Return fresh cores."""
    made: list[tuple[PeerId, Swim]] = []
    for index in range(count):
        peer = seeded_peer(SEED, index)
        address = make_address(f"10.0.{index >> 8}.{index & 255}", 9747, peer)
        signer = HashSigner(peer, "bench", SEED)
        profile = Profile(f"n{index}", (address,))
        made.append((peer, CountedSwim(signer, profile, SwimSettings.lan(), seeded_rng(SEED, peer), 1, 0.0)))
    return made


def by_engine(count: int, seconds: float) -> None:
    """Run the heap engine with the real codec, as the node's driver uses it."""
    engine = Engine(SimLinks(MODEL, SEED), wires={PROTOCOL: Wire(Message, MESSAGE_BYTES_MAX)})
    swarm = cores(count)
    first = swarm[0][0]
    for index, (peer, core) in enumerate(swarm):
        engine.add(peer, core, protocol=PROTOCOL)
        engine.call(0.02 * index, peer, lambda core, now: core.join(now, [first]), protocol=PROTOCOL)
    engine.run(seconds)


def by_trio(count: int, seconds: float) -> None:
    """Run the node's own driver, one task per core."""
    trio.run(_drive, count, seconds, clock=MockClock(autojump_threshold=0))


async def _drive(count: int, seconds: float) -> None:
    medium = SimNetworkFabric(SimLinks(MODEL, SEED))
    swarm = cores(count)
    networks = {peer: medium.attach(peer) for peer, _ in swarm}
    first = networks[swarm[0][0]]
    async with trio.open_nursery() as nursery:
        for index, (peer, core) in enumerate(swarm):
            networks[peer].learn(first.peer, first.addresses)
            driver = Driver(
                core,
                PROTOCOL,
                Message,
                message_bytes_max=MESSAGE_BYTES_MAX,
                network=networks[peer],
                clock=SimClock(),
                publish=_learner(networks[peer]),
                refuse=lambda *_: None,
            )
            nursery.start_soon(driver.run)
            nursery.start_soon(_join, driver, core, first.peer, 0.02 * index)
        await trio.sleep(seconds)
        nursery.cancel_scope.cancel()


def _learner(network: SimNetwork) -> Callable[[Any], None]:
    def publish(event: Any) -> None:
        if isinstance(event, MemberUp):
            network.learn(event.peer, event.addresses)

    return publish


async def _join(driver: Driver, core: Swim, through: PeerId, at: float) -> None:
    await trio.sleep_until(at)
    driver.command(lambda now: list(core.join(now, [through])))


def rate(run: Callable[[], None]) -> float:
    """Return the messages received per CPU second."""
    CountedSwim.received = 0
    begun = time.process_time()
    run()
    return CountedSwim.received / (time.process_time() - begun)


def main() -> int:
    """Measure both, in turns."""
    flags = arguments(__doc__ or "")
    count, seconds, rounds = (100, 20.0, 3) if flags.quick else (300, 30.0, 5)
    rates: dict[str, list[float]] = {"heap": [], "trio": []}
    for _ in range(rounds):
        rates["heap"].append(rate(lambda: by_engine(count, seconds)))
        rates["trio"].append(rate(lambda: by_trio(count, seconds)))
    rows: list[dict[str, Any]] = [
        {"driver": name, "peers": count, "messages_per_cpu_second": round(statistics.median(values))}
        for name, values in rates.items()
    ]
    ratio = statistics.median(h / t for h, t in zip(rates["heap"], rates["trio"], strict=True))
    goals = [Goal("messages per CPU second, heap relative to trio", round(ratio, 2), ">=", RATIO_GOAL)]
    return report("engine", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
