"""Replication of checkpoints: each keeper that is asked to keep a stage fetches what it lacks.

`/peerloom/copies/1`, a stream per request:

    Keep        keep this stage of this step, fetching it from these peers: Done once it is on the disk
    Conclude    the checkpoint has this name: fetch its manifest and its graph, and announce it in the DHT
    Which       ask which checkpoints of a run this peer has

`partition.run.checkpoint_rounds` decides who keeps a stage, and who is asked when.
"""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Protocol

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from dht.records import Record
from node.checkpoints.service import Checkpoints
from node.checkpoints.store import KEPT, StoredCheckpoint
from node.content.blobs import Refuse
from node.errors import StreamClosed, Unreachable
from node.protocols.calls import call
from node.protocols.checkpoint import Number, StageState
from node.protocols.manifest import run_text
from node.protocols.permits import Permit, Permits
from node.seams import Network, Seams, Stream
from node.storage.blobs import NoRoom
from partition.plan.plan import STAGES_MAX, Hash, Peer
from partition.run.asks import Declined, Done
from partition.run.checkpoint_rounds import KEEP_SECONDS_MAX, NAME_SECONDS_MAX
from partition.run.messages import REASON_LENGTH_MAX

COPIES_PROTOCOL = "/peerloom/copies/1"
CHECKPOINT_PURPOSE = "checkpoint"
"""Purpose of DHT records. For each run, by its short id, each peer that keeps a checkpoint of it has one
record, which names its newest."""
HOLDERS_MAX = 64
MESSAGE_BYTES_MAX = 8_192
"""Maximum message size: a Keep with as many holders as there may be replicas."""
REQUESTS_MAX = 32
"""Maximum number of streams served at once; a waiting stream costs little."""
REQUESTS_PER_PEER_MAX = 8
KEEPS_MAX = 4
"""Maximum number of stages and manifests that are being fetched at once; each has a list of chunks in
memory."""
PATIENCE_SECONDS = 2.0
"""How long a silent peer keeps a permit that another peer wants."""
BUSY_SECONDS_MAX = 5.0
"""Time limit for sending a "busy" reply."""
REQUEST_SECONDS_MAX = 20.0
"""Time limit from a stream's opening to its request, and for sending an answer."""
WHICH_SECONDS_MAX = 10.0
ASKED_MAX = 16
"""Maximum number of peers asked at once which checkpoints they have."""
CANDIDATES_MAX = 4
"""Maximum number of checkpoints of a run that are tried, one after the other, if the best is not
available."""
_RECORD_BYTES_MAX = 64

RunText = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
Holders = Annotated[tuple[Peer, ...], msgspec.Meta(max_length=HOLDERS_MAX)]


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Keep a stage's state after `step` steps of a run. The sender and `holders` have it."""

    run: Hash
    step: Number
    stage: Annotated[int, msgspec.Meta(ge=0, lt=STAGES_MAX)]
    state: StageState
    holders: Holders = ()


class Conclude(msgspec.Struct, frozen=True, tag="conclude"):
    """The stages kept of this step belong to this checkpoint. The sender has its manifest."""

    run: Hash
    step: Number
    checkpoint: Hash
    holders: Holders = ()


class Which(msgspec.Struct, frozen=True, tag="which"):
    """Ask which checkpoints of this run are kept here; the answer is Here."""

    run: RunText


class CheckpointOffer(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint by its step and name; also the value of a DHT record."""

    step: Number
    checkpoint: Hash


class Here(msgspec.Struct, frozen=True, tag="here"):
    offers: Annotated[tuple[CheckpointOffer, ...], msgspec.Meta(max_length=KEPT)]


Request = Keep | Conclude | Which
Reply = Done | Declined | Here


class CheckpointDirectory(Protocol):
    """The part of `node.services.discovery.Discovery` that this file uses."""

    async def publish(self, purpose: str, name: bytes, value: bytes) -> int: ...
    async def find(self, purpose: str, name: bytes) -> tuple[Record, ...]: ...


class CheckpointReplicator:
    """The replication service of one node.

    `admits` returns why a peer may not have this node keep anything of a run; None if it may. `learn_graph`
    fetches a graph to this node (`Models.get`). Copies of a run that is `ours` do not count against the
    budget.
    """

    def __init__(
        self,
        seams: Seams,
        checkpoints: Checkpoints,
        directory: CheckpointDirectory,
        *,
        admits: Callable[[PeerId, bytes], str | None],
        ours: Callable[[bytes], bool],
        learn_graph: Callable[[bytes, Sequence[PeerId]], Awaitable[object]],
        refuse: Refuse,
    ) -> None:
        self._network = seams.network
        self._checkpoints = checkpoints
        self._directory = directory
        self._admits = admits
        self._ours = ours
        self._learn_graph = learn_graph
        self._refuse = refuse
        self.came: Callable[[bytes, PeerId, Mapping[PeerId, int]], None] = lambda _run, _requester, _came: (
            None
        )
        """Called after a stage of a run's checkpoint was fetched, with the run, its requester, and how many
        bytes each holder delivered."""
        self._permits = Permits(
            REQUESTS_MAX, REQUESTS_PER_PEER_MAX, patience_seconds=PATIENCE_SECONDS, clock=seams.clock
        )
        self._keeping: dict[tuple[bytes, int, int], PeerId] = {}
        seams.network.handle(COPIES_PROTOCOL, self.serve)

    async def start(self) -> None:
        """Clean up after an interrupted stop, and announce the stored checkpoints in the DHT."""
        store = self._checkpoints.store
        await self._checkpoints.call(store.recover)
        newest = {kept.run: kept for kept in await self._checkpoints.call(store.all)}
        for run, kept in newest.items():
            await self.announce(run, CheckpointOffer(kept.checkpoint.step, kept.name))

    # As the committer

    async def put(self, peer: PeerId, request: Keep | Conclude, seconds: float) -> Reply:
        """Ask a keeper, which may be this node, to keep a stage or to learn the name of its checkpoint.

        Raises:
            Unreachable: no answer.
        """
        if peer == self._network.peer:
            return await self._answer(peer, request)
        return await ask(self._network, peer, request, seconds=seconds)

    async def announce(self, run: str, offer: CheckpointOffer) -> None:
        """Announce in the DHT that this node keeps this checkpoint; `run` is the short id."""
        await self._directory.publish(CHECKPOINT_PURPOSE, bytes.fromhex(run), encode(offer))

    # For any node

    async def holders(self, run: str) -> dict[PeerId, CheckpointOffer]:
        """Return the peers that announce a checkpoint of a run in the DHT, each with its checkpoint; `run` is
        the short id."""
        found: dict[PeerId, CheckpointOffer] = {}
        for record in await self._directory.find(CHECKPOINT_PURPOSE, bytes.fromhex(run)):
            try:
                offer: CheckpointOffer = decode(record.value, CheckpointOffer, bytes_max=_RECORD_BYTES_MAX)
            except RemoteProtocolError as error:
                self._refuse(record.publisher, error)
                continue
            found[record.publisher] = offer
        return found

    async def steps(self, run: str, holders: Sequence[PeerId]) -> set[int]:
        """Return the steps of a run's checkpoints that these peers have."""
        return {offer.step for offer in await self._offers(run, holders)}

    async def fetch(self, run: str, step: int | None, holders: Sequence[PeerId]) -> StoredCheckpoint:
        """Fetch a run's newest checkpoint, or that of `step`, completely; `run` is the short id.

        Raises:
            Unreachable: no peer has it.
            OSError: the disk is full.
        """
        offers = await self._offers(run, holders)
        best = max(map(len, offers.values()), default=0)
        # A name that few peers know may be an invention.
        order = sorted(offers, key=lambda offer: (2 * len(offers[offer]) < best, -offer.step))
        reasons = []
        for offer in [offer for offer in order if step in (None, offer.step)][:CANDIDATES_MAX]:
            # A holder that does not know this name may still have some of its chunks.
            known = [*offers[offer], *(peer for peer in holders if peer not in offers[offer])]
            try:
                kept = await self._fetch(run, offer, known)
            except Unreachable as error:
                reasons.append(error.detail)
            except RemoteProtocolError as error:
                reasons.append(str(error))
            else:
                await self.announce(run, offer)
                return kept
        steps = ", ".join(str(each) for each in sorted({offer.step for offer in offers}))
        if not reasons:
            reasons = [f"there are those of steps {steps}" if steps else "nobody who answers keeps one"]
        raise Unreachable("unknown", "; ".join(reasons))

    async def _fetch(self, run: str, offer: CheckpointOffer, holders: Sequence[PeerId]) -> StoredCheckpoint:
        checkpoints, store = self._checkpoints, self._checkpoints.store
        _, found, checkpoint, data = await checkpoints.read(offer.checkpoint, holders)
        if (found.text, checkpoint.step) != (run, offer.step):
            raise RemoteProtocolError("the checkpoint is of a different run or step than offered")
        for number, state in enumerate(checkpoint.stages):
            delivered = await checkpoints.bring_stage(
                found.id, offer.step, number, state, holders, is_guest=False
            )
            self.came(found.id, found.requester, delivered)
        await self._learn_graph(checkpoint.graph, [found.requester, *holders])
        await checkpoints.call(partial(store.add, data, is_guest=False))
        kept = await checkpoints.call(partial(store.find, run, offer.step))
        if kept is None:
            raise Unreachable("unknown", "a newer checkpoint has arrived meanwhile")
        return kept

    async def _offers(self, run: str, holders: Sequence[PeerId]) -> Mapping[CheckpointOffer, list[PeerId]]:
        found: dict[CheckpointOffer, list[PeerId]] = defaultdict(list)
        limit = trio.CapacityLimiter(ASKED_MAX)

        async def put(peer: PeerId) -> None:
            async with limit:
                try:
                    reply = await ask(self._network, peer, Which(run), seconds=WHICH_SECONDS_MAX)
                except Unreachable:
                    return
            for offer in reply.offers if isinstance(reply, Here) else ():
                found[offer].append(peer)

        async with trio.open_nursery() as nursery:
            for peer in list(dict.fromkeys(holders))[:HOLDERS_MAX]:
                if peer != self._network.peer:
                    nursery.start_soon(put, peer)
        return found

    # As a keeper

    async def serve(self, stream: Stream) -> None:
        """Answer the one request of a stream."""
        peer = stream.peer
        try:
            with self._permits.take(peer) as permit:
                if permit is not None:
                    await self._serve(stream, permit)
            if permit is None:
                with trio.move_on_after(BUSY_SECONDS_MAX):
                    await stream.receive()  # an answer sent before the request arrives is easily lost
                    await stream.send(encode(Declined("busy: too many requests")))
        except StreamClosed:
            return
        except RemoteProtocolError as error:
            self._refuse(peer, error)

    async def _serve(self, stream: Stream, permit: Permit) -> None:
        permit.waits(REQUEST_SECONDS_MAX)
        request: Request = decode(await stream.receive(), Request, bytes_max=MESSAGE_BYTES_MAX)
        permit.works()
        reply = await self._answer(stream.peer, request)
        permit.waits(REQUEST_SECONDS_MAX)
        await stream.send(encode(reply))
        permit.works()
        if isinstance(request, Conclude) and isinstance(reply, Done):
            await self.announce(run_text(request.run), CheckpointOffer(request.step, request.checkpoint))

    async def _answer(self, peer: PeerId, request: Request) -> Reply:
        store = self._checkpoints.store
        if isinstance(request, Which):
            steps = await self._checkpoints.call(partial(store.steps, request.run))
            return Here(tuple(CheckpointOffer(step, name) for step, name in steps[-KEPT:]))
        reason = self._admits(peer, request.run) if peer != self._network.peer else None
        stage = request.stage if isinstance(request, Keep) else -1
        key = request.run, request.step, stage
        if reason is None and (len(self._keeping) >= KEEPS_MAX or key in self._keeping):
            reason = "busy: it is on its way" if key in self._keeping else "busy: too many are on their way"
        if reason is not None:
            return Declined(reason[:REASON_LENGTH_MAX])
        self._keeping[key] = peer
        try:
            if isinstance(request, Keep):
                return await self._on_keep(peer, request)
            return await self._on_conclude(peer, request)
        except (Unreachable, NoRoom) as error:
            return Declined(str(error)[:REASON_LENGTH_MAX])
        except OSError as error:
            return Declined(f"the disk: {error.strerror or error}"[:REASON_LENGTH_MAX])
        finally:
            del self._keeping[key]

    async def _on_keep(self, peer: PeerId, request: Keep) -> Reply:
        checkpoints, store = self._checkpoints, self._checkpoints.store
        run, step, stage = run_text(request.run), request.step, request.stage
        steps = [each for each, _ in await checkpoints.call(partial(store.steps, run))]
        if steps and step <= steps[-1]:
            return await self._on_old_keep(run, request)
        held = (await checkpoints.call(partial(store.stage_pins, run, step))).get(stage)
        if held is not None and held[0] != request.state.part:
            return Declined("a different state of this step is kept here")
        holders = [peer, *map(PeerId, request.holders)]
        is_whole = False
        try:
            with trio.move_on_after(KEEP_SECONDS_MAX):
                await checkpoints.bring_stage(
                    request.run, step, stage, request.state, holders, is_guest=not self._ours(request.run)
                )
                is_whole = True
        except RemoteProtocolError as error:
            # The requester only relays a replica's claim about itself, and may not know better.
            return Declined(str(error)[:REASON_LENGTH_MAX])
        finally:
            if not is_whole:
                # A partial checkpoint is useless and takes space.
                with trio.CancelScope(shield=True):
                    await checkpoints.call(partial(store.drop_stage, run, step, stage))
        return Done() if is_whole else Declined(f"it did not arrive within {KEEP_SECONDS_MAX:.0f} s")

    async def _on_old_keep(self, run: str, request: Keep) -> Reply:
        """Answer for a step whose checkpoint has a name; its parts are kept whatever others claim later."""
        kept = await self._checkpoints.call(partial(self._checkpoints.store.find, run, request.step))
        here = kept.stages_here if kept is not None else ()
        if kept is not None and request.stage in here:
            state = kept.checkpoint.stages[request.stage]
            if state.part == request.state.part:
                return Done()
        return Declined(f"a checkpoint of step {request.step} or a later one is already here")

    async def _on_conclude(self, peer: PeerId, request: Conclude) -> Reply:
        checkpoints, store = self._checkpoints, self._checkpoints.store
        run, holders = run_text(request.run), [peer, *map(PeerId, request.holders)]
        held = await checkpoints.call(partial(store.stage_pins, run, request.step))
        if not held:
            return Declined("no part of it is kept here")
        with trio.move_on_after(NAME_SECONDS_MAX):
            author, found, checkpoint, data = await checkpoints.read(request.checkpoint, holders)
            if (found.id, checkpoint.step) != (request.run, request.step):
                raise RemoteProtocolError("the checkpoint is of a different run or step than stated")
            reason = self._admits(author, found.id) if author != self._network.peer else None
            if reason is not None:
                return Declined(f"its author: {reason}"[:REASON_LENGTH_MAX])
            if not await checkpoints.call(partial(store.check_held, checkpoint)):
                return Declined("a different state of this step is kept here")
            await self._learn_graph(checkpoint.graph, [found.requester, *holders])
            add = partial(store.add, data, is_guest=not self._ours(found.id))
            await checkpoints.call(add)
            return Done()
        return Declined("it did not arrive in time")


async def ask(network: Network, peer: PeerId, request: Request, *, seconds: float) -> Reply:
    """Send one request to a peer and wait for its answer.

    Raises:
        Unreachable: no path, no answer in time, or an invalid answer.
    """
    try:
        reply: Reply = await call(
            network, peer, COPIES_PROTOCOL, request, Reply, seconds=seconds, reply_bytes_max=MESSAGE_BYTES_MAX
        )
    except RemoteProtocolError as error:
        raise Unreachable("refused", f"no answer: {error}") from None
    return reply
