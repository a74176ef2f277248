"""Measurements of peers by each other, and the planner's trust in them: links, and rates of stages.

A peer publishes measurements of others, never of itself. Each end of a link publishes its own measurement,
and the lower one counts. So overstating gains nothing, and understating harms only the peer's own links. A
peer's own claim is an upper bound on its rate; others' measurements in a run override it. The planner's own
measurements override all others. No torch, no clock.
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
"""Maximum size of the record, which is the maximum of a value in the DHT."""
BYTES_PER_SECOND_MAX = 10**12
NANOSECONDS_MAX = 10 * 10**9
"""Maximum one-way delay. A slower link cannot carry training."""
FLOPS_PER_SECOND_MAX = 10**18

Rate = Annotated[int, msgspec.Meta(ge=0, le=BYTES_PER_SECOND_MAX)]


class LinkRow(msgspec.Struct, frozen=True, array_like=True):
    """One link as its author measured it: bytes per second sent to `peer` and taken from it, and the one-way
    delay in nanoseconds. 0 means not measured."""

    peer: Peer
    sent: Rate
    taken: Rate
    nanoseconds: Annotated[int, msgspec.Meta(ge=0, le=NANOSECONDS_MAX)] = 0


class StageRow(msgspec.Struct, frozen=True, array_like=True):
    """A replica's speed, measured in a run that the author committed, in the unit of a plan's rates."""

    peer: Peer
    flops_per_second: Annotated[int, msgspec.Meta(ge=1, le=FLOPS_PER_SECOND_MAX)]


class Observed(msgspec.Struct, frozen=True, array_like=True):
    """One peer's recent measurements of others."""

    links: Annotated[tuple[LinkRow, ...], msgspec.Meta(max_length=LINKS_MAX)] = ()
    stages: Annotated[tuple[StageRow, ...], msgspec.Meta(max_length=STAGES_MAX)] = ()


RELAYED_BYTES_PER_SECOND = 625_000
"""Assumed rate of an unmeasured link that may go through a relay: half of a relay's total for circuits
(`[relay] upload`)."""
RELAYED_NANOSECONDS = 50_000_000


def limited_rows(rows: Iterable[LinkRow], upload: int, download: int) -> tuple[LinkRow, ...]:
    """Return link rows limited to these bytes per second (0: no limit), which are the limits of their
    author."""
    most = upload or BYTES_PER_SECOND_MAX, download or BYTES_PER_SECOND_MAX
    return tuple(
        LinkRow(row.peer, min(row.sent, most[0]), min(row.taken, most[1]), row.nanoseconds) for row in rows
    )


def encode_observed(observed: Observed) -> bytes:
    """Return the value of the DHT record."""
    return encode(observed)


def decode_observed(data: bytes, author: PeerId) -> Observed:
    """Return the measurements by `author`. Raises RemoteProtocolError if the author measures itself, or one
    peer twice."""
    found: Observed = decode(data, Observed, bytes_max=OBSERVED_BYTES_MAX)
    for rows in (found.links, found.stages):
        peers = [row.peer for row in rows]
        if author in peers or len(set(peers)) < len(peers):
            raise RemoteProtocolError("measurements include their author, or one peer twice")
    return found


@dataclass(frozen=True)
class Knowledge:
    """A planner's knowledge from measurements, as the peer `me`: `calibrations` by the peer that measured
    itself, `observed` by author."""

    me: PeerId | None = None
    calibrations: Mapping[PeerId, Calibration] = field(default_factory=dict)
    observed: Mapping[PeerId, Observed] = field(default_factory=dict)
    hidden: Collection[PeerId] = ()
    """Peers that others reach through relays. A link between two of them may be relayed."""

    def flops_per_second(self, peer: PeerId, claimed: int) -> int:
        """Return the rate to plan with: the claim of `peer`, or less if others measured less."""
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
        """Return each known direction between two of these peers.

        A link that neither end has measured is estimated as the slower of the sender's typical sending link
        and the receiver's typical receiving link; it is unknown if one of these is unknown. A link between
        two hidden peers counts as relayed until one of them has measured it.
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
        """Return (bytes per second, nanoseconds) by sender, receiver and author."""
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
        """Return the typical link of each peer for sending (True) or receiving (False), over all measurements
        of its links."""
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
