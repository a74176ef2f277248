"""Receipts of contribution: work that peers did for each other's runs, and one peer's evaluation of the
receipts.

A receipt is one body with two signatures: one by the peer that measured the work (the measurer), and one by
the provider that did it. One receipt covers all work of one kind by one provider in one run, as one peer
measured it; a newer receipt replaces an older one. The kinds are:

- compute: FLOPs, not seconds, so a slow provider gains nothing by being slow. A committer, or the head of a
  column, knows which micro-batches each holder of a stage computed, and their cost from the graph.
- data, checkpoint: bytes that the provider sent and whose hash was right.
- averaging: bytes of a member's tensors in a round that was completed here.

No peer's claim about itself counts. A signature costs nothing, so two keys can sign any receipt for each
other. Therefore the value of a receipt depends on what the reader itself knows about the measurer
(`Credits`):

- given: a peer's work for this node's own runs, as this node measured it.
- vouched: receipts measured by a peer that itself gave to this node. All receipts of one measurer together
  count at most the amount that the measurer gave. So colluding keys that really gave G count for at most 2 G
  together, however many they are.
- witnessed: receipts measured by a committer for whose runs this node computed, and which reported that work
  truthfully. Their sum counts at most the amount of this node's work that the committer reported. So a node
  that never requested a run can still rank others. This credit can be bought with this node's own work, so
  alone it raises no weight above UNPROVEN_WEIGHT_MAX.
- averaged: bytes received in rounds of averaging. A member that trains cannot be told from one that returns
  what it got, so this credit raises no weight above UNPROVEN_WEIGHT_MAX either, and reports about it do not
  count.

Only the peer that benefits is trusted: a receipt counts only if the run's requester measured it, or if the
run is this node's own. Otherwise an honest member would vouch for work that the requester's other keys did in
the run, which costs them nothing and serves no other peer.

All credits halve in HALF_LIFE_SECONDS. An unknown peer has the weight 1, and no weight exceeds WEIGHT_MAX.
Sans-IO.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from partition.plan.plan import Hash, Peer

MEASURED_PURPOSE = "receipt measured"
ACCEPTED_PURPOSE = "receipt accepted"
RECEIPT_BYTES_MAX = 256
FLOPS_MAX = 2**62
HALF_LIFE_SECONDS = 30 * 24 * 3600.0
"""Half-life of credits. Old work says little about a machine's owner, and a key may have changed hands."""
AGE_SECONDS_MAX = 6 * HALF_LIFE_SECONDS
SKEW_SECONDS = 600.0
WEIGHT_MAX = 8.0
"""Maximum weight, as a multiple of an unknown peer's weight, so that a generous peer does not shut out all
others."""
UNPROVEN_WEIGHT_MAX = 1.05
"""Limit of the weight that unproven credit can give. It lies below GIVEN_WEIGHT_MIN of a queue's turns, from
which a peer counts as having given. So credit that can be bought with this node's own work, or with useless
bytes, puts no peer above an unknown one."""
BYTES_PER_SLOT_SECOND = 12_500_000
"""Number of bytes that count as much as one second of a slot's computing: a full line of 100 Mbit/s."""
SIZE_BYTES_MAX = 2**62
PEERS_MAX = 4_096
"""Maximum number of peers with an account of each kind. The smallest account is forgotten first."""
LEARNED_MAX = 1_024
"""Maximum number of peers whose receipts are remembered, those read most recently."""
ROWS_MAX = 32
"""Maximum number of receipts that are read from one peer."""


Kind = Literal["compute", "data", "checkpoint", "averaging"]


class ReceiptBody(msgspec.Struct, frozen=True, array_like=True):
    """The FLOPs that `provider` computed, or the bytes that it sent, for `requester`'s run: the total that
    one peer has measured."""

    run: Hash
    requester: Peer
    provider: Peer
    flops: Annotated[int, msgspec.Meta(ge=0, le=FLOPS_MAX)]
    microbatches: Annotated[int, msgspec.Meta(ge=0, le=FLOPS_MAX)]
    wall_milliseconds: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    kind: Kind = "compute"
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)] = 0


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The measurer's signed fact, and the provider's fact with the same body."""

    measured: Fact
    accepted: Fact


@dataclass(frozen=True)
class ReceiptRow:
    """A checked receipt."""

    run: bytes
    requester: PeerId
    provider: PeerId
    measurer: PeerId
    flops: int
    microbatches: int
    at: float
    kind: Kind = "compute"
    size_bytes: int = 0

    def worth(self, flops_per_byte: float) -> float:
        """Return the worth in FLOPs; a byte counts as `flops_per_byte`."""
        return self.flops + self.size_bytes * flops_per_byte


def check_measured(signer: Signer, fact: Fact) -> ReceiptRow:
    """Return a peer's measurement. Raises RemoteProtocolError if the measurement is about the peer's own
    work, or about the requester's."""
    signer.check(MEASURED_PURPOSE, fact)
    return read_measured(fact)


def read_measured(fact: Fact) -> ReceiptRow:
    """Return the measurement in a fact whose signature was checked before. Raises RemoteProtocolError."""
    body: ReceiptBody = decode(fact.body, ReceiptBody, bytes_max=RECEIPT_BYTES_MAX)
    measurer = PeerId(fact.author)
    if body.provider in (measurer, body.requester):
        raise RemoteProtocolError("a receipt covers work of its own measurer or of the run's requester")
    is_computed = body.kind == "compute"
    if is_computed != bool(body.flops and body.microbatches) or is_computed == bool(body.size_bytes):
        raise RemoteProtocolError("a receipt has no amount, or an amount of another kind")
    return ReceiptRow(
        run=body.run,
        requester=PeerId(body.requester),
        provider=PeerId(body.provider),
        measurer=measurer,
        flops=body.flops,
        microbatches=body.microbatches,
        at=body.wall_milliseconds / 1000,
        kind=body.kind,
        size_bytes=body.size_bytes,
    )


def check_receipt(signer: Signer, receipt: Receipt) -> ReceiptRow:
    """Return the measurement of a receipt. Raises RemoteProtocolError if a signature is missing or wrong."""
    row = check_measured(signer, receipt.measured)
    if signer.check(ACCEPTED_PURPOSE, receipt.accepted) != row.provider:
        raise RemoteProtocolError("a receipt is not signed by its provider")
    if receipt.accepted.body != receipt.measured.body:
        raise RemoteProtocolError("the two facts of a receipt differ")
    return row


@dataclass(frozen=True)
class Contribution:
    """The contributions that count for one peer, in FLOPs, and the weight of its share."""

    given: float = 0.0
    vouched: float = 0.0
    witnessed: float = 0.0
    averaged: float = 0.0
    weight: float = 1.0


Account = tuple[float, float]
"""An amount in FLOPs, and the wall time at which it had this value; it halves from then on."""


class Credits:
    """The contributions of other peers, as the peer `me` knows them. Times are wall seconds."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self.given: dict[PeerId, Account] = {}
        self.worked: dict[PeerId, Account] = {}
        self.averaged: dict[PeerId, Account] = {}
        self._learned: dict[PeerId, dict[PeerId, float]] = {}
        self._totals: dict[PeerId, float] = {}

    def gave(self, now: float, peer: PeerId, flops: float) -> None:
        """Note the work of `peer` for one of this node's own runs, as this node measured it."""
        if peer != self._me:
            _add(self.given, now, peer, flops)

    def averaged_with(self, now: float, peer: PeerId, flops: float) -> None:
        """Note the data that `peer` sent in rounds of averaging."""
        if peer != self._me:
            _add(self.averaged, now, peer, flops)

    def worked_for(self, now: float, measurer: PeerId, flops: float) -> None:
        """Note this node's own work as `measurer` reported it, at most the amount that this node knows to be
        true."""
        if measurer != self._me:
            _add(self.worked, now, measurer, flops)

    def learn(
        self, now: float, peer: PeerId, rows: Iterable[ReceiptRow], flops_per_byte: float = 0.0
    ) -> None:
        """Replace the known receipts of `peer`. Receipts that it shows about other peers' work are
        skipped."""
        self._forget(peer)
        shown: dict[tuple[PeerId, bytes, Kind], float] = {}
        for row in list(rows)[:ROWS_MAX]:
            is_recent = -SKEW_SECONDS <= now - row.at <= AGE_SECONDS_MAX
            has_benefited = row.requester in (row.measurer, self._me) and row.kind != "averaging"
            if row.provider == peer and row.measurer not in (self._me, peer) and is_recent and has_benefited:
                # A newer receipt includes all older ones, so only the largest one counts.
                key = row.measurer, row.run, row.kind
                shown[key] = max(shown.get(key, 0.0), row.worth(flops_per_byte))
        found: dict[PeerId, float] = {}
        for (measurer, _, _), amount in shown.items():
            found[measurer] = found.get(measurer, 0.0) + amount
        # Receipts measured by unknown peers count for nothing, and would only take up room.
        known = {one: flops for one, flops in found.items() if one in self.given or one in self.worked}
        if not known:
            return
        while len(self._learned) >= LEARNED_MAX:
            self._forget(next(iter(self._learned)))
        self._learned[peer] = known
        for measurer, flops in known.items():
            self._totals[measurer] = self._totals.get(measurer, 0.0) + flops

    def _forget(self, peer: PeerId) -> None:
        for measurer, flops in self._learned.pop(peer, {}).items():
            self._totals[measurer] -= flops
            if not any(measurer in rows for rows in self._learned.values()):
                del self._totals[measurer]

    def contribution(self, now: float, peer: PeerId, share_flops: float) -> Contribution:
        """Return the contribution of `peer`. A peer that gave `share_flops` gets double the weight of an
        unknown peer."""
        given = _left(self.given, now, peer)
        vouched = self._through(self.given, now, peer)
        witnessed = self._through(self.worked, now, peer)
        averaged = _left(self.averaged, now, peer)
        weight = 1.0 + (given + vouched) / share_flops
        weight += min(max(0.0, UNPROVEN_WEIGHT_MAX - weight), (witnessed + averaged) / share_flops)
        return Contribution(given, vouched, witnessed, averaged, min(WEIGHT_MAX, weight))

    def _through(self, backing: Mapping[PeerId, Account], now: float, peer: PeerId) -> float:
        """Return the total of the receipts for `peer`; the receipts of each measurer count up to its amount
        in `backing`."""
        return sum(
            flops * min(1.0, _left(backing, now, measurer) / self._totals[measurer])
            for measurer, flops in self._learned.get(peer, {}).items()
        )


def _left(accounts: Mapping[PeerId, Account], now: float, peer: PeerId) -> float:
    flops, at = accounts.get(peer, (0.0, now))
    return float(flops * 0.5 ** (max(0.0, now - at) / HALF_LIFE_SECONDS))


def _add(accounts: dict[PeerId, Account], now: float, peer: PeerId, flops: float) -> None:
    accounts[peer] = _left(accounts, now, peer) + max(0.0, flops), now
    while len(accounts) > PEERS_MAX:
        del accounts[min(accounts, key=lambda each: _left(accounts, now, each))]
