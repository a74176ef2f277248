"""The hostile client's own process: each attack runs in a thread of its own, at its own rate."""

import os
import resource
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

from tests.hostile import guests, packets, visitors
from tests.hostile.attack import Attack, Target, keep_striking

NICENESS = 5
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


def be_hostile(connection: Connection, target: Target) -> None:
    """Run the process. It receives the rates of attacks, sends "ready" once the attacks are prepared, begins
    at the next message, and ends at the message after that. It then sends how often each attack struck, and
    waits for new rates."""
    # In reality the client would be a different machine, so it must not win by using up the victim's
    # processor.
    os.nice(NICENESS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with suppress(EOFError):  # the parent process is gone
        while True:
            _strike_for_a_while(connection, target, connection.recv())


def _strike_for_a_while(connection: Connection, target: Target, rates: Mapping[str, float]) -> None:
    attacks = {name: ATTACKS[name](target) for name in rates}
    over = threading.Event()
    strikes: dict[str, int] = {}

    def strike(name: str) -> None:
        strikes[name] = keep_striking(attacks[name], rates[name], over)

    threads = [threading.Thread(target=strike, args=(name,), daemon=True) for name in attacks]
    connection.send("ready")
    connection.recv()
    for thread in threads:
        thread.start()
    connection.recv()
    over.set()
    for thread in threads:
        thread.join()
    for attack in attacks.values():
        attack.close()
    connection.send(strikes)


def rates_of(attacks: Iterable[type[Attack]], part: float = 1.0) -> dict[str, float]:
    """Return each attack's own rate, multiplied by `part`."""
    return {attack.__name__: attack.rate * part for attack in attacks}
