"""`/peerloom/receipts/2`: signed receipts of peers' contributions to each other's runs.

As a committer, or as the head of a column, this node measures the computing of others. As a receiver, it
counts the bytes of data sets, checkpoints and averaging rounds. It asks each provider to sign the measurement
too. As a provider it signs others' measurements of its own work, stores the receipts, and shows them on
request. As a provider with a queue it fetches the receipts of requesters and weighs them.
`partition.run.receipts` decides how much receipts count.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId, parse_peer, peer_text
from node.containment import contain
from node.content.graphs import Models
from node.documents import rfc3339
from node.errors import StreamClosed, Unreachable
from node.protocols.calls import call
from node.protocols.manifest import Run, run_text
from node.protocols.receipts import (
    ANSWER_BYTES_MAX,
    QUESTION_BYTES_MAX,
    RECEIPTS_PROTOCOL,
    AcceptedReceipt,
    Answer,
    NoReceipt,
    OfferReceipt,
    Question,
    ShownReceipts,
    ShowReceipts,
)
from node.runs.receipt_totals import Key, Totals
from node.runs.receipts_file import EARNED_MAX, read_receipts, write_receipts
from node.seams import Seams, Stream, StreamLimits
from partition.model.graph import Graph
from partition.plan.layer_costs import layer_costs
from partition.plan.plan import Plan
from partition.run.receipts import (
    ACCEPTED_PURPOSE,
    BYTES_PER_SLOT_SECOND,
    MEASURED_PURPOSE,
    PEERS_MAX,
    ROWS_MAX,
    Contribution,
    Credits,
    Receipt,
    ReceiptBody,
    ReceiptRow,
    check_measured,
    check_receipt,
    read_measured,
)

STREAMS = StreamLimits(message_bytes_max=QUESTION_BYTES_MAX, streams_per_peer_max=2)
CALL_SECONDS_MAX = 5.0
ISSUE_SECONDS = 60.0
"""Seconds between two receipts for one provider in one run. If a committer crashes, the work of one interval
may be lost."""
FETCH_SECONDS = 600.0
"""Seconds after which a requester's receipts are fetched again while it asks for slots."""
FETCHING_MAX = 8
BEGUN_MAX = 1_024
COSTS_MAX = 64
TRIES_MAX = 30
"""If a provider is unreachable this many times in a row, the attempt to have its receipt signed ends."""
RATE_SLACK = 4.0
"""Factor that limits a committer's claim about this node's work, relative to the slot's measured rate. It is
generous because the rate is only an estimate, and models differ."""
FULL_SHARE_SECONDS = 3_600.0
"""A peer that contributed this many seconds of one slot's work here gets twice the share of an unknown
peer."""
SERVED_MAX = 1_024
"""Maximum number of peers for which the sent bytes are remembered: the most recently served."""
ORDER_FLOPS_PER_BYTE = 10_000.0
"""FLOPs that one byte counts for when the largest receipts are selected; this fits a slot with 125
GFLOP/s."""
BACKWARD = 3
"""Cost of a forward and backward pass relative to the forward pass: for each matrix product the backward pass
computes two."""


@dataclass(frozen=True)
class MeasuredWork:
    """The work of a run or a service: its requester, its graph and the `holders` of the graph, the sizes, and
    the factor (`passes`) that converts a forward pass's FLOPs into all FLOPs."""

    requester: PeerId
    graph_hash: bytes
    sizes: tuple[int, ...]
    holders: tuple[PeerId, ...]
    passes: int = 1


class Receipts:
    """The receipt service of one node. `rate` returns the measured FLOP/s of one slot here."""

    def __init__(
        self,
        seams: Seams,
        signer: Signer,
        models: Models,
        *,
        rate: Callable[[], float],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
        issued_bytes_min: int,
    ) -> None:
        self._seams = seams
        self._signer = signer
        self._models = models
        self._rate = rate
        self._refuse = refuse
        self._credits = Credits(signer.peer)
        self._earned: dict[Key, tuple[ReceiptRow, Receipt]] = {}
        self._issued: dict[Key, tuple[ReceiptRow, Receipt]] = {}
        self._totals = Totals(issued_bytes_min=issued_bytes_min)
        self._served: OrderedDict[PeerId, int] = OrderedDict()
        self._works: OrderedDict[bytes, MeasuredWork] = OrderedDict()
        self._layers: OrderedDict[bytes, list[int]] = OrderedDict()
        self._begun: OrderedDict[bytes, float] = OrderedDict()
        self._asked: OrderedDict[PeerId, float] = OrderedDict()
        self._fetching = trio.CapacityLimiter(FETCHING_MAX)
        self._nursery: trio.Nursery | None = None
        self._due = trio.Event()
        self._is_changed = False
        self._load()

    # Running, loading and storing

    async def run(self) -> None:
        """Serve requests, and issue receipts at intervals and when a run has ended, until cancelled."""
        self._seams.network.handle(RECEIPTS_PROTOCOL, self._serve, STREAMS)
        async with trio.open_nursery() as self._nursery:
            while True:
                self._due = trio.Event()
                with trio.move_on_after(ISSUE_SECONDS):
                    await self._due.wait()
                with contain("issuing of receipts"):
                    await self.issue()
                    await self._save()

    def _load(self) -> None:
        found = read_receipts(self._seams.storage)
        for kept, receipts in ((self._earned, found.earned), (self._issued, found.issued)):
            for receipt in receipts:
                # Signatures were checked on arrival, and every peer that is shown a receipt checks them
                # again.
                with suppress(RemoteProtocolError):
                    self._keep(kept, read_measured(receipt.measured), receipt)
        for key, (row, _) in self._issued.items():
            self._totals.load(key, row)
        self._credits.given, self._credits.worked, self._credits.averaged = found.accounts
        self._is_changed = False

    async def _save(self) -> None:
        if not self._is_changed:
            return
        self._is_changed = False
        earned, issued = ([receipt for _, receipt in kept.values()] for kept in (self._earned, self._issued))
        known = self._credits
        accounts = dict(known.given), dict(known.worked), dict(known.averaged)
        write = partial(write_receipts, self._seams.storage, earned, issued, *accounts)
        await self._seams.executor.run(write)

    def _keep(self, kept: dict[Key, tuple[ReceiptRow, Receipt]], row: ReceiptRow, receipt: Receipt) -> None:
        other = row.measurer if kept is self._earned else row.provider
        kept[row.run, other, row.kind] = row, receipt
        self._is_changed = True
        while len(kept) > EARNED_MAX:
            del kept[min(kept, key=lambda each: kept[each][0].worth(ORDER_FLOPS_PER_BYTE))]

    # As the committer of a run

    def counted(self, run: Run, plan: Plan, microbatches: Mapping[PeerId, int]) -> None:
        """Add each replica's micro-batches of a step that was committed on this node."""
        for stage in plan.stages:
            for peer in map(PeerId, stage.replicas):
                if microbatches.get(peer):
                    self.computed(run, peer, (stage.first_layer, stage.last_layer), microbatches[peer])

    def computed(self, run: Run, peer: PeerId, layers: tuple[int, int], microbatches: int) -> None:
        """Add a peer's micro-batches for these layers in a step that was completed on this node."""
        manifest, asker = run.manifest, run.requester
        work = MeasuredWork(asker, manifest.graph_hash, manifest.sizes_max, (asker,), BACKWARD)
        self._count(run.id, work, peer, layers, microbatches)

    def answered(
        self, service: bytes, work: "MeasuredWork", peer: PeerId, layers: tuple[int, int], tokens: int
    ) -> None:
        """Add the tokens that a peer computed with these layers for answers that this node requested."""
        self._count(service, work, peer, layers, tokens)

    def _count(
        self, name: bytes, work: "MeasuredWork", peer: PeerId, layers: tuple[int, int], number: int
    ) -> None:
        if peer in (self._signer.peer, work.requester):
            return
        self._works[name] = work
        self._works.move_to_end(name)
        while len(self._works) > BEGUN_MAX:
            self._works.popitem(last=False)
        self._totals.count(name, peer, layers, number)

    def computed_stage(self, run: Run, plan: Plan, peer: PeerId, stage: int, microbatches: int) -> None:
        """Add the micro-batches of a step that a stage's holder in this node's column computed."""
        row = plan.stages[stage]
        self.computed(run, peer, (row.first_layer, row.last_layer), microbatches)

    # As the receiver of data

    def came(
        self,
        kind: Literal["data", "checkpoint", "averaging"],
        run: bytes,
        requester: PeerId,
        peer: PeerId,
        size_bytes: int,
    ) -> None:
        """Add the verified bytes that a peer delivered for a run; `requester` requested the run."""
        me = self._signer.peer
        if peer in (me, requester) or size_bytes <= 0:
            return
        self._totals.grow((run, peer, kind), requester).add_bytes(size_bytes)
        if requester == me:
            note = self._credits.averaged_with if kind == "averaging" else self._credits.gave
            note(self._seams.swarm_clock.wall(), peer, size_bytes * self._flops_per_byte)
            self._is_changed = True

    def checkpoint_came(self, run: bytes, requester: PeerId, delivered: Mapping[PeerId, int]) -> None:
        """Add the bytes of a run's checkpoint that each holder delivered."""
        for peer, size_bytes in delivered.items():
            self.came("checkpoint", run, requester, peer, size_bytes)

    @property
    def _flops_per_byte(self) -> float:
        return max(1.0, self._rate()) / BYTES_PER_SLOT_SECOND

    def ended(self, run: bytes) -> None:
        """Have the unsigned contributions to a run that has ended here signed immediately."""
        if self._totals.is_of(run):
            self._due.set()

    async def issue(self) -> None:
        """Sign the measurements since the previous call, and have each provider sign them too."""
        for of, layers in self._totals.take_counts().items():
            work = self._works.get(of[0])
            if work is None:
                continue
            try:
                costs = await self._costs(of[0], work)
            except Unreachable:  # the graph is gone because the run has ended
                continue
            flops = sum(work.passes * sum(costs[slice(*range_)]) * count for range_, count in layers.items())
            total = self._totals.grow((*of, "compute"), work.requester)
            total.add_work(flops, sum(layers.values()))
            if work.requester == self._signer.peer:
                self._credits.gave(self._seams.swarm_clock.wall(), of[1], flops)
                self._is_changed = True
        async with trio.open_nursery() as nursery:
            for key in self._totals.due():
                nursery.start_soon(self._have_signed, key)

    async def _costs(self, name: bytes, work: "MeasuredWork") -> list[int]:
        """Return each layer's forward FLOPs for one micro-batch or token. Raises Unreachable."""
        if name in self._layers:
            return self._layers[name]
        graph: Graph = await self._models.get(work.graph_hash, list(work.holders))
        find = partial(layer_costs, graph, work.sizes)
        found = [row.forward_flops for row in await self._seams.executor.run(find, apart=True)]
        self._layers[name] = found
        while len(self._layers) > COSTS_MAX:
            self._layers.popitem(last=False)
        return found

    async def _have_signed(self, key: Key) -> None:
        run, provider, kind = key
        total, tries = self._totals.of(key), self._totals.unsigned.pop(key)
        wall, size_bytes = int(self._seams.swarm_clock.wall() * 1000), total.size_bytes
        body = ReceiptBody(
            run, total.requester, provider, total.flops, total.microbatches, wall, kind, size_bytes
        )
        measured = self._signer.sign(MEASURED_PURPOSE, encode(body))
        try:
            answer = await self._call(provider, OfferReceipt(measured))
            if isinstance(answer, AcceptedReceipt):
                receipt = Receipt(measured, answer.accepted)
                self._keep(self._issued, check_receipt(self._signer, receipt), receipt)
                total.signed_bytes = size_bytes
            elif kind != "compute":  # the provider was restarted, and remembers fewer bytes
                total.size_bytes -= size_bytes - total.signed_bytes
        except RemoteProtocolError as error:
            self._refuse(provider, error)
        except (Unreachable, StreamClosed):
            if tries < TRIES_MAX:
                self._totals.unsigned.setdefault(key, tries + 1)

    # As a provider

    def begun(self, run: bytes) -> None:
        """Record that a slot here is promised to a run."""
        self._begun.setdefault(run, self._seams.clock.monotonic())
        while len(self._begun) > BEGUN_MAX:
            self._begun.popitem(last=False)

    def served(self, peer: PeerId, size_bytes: int) -> None:
        """Record bytes sent to a peer, for which the peer may issue a receipt."""
        self._served[peer] = self._served.pop(peer, 0) + size_bytes
        while len(self._served) > SERVED_MAX:
            self._served.popitem(last=False)

    async def _serve(self, stream: Stream) -> None:
        with trio.move_on_after(CALL_SECONDS_MAX):
            try:
                question: Question = decode(await stream.receive(), Question, bytes_max=QUESTION_BYTES_MAX)
                await stream.send(encode(self._answer(stream.peer, question)))
            except RemoteProtocolError as error:
                self._refuse(stream.peer, error)
            except StreamClosed:
                return

    def _answer(self, peer: PeerId, question: Question) -> Answer:
        if isinstance(question, ShowReceipts):
            rows = sorted(self._earned.values(), key=lambda pair: -pair[0].worth(ORDER_FLOPS_PER_BYTE))
            return ShownReceipts(tuple(receipt for _, receipt in rows[:ROWS_MAX]))
        row = check_measured(self._signer, question.measured)
        if row.measurer != peer or row.provider != self._signer.peer:
            raise RemoteProtocolError("a receipt between other peers")
        found = self._earned.get((row.run, peer, row.kind))
        known = None if found is None else found[0]
        is_known = self._knows_work(row, known) if row.kind == "compute" else self._knows_bytes(row, known)
        if not is_known:
            return NoReceipt()
        accepted = self._signer.sign(ACCEPTED_PURPOSE, question.measured.body)
        if known is None or row.flops + row.size_bytes > known.flops + known.size_bytes:
            self._keep(self._earned, row, Receipt(question.measured, accepted))
        return AcceptedReceipt(accepted)

    def _knows_work(self, row: ReceiptRow, known: ReceiptRow | None) -> bool:
        """Return whether this node had a part in a run. Credit newly claimed work up to a slot's capacity."""
        begun = self._begun.get(row.run)
        if begun is None:
            return known is not None
        before = 0 if known is None else known.flops
        if row.flops > before:
            now = self._seams.clock.monotonic()
            self._begun[row.run] = now
            most = RATE_SLACK * self._rate() * (now - begun)
            wall = self._seams.swarm_clock.wall()
            self._credits.worked_for(wall, row.measurer, min(row.flops - before, most))
        return True

    def _knows_bytes(self, row: ReceiptRow, known: ReceiptRow | None) -> bool:
        """Return whether this node sent these bytes since the last receipt; if so, this one uses them up."""
        more = row.size_bytes - (0 if known is None else known.size_bytes)
        left = self._served.get(row.measurer, 0)
        if more > left:
            return False
        if more > 0:
            self._served[row.measurer] = left - more
        return True

    # As a provider with a queue

    def weight(self, peer: PeerId) -> float:
        """Return the weight of a requester's share here. Fetch its receipts if those known are old."""
        now = self._seams.clock.monotonic()
        is_due = now - self._asked.get(peer, -FETCH_SECONDS) >= FETCH_SECONDS
        if is_due and peer != self._signer.peer and self._nursery is not None:
            self._asked[peer] = now
            self._asked.move_to_end(peer)
            while len(self._asked) > PEERS_MAX:
                self._asked.popitem(last=False)
            if self._fetching.statistics().tasks_waiting < FETCHING_MAX:
                self._nursery.start_soon(self._fetch, peer)
        return self.contribution(peer).weight

    def contribution(self, peer: PeerId) -> Contribution:
        """Return a peer's known contributions."""
        share = FULL_SHARE_SECONDS * max(1.0, self._rate())
        return self._credits.contribution(self._seams.swarm_clock.wall(), peer, share)

    async def _fetch(self, peer: PeerId) -> None:
        async with self._fetching:
            with contain("reading of receipts"):
                try:
                    answer = await self._call(peer, ShowReceipts())
                    if not isinstance(answer, ShownReceipts):
                        raise RemoteProtocolError("the answer to a request for receipts has none")
                    check = [partial(check_receipt, self._signer, receipt) for receipt in answer.receipts]
                    rows = await self._seams.executor.run(lambda: [each() for each in check])
                    self._credits.learn(self._seams.swarm_clock.wall(), peer, rows, self._flops_per_byte)
                except RemoteProtocolError as error:
                    self._refuse(peer, error)
                except (Unreachable, StreamClosed):
                    self._asked.pop(peer, None)

    async def _call(self, peer: PeerId, question: Question) -> Answer:
        answer: Answer = await call(
            self._seams.network,
            peer,
            RECEIPTS_PROTOCOL,
            question,
            Answer,
            seconds=CALL_SECONDS_MAX,
            reply_bytes_max=ANSWER_BYTES_MAX,
        )
        return answer

    # For people

    def document(self, run: str = "") -> dict[str, Any]:
        """Return receipts earned and issued, and the contributions of peers (`peerloom/receipts/1`)."""
        known = self._credits
        peers = {*known.given, *known.worked, *known.averaged, *self._asked}
        return {
            "schema": "peerloom/receipts/1",
            "earned": [_document(row) for row, _ in self._earned.values() if _is_of(row, run)],
            "issued": [_document(row) for row, _ in self._issued.values() if _is_of(row, run)],
            "peers": [
                {"peer": peer_text(peer), **contribution_document(self.contribution(peer))}
                for peer in sorted(peers)
                if not run
            ],
        }

    def told_of(self, document: dict[str, Any]) -> dict[str, Any]:
        """Add the weight of each peer's contributions to a `peerloom/peers/1` document."""
        rows = [
            {**row, "contribution": contribution_document(self.contribution(parse_peer(row["peer"])))}
            for row in document["peers"]
        ]
        return {**document, "peers": rows}

    def summary(self) -> dict[str, Any]:
        """Return the totals that this node gave and received, for its status document."""
        earned, issued = ([row for row, _ in kept.values()] for kept in (self._earned, self._issued))
        return {
            "earned_flops": float(sum(row.flops for row in earned)),
            "earned_receipts": len(earned),
            "issued_flops": float(sum(row.flops for row in issued)),
            "issued_receipts": len(issued),
            "earned_bytes": sum(row.size_bytes for row in earned),
            "issued_bytes": sum(row.size_bytes for row in issued),
        }


def _is_of(row: ReceiptRow, run: str) -> bool:
    return run in ("", run_text(row.run))


def _document(row: ReceiptRow) -> dict[str, Any]:
    return {
        "run": run_text(row.run),
        "requester": peer_text(row.requester),
        "provider": peer_text(row.provider),
        "measurer": peer_text(row.measurer),
        "flops": float(row.flops),
        "microbatches": row.microbatches,
        "kind": row.kind,
        "size_bytes": row.size_bytes,
        "at": rfc3339(row.at),
    }


def contribution_document(found: Contribution) -> dict[str, float]:
    """Return how much a peer's contributions count here."""
    return {
        "given_flops": found.given,
        "vouched_flops": found.vouched,
        "witnessed_flops": found.witnessed,
        "averaged_flops": found.averaged,
        "share_weight": found.weight,
    }
