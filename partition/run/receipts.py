"""Receipts of contribution: work that peers did for each other's runs, and one peer's evaluation of them.

A receipt is one body with two signatures: by the peer that measured the work, and by the provider that did
it. One receipt covers all work of one kind that one peer measured of one provider in one run; a newer one
replaces it. The kinds are:

- compute: FLOPs, not seconds. A committer, or the head of a column, knows the micro-batches of each stage's
  holder and their cost by the graph, and a slow provider gains nothing by being slow.
- data, checkpoint: bytes from the provider with the right hash.
- averaging: bytes of a member's tensors in a round that was completed here.

No peer's claim about itself counts. A signature costs nothing, so two keys can sign any receipt for each
other. A receipt therefore counts by the reader's own knowledge of the peer that measured it (`Credits`):

- given: a peer's work for this node's own runs, as this node measured it.
- vouched: receipts of a peer that itself gave to this node. All receipts of one peer together count at most
  what it gave. So colluding keys that really gave G have at most 2 G between them, however many they are.
- witnessed: receipts of a committer for whose runs this node computed, and which reported that truthfully; in
  sum at most what it reported of this node. By this a node that never requested a run ranks others. It can be
  bought with this node's own work, so alone it raises no weight above UNPROVEN_WEIGHT_MAX.
- averaged: bytes received in rounds of averaging. A member that trains cannot be told from one that returns
  what it got, so this raises no weight above that either, and no reports about it count.

Only the beneficiary is trusted: a receipt counts if its requester measured it, and for the requester of its
run. An honest member would otherwise vouch for work of the requester's other keys in the run, which costs
them nothing and serves no other peer.

All credits halve in HALF_LIFE_SECONDS. A stranger's weight is 1, and no weight exceeds WEIGHT_MAX. Sans-IO.
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
"""Half-life: old work says little about a machine's owner, and a key may have changed hands."""
AGE_SECONDS_MAX = 6 * HALF_LIFE_SECONDS
SKEW_SECONDS = 600.0
WEIGHT_MAX = 8.0
"""Largest weight as a multiple of a stranger's: a generous peer does not shut out all others."""
UNPROVEN_WEIGHT_MAX = 1.05
"""Limit for unproven credit, below the weight that counts as having given (GIVEN_WEIGHT_MIN of a queue's
turns). Credit that this node's own work or useless bytes can buy makes no peer more than a stranger."""
BYTES_PER_SLOT_SECOND = 12_500_000
"""Bytes that count as much as a second of a slot's computing: a full line of 100 Mbit/s."""
SIZE_BYTES_MAX = 2**62
PEERS_MAX = 4_096
"""Peers with an account of each kind; the smallest is forgotten first."""
LEARNED_MAX = 1_024
"""Peers whose receipts are remembered, the most recently read ones."""
ROWS_MAX = 32
"""Receipts that are read of one peer."""


Kind = Literal["compute", "data", "checkpoint", "averaging"]


class ReceiptBody(msgspec.Struct, frozen=True, array_like=True):
    """The FLOPs that `provider` computed, or the bytes it sent, for `requester`'s run: the total that one
    peer has measured."""

    run: Hash
    requester: Peer
    provider: Peer
    flops: Annotated[int, msgspec.Meta(ge=0, le=FLOPS_MAX)]
    microbatches: Annotated[int, msgspec.Meta(ge=0, le=FLOPS_MAX)]
    wall_milliseconds: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    kind: Kind = "compute"
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=SIZE_BYTES_MAX)] = 0


class Receipt(msgspec.Struct, frozen=True, array_like=True):
    """The signed measurement, and the provider's fact over the same body."""

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
        """Return the worth in FLOPs; a byte counts for `flops_per_byte`."""
        return self.flops + self.size_bytes * flops_per_byte


def check_measured(signer: Signer, fact: Fact) -> ReceiptRow:
    """Return a peer's measurement. Raises RemoteProtocolError if it is about itself or for no other peer."""
    signer.check(MEASURED_PURPOSE, fact)
    return read_measured(fact)


def read_measured(fact: Fact) -> ReceiptRow:
    """Return the measurement of a fact whose signature was checked before. Raises RemoteProtocolError."""
    body: ReceiptBody = decode(fact.body, ReceiptBody, bytes_max=RECEIPT_BYTES_MAX)
    measurer = PeerId(fact.author)
    if body.provider in (measurer, body.requester):
        raise RemoteProtocolError("a receipt for one's own work, or by its provider")
    is_computed = body.kind == "compute"
    if is_computed != bool(body.flops and body.microbatches) or is_computed == bool(body.size_bytes):
        raise RemoteProtocolError("a receipt for nothing, or for something of another kind")
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
    """Return the measurement of a receipt. Raises RemoteProtocolError if a signature is missing."""
    row = check_measured(signer, receipt.measured)
    if signer.check(ACCEPTED_PURPOSE, receipt.accepted) != row.provider:
        raise RemoteProtocolError("a receipt that its provider has not signed")
    if receipt.accepted.body != receipt.measured.body:
        raise RemoteProtocolError("a receipt of two bodies")
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
"""FLOPs, and the wall time up to which they are halved."""


class Credits:
    """The contributions of others as the peer `me` knows them. Times are wall seconds."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self.given: dict[PeerId, Account] = {}
        self.worked: dict[PeerId, Account] = {}
        self.averaged: dict[PeerId, Account] = {}
        self._learned: dict[PeerId, dict[PeerId, float]] = {}
        self._totals: dict[PeerId, float] = {}

    def gave(self, now: float, peer: PeerId, flops: float) -> None:
        """Note the work of `peer` for a run of this node's own, as this node measured it."""
        if peer != self._me:
            _add(self.given, now, peer, flops)

    def averaged_with(self, now: float, peer: PeerId, flops: float) -> None:
        """Note the data of `peer` in rounds of averaging."""
        if peer != self._me:
            _add(self.averaged, now, peer, flops)

    def worked_for(self, now: float, measurer: PeerId, flops: float) -> None:
        """Note this node's own work that `measurer` reported, at most what this node knows to be true."""
        if measurer != self._me:
            _add(self.worked, now, measurer, flops)

    def learn(
        self, now: float, peer: PeerId, rows: Iterable[ReceiptRow], flops_per_byte: float = 0.0
    ) -> None:
        """Replace the known receipts of `peer`; its statements about others' measurements are skipped."""
        self._forget(peer)
        shown: dict[tuple[PeerId, bytes, Kind], float] = {}
        for row in list(rows)[:ROWS_MAX]:
            is_recent = -SKEW_SECONDS <= now - row.at <= AGE_SECONDS_MAX
            has_benefited = row.requester in (row.measurer, self._me) and row.kind != "averaging"
            if row.provider == peer and row.measurer not in (self._me, peer) and is_recent and has_benefited:
                # A newer receipt includes all older ones, so each is shown at most once.
                key = row.measurer, row.run, row.kind
                shown[key] = max(shown.get(key, 0.0), row.worth(flops_per_byte))
        found: dict[PeerId, float] = {}
        for (measurer, _, _), amount in shown.items():
            found[measurer] = found.get(measurer, 0.0) + amount
        # Receipts of strangers count nothing, and would only take room.
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
        """Return the contribution of `peer`; `share_flops` given double its weight."""
        given = _left(self.given, now, peer)
        vouched = self._through(self.given, now, peer)
        witnessed = self._through(self.worked, now, peer)
        averaged = _left(self.averaged, now, peer)
        weight = 1.0 + (given + vouched) / share_flops
        weight += min(max(0.0, UNPROVEN_WEIGHT_MAX - weight), (witnessed + averaged) / share_flops)
        return Contribution(given, vouched, witnessed, averaged, min(WEIGHT_MAX, weight))

    def _through(self, backing: Mapping[PeerId, Account], now: float, peer: PeerId) -> float:
        """Return the receipts' total for `peer`; each committer's receipts count up to its backing."""
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
