"""`/peerloom/receipts/2`: signed receipts of peers' contributions to each other's runs.

As a committer, or the head of a column, this node measures others' computing; as the receiver, the bytes of
data sets, checkpoints and rounds of averaging. It has each provider sign the measurement. As a provider it
signs others' measurements of its own work, keeps the receipts on disk, and shows them on request. As a
provider with a queue it asks requesters for theirs and weighs them. `partition.run.receipts` decides how much
receipts count.
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
"""The interval between two receipts for one provider in one run. A committer's crash may lose the work of one
interval."""
FETCH_SECONDS = 600.0
"""The interval at which a requester's receipts are fetched while it asks for slots."""
FETCHING_MAX = 8
BEGUN_MAX = 1_024
COSTS_MAX = 64
TRIES_MAX = 30
"""A provider that has been away for this many rounds gets no receipt."""
RATE_SLACK = 4.0
"""A committer's claim on this node's work counts up to this many times its slot's measured rate: the rate is
a first guess, and models differ."""
FULL_SHARE_SECONDS = 3_600.0
"""A peer that gave an hour's work of one slot here has twice a stranger's share."""
SERVED_MAX = 1_024
"""The peers whose received bytes are remembered, those served last."""
ORDER_FLOPS_PER_BYTE = 10_000.0
"""The FLOPs that a byte counts for where the largest receipts are chosen: a slot of 125 GFLOP/s."""
BACKWARD = 3
"""The cost of both passes relative to the forward one: for each matrix product the backward pass computes
two."""


@dataclass(frozen=True)
class MeasuredWork:
    """The work of a run or a service: its requester, the graph and its `holders`, the sizes, and the number
    of times that a forward pass's FLOPs count."""

    requester: PeerId
    graph_hash: bytes
    sizes: tuple[int, ...]
    holders: tuple[PeerId, ...]
    passes: int = 1


class Receipts:
    """The service of one node. `rate` is the FLOP/s that one slot here was measured to compute."""

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

    # Life

    async def run(self) -> None:
        """Serve, and issue receipts at intervals and when a run has ended, until cancelled."""
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
                # Signatures were checked on receipt, and every peer that is shown a receipt checks them.
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
        """Add each replica's micro-batches of a step that was committed here."""
        for stage in plan.stages:
            for peer in map(PeerId, stage.replicas):
                if microbatches.get(peer):
                    self.computed(run, peer, (stage.first_layer, stage.last_layer), microbatches[peer])

    def computed(self, run: Run, peer: PeerId, layers: tuple[int, int], microbatches: int) -> None:
        """Add a peer's micro-batches of these layers in a step that was completed here."""
        manifest, asker = run.manifest, run.requester
        work = MeasuredWork(asker, manifest.graph_hash, manifest.sizes_max, (asker,), BACKWARD)
        self._count(run.id, work, peer, layers, microbatches)

    def answered(
        self, service: bytes, work: "MeasuredWork", peer: PeerId, layers: tuple[int, int], tokens: int
    ) -> None:
        """Add the tokens of these layers that a peer computed for answers that this node asked for."""
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
        """Add the micro-batches that a stage's holder in this node's column computed in a step."""
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
        """Add a peer's checked bytes for a run; `requester` is the peer that asked for the run."""
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
        """Have the unsigned contributions of a run that is over here signed at once."""
        if self._totals.is_of(run):
            self._due.set()

    async def issue(self) -> None:
        """Sign the measurements since the last time, and have each provider sign them too."""
        for of, layers in self._totals.take_counts().items():
            work = self._works.get(of[0])
            if work is None:
                continue
            try:
                costs = await self._costs(of[0], work)
            except Unreachable:  # the graph has gone with the run
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
            elif kind != "compute":  # it was restarted, and remembers less
                total.size_bytes -= size_bytes - total.signed_bytes
        except RemoteProtocolError as error:
            self._refuse(provider, error)
        except (Unreachable, StreamClosed):
            if tries < TRIES_MAX:
                self._totals.unsigned.setdefault(key, tries + 1)

    # As a provider

    def begun(self, run: bytes) -> None:
        """Note that a slot here is promised to a run."""
        self._begun.setdefault(run, self._seams.clock.monotonic())
        while len(self._begun) > BEGUN_MAX:
            self._begun.popitem(last=False)

    def served(self, peer: PeerId, size_bytes: int) -> None:
        """Note bytes sent to a peer, for which it may give a receipt."""
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
            raise RemoteProtocolError("a receipt of others")
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
        """Return whether this node had a part in a run. The claimed work since the last receipt counts up to
        the capacity of its slot."""
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
        """Return whether this node sent that much since the last receipt; this one uses it up."""
        more = row.size_bytes - (0 if known is None else known.size_bytes)
        left = self._served.get(row.measurer, 0)
        if more > left:
            return False
        if more > 0:
            self._served[row.measurer] = left - more
        return True

    # As a provider with a queue

    def weight(self, peer: PeerId) -> float:
        """Return the weight of a requester's share here. Start fetching its receipts if they are old."""
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
        """Return the known contributions of a peer."""
        share = FULL_SHARE_SECONDS * max(1.0, self._rate())
        return self._credits.contribution(self._seams.swarm_clock.wall(), peer, share)

    async def _fetch(self, peer: PeerId) -> None:
        async with self._fetching:
            with contain("reading of receipts"):
                try:
                    answer = await self._call(peer, ShowReceipts())
                    if not isinstance(answer, ShownReceipts):
                        raise RemoteProtocolError("no receipts in answer to a question for them")
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
        """Return receipts earned and issued, and peers' contributions (`peerloom/receipts/1`)."""
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
        """Return a `peerloom/peers/1` document with the weight of each peer's contributions here."""
        rows = [
            {**row, "contribution": contribution_document(self.contribution(parse_peer(row["peer"])))}
            for row in document["peers"]
        ]
        return {**document, "peers": rows}

    def summary(self) -> dict[str, Any]:
        """Return the totals that this node gave and received, for its status."""
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
    """Return how much a peer's contributions count for here."""
    return {
        "given_flops": found.given,
        "vouched_flops": found.vouched,
        "witnessed_flops": found.witnessed,
        "averaged_flops": found.averaged,
        "share_weight": found.weight,
    }
