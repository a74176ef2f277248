"""The base class of all attacks, and their timing. No attack is here."""

import random
import socket
import threading
import time
from dataclasses import dataclass

from crypto.identity import PeerId

HOSTS = tuple(f"127.0.0.{number}" for number in range(2, 10))
"""The source addresses of the attackers. The honest peer is at 127.0.0.1, like the victim."""
_NAP_SECONDS_MIN = 50e-6
"""Shorter sleeps take this long anyway."""


@dataclass(frozen=True)
class Target:
    """An attacker's knowledge of the victim. The victim receives beacons of its local network at
    `beacon_port`."""

    host: str
    port: int
    beacon_port: int
    peer: PeerId
    swarm: str

    @property
    def place(self) -> tuple[str, int]:
        return self.host, self.port


class Attack:
    """One kind of hostile traffic. `strike` sends it once, and may fail, because the victim defends itself.

    `rate` is strikes per second; `counters` are the victim's counters of refusals of this attack.
    """

    rate = 0.0
    counters: tuple[str, ...] = ()

    def __init__(self, target: Target) -> None:
        self.target = target
        self.rng = random.Random(type(self).__name__)

    def strike(self) -> None:
        raise AssertionError("a subclass must implement `strike`")

    def close(self) -> None:
        """Close all sockets."""

    def host(self) -> str:
        """Return the source address of the next strike."""
        return self.rng.choice(HOSTS)


def from_all_hosts(kind: int) -> list[socket.socket]:
    """Return a non-blocking socket at each of `HOSTS`."""
    made = []
    for host in HOSTS:
        made.append(socket.socket(socket.AF_INET, kind))
        made[-1].setblocking(False)
        made[-1].bind((host, 0))
    return made


def keep_striking(attack: Attack, rate: float, over: threading.Event) -> int:
    """Strike evenly, `rate` times a second, until `is_over`; return the number of strikes. A strike that is
    up to a tenth of a second late is made up for."""
    strikes, due_at = 0, time.perf_counter()
    while not over.is_set():
        now = time.perf_counter()
        if due_at > now:
            over.wait(max(_NAP_SECONDS_MIN, due_at - now))
            continue
        due_at = max(due_at, now - 0.1) + 1 / rate
        attack.strike()
        strikes += 1
    return strikes
