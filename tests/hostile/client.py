"""The hostile client's own process: each attack in a thread of its own, at its rate."""

import resource
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection

from tests.hostile import guests, packets, visitors
from tests.hostile.attack import Attack, Target, keep_striking

BY_PACKETS: tuple[type[Attack], ...] = (
    packets.RandomPackets,
    packets.NearlyPackets,
    packets.OtherSwarmPackets,
    packets.ReplayedPackets,
    packets.UnwelcomePackets,
    packets.PatientPackets,
    packets.KnownIndexPackets,
    packets.Beacons,
)
BY_CONNECTIONS: tuple[type[Attack], ...] = (
    visitors.SilentVisitors,
    visitors.GarbledVisitors,
    visitors.HastyVisitors,
    visitors.HalfVisitors,
    visitors.RecordedVisitors,
    visitors.DrippingVisitors,
    guests.WrongHellos,
    guests.GarbledGuests,
    guests.HugeGuests,
    guests.DrippingGuests,
    guests.GreedyGuests,
    guests.CrowdingGuests,
)
ATTACKS = {attack.__name__: attack for attack in (*BY_PACKETS, *BY_CONNECTIONS)}


def strike_all(connection: Connection, target: Target, rates: Mapping[str, float]) -> None:
    """The whole of the process: says "ready" once all attacks are made, begins when told to, ends when told
    to, and says how often each struck."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attacks = [ATTACKS[name](target) for name in rates]
    over = threading.Event()
    strikes: dict[str, int] = {}

    def strike(attack: Attack) -> None:
        name = type(attack).__name__
        strikes[name] = keep_striking(attack, rates[name], over.is_set)

    threads = [threading.Thread(target=strike, args=(attack,), daemon=True) for attack in attacks]
    connection.send("ready")
    connection.recv()
    for thread in threads:
        thread.start()
    connection.recv()
    over.set()
    for thread in threads:
        thread.join()
    connection.send(strikes)
    for attack in attacks:
        attack.close()


def full_rates(attacks: Sequence[type[Attack]], part: float = 1.0) -> dict[str, float]:
    """Each attack's own rate, or that part of it."""
    return {attack.__name__: attack.rate * part for attack in attacks}
