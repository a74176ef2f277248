"""The accounts of a relay: places (reservations), circuits, budgets. A core without I/O.

Places and circuits are bounded in total, for each peer and for each network, so that no peer monopolizes a
relay. Traffic is bounded by the owner's rate, which all peers with an open circuit share equally. In
addition, each stranger (a peer that has done no work for this node, see `is_known`) has an hourly budget.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from crypto.crowds import is_local, network_of
from crypto.identity import PeerId
from node.transport.relay_messages import BUSY, FULL, OFF, SPENT, TOKEN_BYTES, UNKNOWN

PLACES_MAX = 256
"""Maximum number of peers that may be reached through one node. Each costs a connection that is idle most of
the time."""
PLACES_PER_NETWORK_MAX = 32
"""Maximum number of such peers in one network (a /24 of IPv4, a /48 of IPv6): enough for a lecture hall
behind one router."""
PLACE_SECONDS = 600
"""How long a place is kept without a renewal."""
CIRCUITS_PER_PEER_MAX = 16
"""Maximum number of circuits of one peer, whichever end it is."""
CIRCUITS_PER_PAIR_MAX = 2
"""Maximum number of circuits by which one peer reaches another, including waiting ones: one in use, and a
replacement if that has gone silent."""
WAITING_PER_PEER_MAX = 8
"""Maximum number of circuits announced to one peer that it has not accepted yet."""
WAIT_SECONDS = 5.0
STRANGER_BYTES_PER_HOUR = 2**30
"""Hourly allowance of a peer that has done no work for this node: enough to join and to fetch a small
model."""
HOUR_SECONDS = 3_600.0
ACCOUNTS_MAX = 4_096


@dataclass(frozen=True)
class Limits:
    """The owner's limits: whether to relay at all, the number of circuits, the bytes a second (0: no
    limit)."""

    is_on: bool = False
    circuits_max: int = 64
    bytes_per_second: int = 1_250_000


@dataclass
class _Place:
    until: float
    network: bytes


@dataclass(frozen=True)
class Announced:
    """A circuit announced to its target: `first` asked for it, and `target` should accept it."""

    token: bytes
    first: PeerId
    target: PeerId
    until: float
    network: bytes
    """The public network from which the request came; empty for a local one."""
    is_strangers: bool
    """Whether neither peer had contributed anything to this node when the circuit was announced."""

    @property
    def ends(self) -> tuple[PeerId, PeerId]:
        """The peer that asked, and the peer that is to be reached."""
        return self.first, self.target


class NoPlace(Exception):
    """A refused request; `code` is one of the reasons in `relay_messages`."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class RelayLedger:
    """The accounts of one relay. `now` is monotonic seconds; `source` is the network prefix of a peer's
    connection."""

    def __init__(
        self,
        limits: Limits,
        entropy: Callable[[int], bytes],
        *,
        is_known: Callable[[PeerId], bool] = lambda _peer: False,
    ) -> None:
        self.limits = limits
        self._entropy = entropy
        self._is_known = is_known
        self._places: dict[PeerId, _Place] = {}
        self._announced: dict[bytes, Announced] = {}
        self._open: dict[bytes, Announced] = {}
        # The most recently used account comes last.
        self._accounts: dict[PeerId, tuple[float, int]] = {}
        self.carried_bytes = 0

    @property
    def places(self) -> tuple[PeerId, ...]:
        """The peers that have a place, so that they can be reached through this node."""
        return tuple(self._places)

    @property
    def circuits(self) -> int:
        """The number of open circuits."""
        return len(self._open)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that others can make grow."""
        return {
            "places": (len(self._places), PLACES_MAX),
            "announced": (len(self._announced), PLACES_MAX * WAITING_PER_PEER_MAX),
            "circuits": (len(self._open), self.limits.circuits_max),
            "accounts": (len(self._accounts), ACCOUNTS_MAX),
        }

    def reserve(self, now: float, peer: PeerId, source: bytes) -> int:
        """Keep a place for a peer; return for how many seconds. Raises NoPlace."""
        if not self.limits.is_on:
            raise NoPlace(OFF)
        self._forget(now)
        network = source if is_local(source) else network_of(source)
        if peer not in self._places:
            crowded = sum(place.network == network for place in self._places.values())
            is_far = not is_local(source)
            if len(self._places) >= PLACES_MAX or (is_far and crowded >= PLACES_PER_NETWORK_MAX):
                raise NoPlace(FULL)
        self._places[peer] = _Place(now + PLACE_SECONDS, network)
        return PLACE_SECONDS

    def release(self, peer: PeerId) -> None:
        """Release the place of a peer that gave it up or has hung up."""
        self._places.pop(peer, None)

    def announce(self, now: float, first: PeerId, target: PeerId, source: bytes) -> Announced:
        """Record that `first`, which asks from `source`, wants to reach `target`; return the announcement.
        Raises NoPlace."""
        if not self.limits.is_on:
            raise NoPlace(OFF)
        self._forget(now)
        if target not in self._places:
            raise NoPlace(UNKNOWN)
        if len(self._open) >= self.limits.circuits_max:
            raise NoPlace(FULL)
        waiting = sum(target == each.target for each in self._announced.values())
        if waiting >= WAITING_PER_PEER_MAX or target == first:
            raise NoPlace(BUSY)
        network = b"" if is_local(source) else network_of(source)
        self._check(first, target, network, [*self._open.values(), *self._announced.values()])
        is_strangers = not (self._is_known(first) or self._is_known(target))
        if is_strangers and min(self.left_bytes(now, first), self.left_bytes(now, target)) <= 0:
            raise NoPlace(SPENT)
        token = self._entropy(TOKEN_BYTES)
        until = now + WAIT_SECONDS
        found = self._announced[token] = Announced(token, first, target, until, network, is_strangers)
        return found

    def _check(self, first: PeerId, target: PeerId, network: bytes, circuits: Collection[Announced]) -> None:
        """Raise NoPlace if one more circuit in addition to `circuits` would exceed the limit of either peer,
        of the pair, or of a public network (a quarter of all circuits, and half of one target's)."""
        of_network = [each for each in circuits if network and each.network == network]
        if (
            max(sum(peer in each.ends for each in circuits) for peer in (first, target))
            >= CIRCUITS_PER_PEER_MAX
            or sum(each.ends == (first, target) for each in circuits) >= CIRCUITS_PER_PAIR_MAX
            or len(of_network) >= max(1, self.limits.circuits_max // 4)
            or sum(target in each.ends for each in of_network) >= CIRCUITS_PER_PEER_MAX // 2
        ):
            raise NoPlace(BUSY)

    def withdraw(self, token: bytes) -> None:
        """Remove an announced circuit for which nobody waits any more."""
        self._announced.pop(token, None)

    def accept(self, now: float, peer: PeerId, token: bytes) -> Announced:
        """Open the circuit that was announced to `peer`, until `closed`. Raises NoPlace."""
        self._forget(now)
        found = self._announced.get(token)
        if found is None or found.target != peer:
            raise NoPlace(UNKNOWN)
        del self._announced[token]
        if len(self._open) >= self.limits.circuits_max:
            raise NoPlace(FULL)
        self._check(found.first, found.target, found.network, self._open.values())
        self._open[token] = found
        return found

    def closed(self, circuit: Announced) -> None:
        """Close an open circuit."""
        del self._open[circuit.token]

    def carried(self, now: float, circuit: Announced, count: int) -> bool:
        """Count carried bytes; return False if both peers are strangers (each is then charged in full) and
        either has no budget left. A known peer pays for the other one."""
        self.carried_bytes += count
        if not circuit.is_strangers:
            return True
        for peer in (circuit.first, circuit.target):
            since, used = self._account(now, peer)
            self._accounts.pop(peer, None)
            self._accounts[peer] = since, used + count
            if len(self._accounts) > ACCOUNTS_MAX:
                del self._accounts[next(iter(self._accounts))]
        return min(self.left_bytes(now, peer) for peer in (circuit.first, circuit.target)) > 0

    def left_bytes(self, now: float, peer: PeerId) -> int:
        """Return how many bytes may still be carried for a stranger within this hour."""
        return STRANGER_BYTES_PER_HOUR - self._account(now, peer)[1]

    def _account(self, now: float, peer: PeerId) -> tuple[float, int]:
        since, used = self._accounts.get(peer, (now, 0))
        return (now, 0) if now - since >= HOUR_SECONDS else (since, used)

    def _forget(self, now: float) -> None:
        for peer in [peer for peer, place in self._places.items() if place.until < now]:
            del self._places[peer]
        for token in [token for token, each in self._announced.items() if each.until < now]:
            del self._announced[token]


class SharedPace:
    """One rate, shared equally by its present users. Each waits for its own share."""

    def __init__(self, bytes_per_second: int) -> None:
        self.bytes_per_second = bytes_per_second
        self._due: dict[object, float] = {}

    def take(self, now: float, who: object, count: int) -> float:
        """Count bytes of the user `who`; return the seconds to wait."""
        if not self.bytes_per_second:
            return 0.0
        begin = max(self._due.get(who, now), now - BURST_SECONDS)
        self._due[who] = begin + count * self._busy(now, who) / self.bytes_per_second
        return max(0.0, self._due[who] - now)

    def piece(self, now: float, who: object) -> int:
        """Return how many bytes the user `who` may take in one piece: its share for PIECE_SECONDS."""
        if not self.bytes_per_second:
            return PIECE_BYTES_MAX
        share = self.bytes_per_second / self._busy(now, who)
        return max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, int(share * PIECE_SECONDS)))

    def _busy(self, now: float, who: object) -> int:
        return sum(due > now for each, due in self._due.items() if each != who) + 1

    def forget(self, who: object) -> None:
        """Remove the share of the user `who`, which no longer needs it."""
        self._due.pop(who, None)


BURST_SECONDS = 0.05
"""Maximum unused time that a pause saves up for a burst."""
PIECE_SECONDS = 0.1
"""How long one piece uses a share: short, so that the next bytes come long before a path counts as dead."""
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 2**11, 2**16
