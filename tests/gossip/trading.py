"""A data set is sent from one peer to many, with the simulator's engine and the real exchange core, but with
dummy pieces.

Every link is a queue with a rate in each direction (`sim.network.model.Access`). As on streams, nothing is
lost. A piece contains its number. A liar sends the number of a different piece; a mute peer makes true claims
and sends nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from crypto.identity import PeerId
from gossip.pieces.messages import PIECE_BYTES, Message, Piece
from gossip.pieces.swarm import PeerDropped, PieceArrived, PieceSwarm, Sends
from gossip.pieces.uploads import UploadDue
from sim.custom_cores import CustomSwarm, PeerSlot
from sim.network.model import Access, NetworkModel

NUMBER_BYTES = 8
_DATA = bytes(32)


@dataclass(frozen=True)
class Finished:
    """One peer has the complete data set."""


@dataclass(frozen=True)
class Trade:
    """The outcome: the number of peers that completed, and the virtual seconds until the last of them did."""

    finished: int
    seconds: float
    seconds_of_source_alone: float
    copies_of_source: float
    wasted_share: float
    dropped_liars: int


class Trader:
    """One peer: the core, and the immediate actions of the program around it. Number 0 is the source."""

    def __init__(self, slot: PeerSlot, count: int, *, dies_after: float = inf, kind: str = "") -> None:
        self.events: list[Any] = []
        self.core = PieceSwarm(
            slot.peer, _DATA, count, range(count) if slot.number == 0 or kind else (), slot.rng
        )
        self._peers: Sequence[PeerId] = slot.peers
        self._is_source = slot.number == 0 or bool(kind)
        self._kind = kind
        self._dies_after = dies_after
        self._is_started = self._is_finished = self._is_dead = False

    @property
    def deadline(self) -> float:
        return self.core.deadline if self._is_started else 0.0

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        return self._act(now, self.core.receive(now, sender, message))

    def wake(self, now: float) -> Sends:
        if self._is_started:
            return self._act(now, self.core.wake(now))
        self._is_started = True
        if self._is_source:
            return []
        wanted = self.core.want(now, range(self.core.count))
        return self._act(now, [*wanted, *self.core.meet(now, self._peers)])

    def _act(self, now: float, sends: Sends) -> Sends:
        if self._is_dead:
            return []
        found = list(sends)
        while self.core.events:
            event = self.core.events.pop(0)
            match event:
                case PieceArrived():
                    is_right = event.body[:NUMBER_BYTES] == event.number.to_bytes(NUMBER_BYTES, "big")
                    found += self.core.stored(now, event.sender, event.number, is_right=is_right)
                case UploadDue() if self._kind != "mute":
                    number = event.number + (self._kind == "liar")
                    body = number.to_bytes(NUMBER_BYTES, "big") + bytes(PIECE_BYTES - NUMBER_BYTES)
                    found.append((event.peer, Piece(_DATA, event.number, body)))
                    found += self.core.uploaded(now, event.peer, event.number, was_sent=True)
                case PeerDropped():
                    self.events.append(event)
        if self.core.uploaded_pieces >= self._dies_after:
            # As after SIGKILL: packets that the kernel has accepted are still sent.
            self._is_dead = True
            self.core.deadline = inf
        if not self._is_source and not self._is_finished and self.core.is_complete:
            self._is_finished = True
            self.events.append(Finished())
        return found


def trade(
    *,
    peers: int,
    pieces: int,
    mbit_per_second: float,
    seed: int,
    kill_after_copies: float = inf,
    liars: int = 0,
    mutes: int = 0,
    seconds_max: float = 3_600.0,
) -> Trade:
    """Send `pieces` from one source to `peers`. The last peers are `liars` and `mutes`, which claim to have
    everything. The source may die once it has sent a given number of copies.
    """
    kinds = ["", *[""] * (peers - liars - mutes), *["liar"] * liars, *["mute"] * mutes]
    access = Access(1.0, mbit_per_second, mbit_per_second, queue_seconds=1e6)
    swarm = CustomSwarm(
        lambda slot: Trader(
            slot,
            pieces,
            dies_after=kill_after_copies * pieces if slot.number == 0 else inf,
            kind=kinds[slot.number],
        ),
        nodes=peers + 1,
        network=NetworkModel(nearest_seconds=0.02, farthest_seconds=0.06, access=(access,)),
        seed=seed,
    )
    honest = peers - liars - mutes
    until = 0.0
    while len(swarm.of(Finished)) < honest and until < seconds_max:
        until += 5.0
        swarm.run(until=until)
    ends = [observed.time for observed in swarm.of(Finished)]
    cores = [trader.core for trader in swarm.cores]
    size_bits = pieces * PIECE_BYTES * 8
    return Trade(
        finished=len(ends),
        seconds=max(ends, default=inf),
        seconds_of_source_alone=peers * size_bits / (mbit_per_second * 1e6),
        copies_of_source=cores[0].uploaded_pieces / pieces,
        wasted_share=sum(core.wasted_pieces for core in cores) / (pieces * max(1, honest)),
        dropped_liars=len(swarm.of(PeerDropped)),
    )
