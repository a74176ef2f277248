"""What peers measured of each other, and what a planner believes of it: links, and rates of stages.

A peer publishes what it measured of others, never of itself. Of a link each end says what it saw, and the
lower of both counts: an end that boasts wins nothing, and one that belittles a link harms only links of its
own. Of a peer's rate its own claim is the most that counts, and what others found in a run wins over it. What
the planner measured itself wins over what anybody says. No torch, no clock.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Peer
from partition.plan.problem import LINK_NANOSECONDS, Link
from partition.plan.rates import Calibration

LINKS_MAX = 10
STAGES_MAX = 6
OBSERVED_BYTES_MAX = 900
"""As a record of the DHT holds."""
BYTES_PER_SECOND_MAX = 10**12
NANOSECONDS_MAX = 10 * 10**9
"""One way; a slower link carries no training."""
FLOPS_PER_SECOND_MAX = 10**18

Rate = Annotated[int, msgspec.Meta(ge=0, le=BYTES_PER_SECOND_MAX)]


class LinkRow(msgspec.Struct, frozen=True, array_like=True):
    """One link as its author saw it: bytes a second sent to `peer` and taken from it, and nanoseconds one
    way. 0 is not measured."""

    peer: Peer
    sent: Rate
    taken: Rate
    nanoseconds: Annotated[int, msgspec.Meta(ge=0, le=NANOSECONDS_MAX)] = 0


class StageRow(msgspec.Struct, frozen=True, array_like=True):
    """How fast a replica was found to be in a run that the author committed, in the unit of a plan's
    rates."""

    peer: Peer
    flops_per_second: Annotated[int, msgspec.Meta(ge=1, le=FLOPS_PER_SECOND_MAX)]


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """All that one peer measured of others lately."""

    links: Annotated[tuple[LinkRow, ...], msgspec.Meta(max_length=LINKS_MAX)] = ()
    stages: Annotated[tuple[StageRow, ...], msgspec.Meta(max_length=STAGES_MAX)] = ()


RELAYED_BYTES_PER_SECOND = 625_000
"""A link that nobody measured and a relay may carry is taken for so fast: half of what a relay gives all
circuits together (`[relay] upload`)."""
RELAYED_NANOSECONDS = 50_000_000


def limited_rows(rows: Iterable[LinkRow], upload: int, download: int) -> tuple[LinkRow, ...]:
    """Return links as their author sees them that gives no more than these bytes a second, 0 for any."""
    most = upload or BYTES_PER_SECOND_MAX, download or BYTES_PER_SECOND_MAX
    return tuple(
        LinkRow(row.peer, min(row.sent, most[0]), min(row.taken, most[1]), row.nanoseconds) for row in rows
    )


def encode_observed(observed: Observed) -> bytes:
    """The value of a record."""
    return encode(observed)


def decode_observed(data: bytes, author: PeerId) -> Observed:
    """What `author` measured of others; RemoteProtocolError where it speaks of itself, or of one twice."""
    found: Observed = decode(data, Observed, bytes_max=OBSERVED_BYTES_MAX)
    for rows in (found.links, found.stages):
        peers = [row.peer for row in rows]
        if author in peers or len(set(peers)) < len(peers):
            raise RemoteProtocolError("measurements of oneself, or of one peer twice")
    return found


@dataclass(frozen=True)
class Knowledge:
    """What a planner `me` knows by measurement: `calibrations` by the peer that made them for itself,
    `observed` by author."""

    me: PeerId | None = None
    calibrations: Mapping[PeerId, Calibration] = field(default_factory=dict)
    observed: Mapping[PeerId, Observed] = field(default_factory=dict)
    hidden: Collection[PeerId] = ()
    """Peers that others reach through relays: between two of these there may be one."""

    def flops_per_second(self, peer: PeerId, claimed: int) -> int:
        """Return the rate to plan with: what `peer` claims, or less where others found less."""
        return min(claimed, self._ratings.get(peer, claimed))

    @cached_property
    def _ratings(self) -> Mapping[PeerId, int]:
        found: dict[PeerId, dict[PeerId, int]] = {}
        for author, observed in self.observed.items():
            for row in observed.stages:
                if row.peer != author:
                    found.setdefault(PeerId(row.peer), {})[author] = row.flops_per_second
        return {
            peer: rows[self.me] if self.me in rows else _lower_median(rows.values())
            for peer, rows in found.items()
        }

    def links(self, peers: Collection[PeerId]) -> dict[tuple[PeerId, PeerId], Link]:
        """Return each direction between two of these peers of which anything is known.

        A link that neither end measured is the slower of what its ends have with others. Nothing is known of
        one whose ends have both been measured with nobody. Between two that are both hidden it is taken for a
        relayed one, until either has measured it: then it is what it is on the way that they use.
        """
        said = self._said()
        own = self._typical(said)
        found = {}
        for one in peers:
            for other in peers:
                if one == other:
                    continue
                link = self._between(said, one, other)
                if link is None and (one, True) in own and (other, False) in own:
                    ends = own[one, True], own[other, False]
                    link = Link(
                        min(end.bytes_per_second for end in ends), max(end.nanoseconds for end in ends)
                    )
                    if one in self.hidden and other in self.hidden:
                        rate = min(link.bytes_per_second, RELAYED_BYTES_PER_SECOND)
                        link = Link(rate, 2 * link.nanoseconds)
                elif link is None and one in self.hidden and other in self.hidden:
                    link = Link(RELAYED_BYTES_PER_SECOND, RELAYED_NANOSECONDS)
                if link is not None:
                    found[one, other] = link
        return found

    def _said(self) -> dict[tuple[PeerId, PeerId, PeerId], tuple[int, int]]:
        """By sender, receiver and author: (bytes a second, nanoseconds)."""
        found = {}
        for author, observed in self.observed.items():
            for row in observed.links:
                peer = PeerId(row.peer)
                if row.sent:
                    found[author, peer, author] = row.sent, row.nanoseconds
                if row.taken:
                    found[peer, author, author] = row.taken, row.nanoseconds
        return found

    def _between(
        self, said: Mapping[tuple[PeerId, PeerId, PeerId], tuple[int, int]], one: PeerId, other: PeerId
    ) -> Link | None:
        rows = [(end, said[one, other, end]) for end in (one, other) if (one, other, end) in said]
        if not rows:
            return None
        mine = [row for end, row in rows if end == self.me]
        counted = mine or [row for _, row in rows]
        waits = [nanoseconds for _, nanoseconds in counted if nanoseconds]
        return Link(min(rate for rate, _ in counted), max(waits, default=LINK_NANOSECONDS))

    def _typical(
        self, said: Mapping[tuple[PeerId, PeerId, PeerId], tuple[int, int]]
    ) -> dict[tuple[PeerId, bool], Link]:
        """What a peer sends at (True) and takes at (False) with those that it was measured with."""
        rates: dict[tuple[PeerId, bool], list[tuple[int, int]]] = {}
        for one, other in sorted({(one, other) for one, other, _ in said}):
            link = self._between(said, one, other)
            assert link is not None
            rates.setdefault((one, True), []).append((link.bytes_per_second, link.nanoseconds))
            rates.setdefault((other, False), []).append((link.bytes_per_second, link.nanoseconds))
        return {
            key: Link(
                _lower_median(rate for rate, _ in rows), _lower_median(nanoseconds for _, nanoseconds in rows)
            )
            for key, rows in rates.items()
        }


NOTHING = Knowledge()


def _lower_median(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
