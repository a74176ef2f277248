"""Decides whether other peers can reach this node, from their attempts to dial it. A core without I/O.

The node asks three others, one after the other, to dial it back. One success proves that it is reachable;
failures of three peers from different networks mean that it is unreachable; until then the answer is unknown.
If the whole swarm is in fewer networks, three peers from all of these networks decide. So the ids of one host
cannot make a node appear unreachable. A peer that could not be asked, or would not try, does not count. A
report is valid for an hour, and renewed long before. Reports also have this node's outer address. An unknown
address counts once three peers from different networks have dialled it with success, so a single peer or
network cannot make a node announce a wrong address.
"""

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from crypto.contact import Address
from crypto.identity import PeerId

OTHERS = 3
"""Number of other peers that decide. Two may share a broken link; more would only cost handshakes."""
FAMILY_OTHERS = 2
"""The same number for each IP version separately, on which less depends."""
REPORTS_MAX = 16
"""Maximum number of reports kept, the newest: more than are requested within an hour."""
BELIEVED_SECONDS = 3_600.0
AGAIN_SECONDS = 65.0
"""How long to wait before asking a peer again if there is no other. Each asker is served once a minute."""
UNASKED_SECONDS = 600.0
"""How long a peer that could not be asked is left alone. It may have an older version, or has just gone."""
UNASKED_MAX = 256
ADDRESSES_MAX = 4
"""Maximum number of addresses in one report: a few ports at one host."""


@dataclass(frozen=True)
class ReachSettings:
    """Seconds between requests. Raises ValueError if the settings contradict each other."""

    soon_seconds: float = 5.0
    """Seconds between requests while nothing is known. The time doubles after each peer that could not be
    asked, up to `doubt_seconds`. Default: 5."""

    doubt_seconds: float = 300.0
    """Seconds between requests if one of the newest reports is a failure. The router may have been
    reconfigured, and the address counts only after three successes. At most `later_seconds`. Default: 300."""

    later_seconds: float = 1_200.0
    """Seconds between requests of a node that all can reach. At most a third of the time for which a report
    is valid, so that the newest three are always valid. Default: 1,200."""

    def __post_init__(self) -> None:
        if not 0 < self.soon_seconds <= self.doubt_seconds <= self.later_seconds <= BELIEVED_SECONDS / OTHERS:
            raise ValueError(
                "reach settings: 0 < soon_seconds <= doubt_seconds <= later_seconds <= a third of an hour"
            )


REACH = ReachSettings()
"""The usual settings."""


@dataclass(frozen=True)
class DialReport:
    """The report of one peer, which this node reached at `there`: each dialled address with the reason of a
    failure, or empty for success. Without outcomes, the peer would not try."""

    at: float
    there: Address | None
    outcomes: tuple[tuple[Address, str], ...]

    @property
    def worked(self) -> tuple[Address, ...]:
        return tuple(address for address, reason in self.outcomes if not reason)


class Reachability:
    """Decides which peers to ask, when, and what follows from their answers. `now` is monotonic seconds."""

    def __init__(self, rng: Random, now: float, settings: ReachSettings = REACH) -> None:
        self._rng = rng
        self._settings = settings
        self._reports: OrderedDict[PeerId, DialReport] = OrderedDict()
        self._unasked: OrderedDict[PeerId, float] = OrderedDict()
        self._pause = settings.soon_seconds
        self._networks = OTHERS
        self._is_hurried = False
        self.deadline = now + self._pause

    @property
    def asked(self) -> int:
        """How many of the newest OTHERS reports have outcomes."""
        return len(self._newest)

    @property
    def verdict(self) -> bool | None:
        """Whether this node can be reached; None while that is unknown."""
        newest = self._newest
        if any(report.worked for report in newest):
            return True
        networks = {_network(peer, report) for peer, report in self._reports.items() if report in newest}
        return False if len(newest) >= OTHERS and len(networks) >= self._networks else None

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The addresses that enough others from different networks have dialled with success, the most
        certain first."""
        votes: Counter[Address] = Counter()
        seen: dict[tuple[Address, str], None] = {}
        for report in self._newest:
            network = "" if report.there is None else network_of(report.there)
            for address in report.worked:
                if network and (address, network) not in seen:
                    seen[address, network] = None
                    votes[address] += 1
        return tuple(address for address, count in votes.most_common() if count >= OTHERS)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that others can make grow."""
        return {"reports": (len(self._reports), REPORTS_MAX), "unasked": (len(self._unasked), UNASKED_MAX)}

    def next(self, now: float, peers: Sequence[PeerId], networks: int = OTHERS) -> PeerId | None:
        """Return the one of `peers` to ask now. If there is none, return None; `deadline` says when to call
        again. The peers are known to be in this many `networks`."""
        self._networks = max(1, min(OTHERS, networks))
        self._forget(now)
        if now < self.deadline:
            return None
        self.deadline = now + self._pause
        willing = [peer for peer in peers if peer not in self._unasked]
        fresh = [peer for peer in willing if peer not in self._reports]
        if fresh:
            return self._rng.choice(fresh)
        # In a swarm of three, the same peers are asked again, starting with the one with the oldest answer.
        old = [peer for peer in self._reports if peer in willing]
        if old and self._is_hurried:
            again_at = self._reports[old[0]].at + AGAIN_SECONDS
            self.deadline = max(self.deadline, again_at)
            return old[0] if again_at <= now else None
        return old[0] if old and self.asked >= min(OTHERS, len(willing)) and self._is_stale(now) else None

    def answered(self, now: float, peer: PeerId, report: DialReport) -> None:
        """Add the report of `peer`."""
        self._pause, self._is_hurried = self._settings.soon_seconds, False
        self._reports.pop(peer, None)
        self._reports[peer] = report
        while len(self._reports) > REPORTS_MAX:
            self._reports.popitem(last=False)
        # The pause that was in force when the peer was asked may have been long.
        self.deadline = min(self.deadline, now + self._pause)
        if self.verdict is not None and self.asked >= OTHERS:
            self.deadline = now + self._patience_seconds

    def hurry(self, now: float) -> None:
        """Ask the next peer soon, even one that has answered before, because an IP version has no verdict
        yet."""
        self._is_hurried = True
        self.deadline = min(self.deadline, now + self._pause)

    def failed(self, now: float, peer: PeerId) -> None:
        """Note that `peer` could not be asked, or did not try."""
        self._unasked[peer] = now
        # Double the pause: in a swarm of older versions no peer may answer for a long time.
        self._pause = min(2 * self._pause, self._settings.doubt_seconds)
        self.deadline = now + self._pause
        while len(self._unasked) > UNASKED_MAX:
            self._unasked.popitem(last=False)

    @property
    def _newest(self) -> list[DialReport]:
        """Return the newest reports: one for each network, and more only if there are too few networks."""
        latest: dict[object, DialReport] = {}
        others: list[DialReport] = []
        for peer, report in reversed(self._reports.items()):
            if report.outcomes and latest.setdefault(_network(peer, report), report) is not report:
                others.append(report)
        chosen = [*latest.values(), *others][:OTHERS]
        return sorted(chosen, key=lambda report: report.at)

    def _is_stale(self, now: float) -> bool:
        return all(report.at + self._patience_seconds <= now for report in self._newest)

    @property
    def _patience_seconds(self) -> float:
        is_reached = all(report.worked for report in self._newest)
        return self._settings.later_seconds if is_reached else self._settings.doubt_seconds

    def _forget(self, now: float) -> None:
        for peer in [peer for peer, report in self._reports.items() if report.at + BELIEVED_SECONDS < now]:
            del self._reports[peer]
        for peer in [peer for peer, since in self._unasked.items() if since + UNASKED_SECONDS < now]:
            del self._unasked[peer]


class FamilyVerdicts:
    """Whether hosts to which this node has not written can reach it by TCP, for each IP version. IPv6 is not
    translated, but a firewall may let in only answers."""

    def __init__(self) -> None:
        self._found: dict[int, OrderedDict[PeerId, tuple[float, bool]]] = {}
        self._tried_at: dict[int, float] = {}

    def tried(self, now: float, family: int) -> None:
        """Record a request to a peer over this IP version, whatever the outcome."""
        self._tried_at[family] = now

    def note(self, now: float, peer: PeerId, report: DialReport) -> None:
        """Record a peer's outcomes, or that it did not try."""
        for family, kind in ((4, "ip4"), (6, "ip6")):
            tried = [reason for address, reason in report.outcomes if address.kind == kind]
            if tried:
                found = self._found.setdefault(family, OrderedDict())
                found.pop(peer, None)
                found[peer] = now, not all(tried)
                while len(found) > FAMILY_OTHERS:
                    found.popitem(last=False)

    def verdict(self, family: int, now: float) -> bool | None:
        """Return whether new hosts get through; None while too few peers have tried."""
        reports = self._found.get(family, OrderedDict())
        found = [worked for at, worked in reports.values() if now - at <= BELIEVED_SECONDS]
        if any(found):
            return True
        return False if len(found) >= FAMILY_OTHERS else None

    def unknown(self, own: Collection[int], now: float) -> set[int]:
        """Return the IP versions without a verdict."""
        return {family for family in own if self.verdict(family, now) is None}

    def next(self, own: Collection[int], theirs: Collection[int]) -> int | None:
        """Return the IP version for the next request: of those that both peers have, the least recently used.
        Return None if there is no choice."""
        both = sorted(set(own) & set(theirs))
        if len(set(own)) < 2 or not both:
            return None
        return min(both, key=self._asked_at)

    def _asked_at(self, family: int) -> float:
        answered_at = [at for at, _ in self._found.get(family, {}).values()]
        return max([self._tried_at.get(family, -inf), *answered_at])

    def text(self, own: Collection[int], now: float) -> str:
        """Return the known state as text for people, for a node with both IP versions; else empty."""
        if len(set(own)) < 2:
            return ""
        parts = []
        for family in sorted(set(own)):
            verdict = self.verdict(family, now)
            if verdict is not None:
                parts.append(f"IPv{family} {_FAMILY_TEXTS[verdict]}")
        return ", ".join(parts)


_FAMILY_TEXTS = {
    True: "lets new hosts in",
    False: "lets in only hosts that this node has contacted",
}


def count_networks(hosts: Iterable[str | None]) -> int:
    """Return the number of different networks of these hosts; unknown ones do not count."""
    return len({network for host in hosts if host and (network := _network_of_host(host))})


def _network(peer: PeerId, report: DialReport) -> object:
    """Return the network of a report, or its peer if that is unknown."""
    return (network_of(report.there) if report.there is not None else "") or peer


def network_of(address: Address) -> str:
    """Return the network of an address: a /24 of IPv4, a /48 of IPv6; empty for a name."""
    return _network_of_host(address.host)


def _network_of_host(text: str) -> str:
    try:
        host = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return ""
    bits = 24 if host.version == 4 else 48
    return str(ipaddress.ip_network((host, bits), strict=False))
