"""A column: one pipeline of all stages. The first stage is at its head; the others are at peers that work for
this head.

The head's trainer sees a column as one stage: `ColumnStage` passes a micro-batch through all stages, and its
gradient back. As many micro-batches as there are stages are processed simultaneously, one in each stage. They
stay in order, so a step is exact within the column, and its sums do not depend on timing. Columns interact
only when the holders of each stage average (`node.local.member`).

If a stage has no holder, one node of the column holds two stages (`node.local.merging`). The head calls its
own further stages in its own process. Not here: the choice of holders (`partition.run.local.column`), and a
stage that works for a head (`node.local.stage_server`).
"""

from collections.abc import Callable, Mapping

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import PayloadRefused, StageDiverged, StageFailed, StreamClosed, Unreachable
from node.local.stage_server import StageServer, close
from node.seams import Network, Stage, Stream
from partition import stage as api
from partition.codecs.codec import Payload
from partition.run.local.column import ColumnHolders
from partition.run.local.column_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Answer,
    Attach,
    Attached,
    ColumnRefusal,
    Did,
    Do,
    Work,
    Worked,
)
from partition.run.local.courses import ColumnBroken
from partition.run.local.seat import CALL_SECONDS_MAX
from partition.run.tickets import Chain

ATTACH_SECONDS_MAX = 5.0
EXPORT_SECONDS_MAX = 300.0


class ColumnStage:
    """The column as a `node.seams.Stage` for the head's trainer. `attach` makes a peer hold a missing stage.

    Several Forwards may run concurrently and pass each stage in call order. All other calls run one at a
    time.
    """

    def __init__(
        self, run: bytes, own: Stage, count: int, network: Network, *, metrics: int, payload_bytes_max: int
    ) -> None:
        """`metrics` is the model's number of metrics. `payload_bytes_max` bounds answers: a micro-batch's
        tensors, or the parameters of a stage."""
        self.computed: Callable[[PeerId, int, int], None] = lambda _peer, _stage, _microbatches: None
        """Called after each step with each holder, its stage, and the number of micro-batches that it
        processed."""
        self._passed = 0
        self._metrics = metrics
        self._run = run
        self._own = own
        self._count = count
        self._network = network
        self._payload_bytes_max = payload_bytes_max
        self._streams: dict[int, Stream] = {}
        self._here: dict[int, StageServer] = {}
        self._turns = [trio.Lock() for _ in range(count)]
        """One lock for each stage, which takes one request at a time, in order."""
        self.holders = ColumnHolders(count)

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages without a holder in this column."""
        return self.holders.missing

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The other nodes of this column."""
        return self.holders.peers

    @property
    def here(self) -> Mapping[int, StageServer]:
        """The stages that the head holds in addition to the first."""
        return self._here

    def hold_here(self, stage: int, server: StageServer) -> None:
        """Hold this stage at the head itself; `work_here` starts it."""
        self._here[stage], self.holders.here[stage] = server, server.seat

    def drop_here(self, stage: int) -> None:
        """Stop holding this stage at the head."""
        self._here.pop(stage, None)
        self.holders.here.pop(stage, None)

    async def work_here(self, stage: int, step: int) -> None:
        """Start a stage that the head holds itself, at the step `step`, if it is ready."""
        await self._here[stage].work_for(self._network.peer, step)

    async def attach(
        self,
        stage: int,
        peer: PeerId,
        step: int,
        chain: Chain,
        check: Callable[[PeerId, Chain], None],
    ) -> str:
        """Ask `peer` to hold a stage; return the reason of a refusal, or "" on success. `check` raises
        RemoteProtocolError if the peer is not a member."""
        stream: Stream | None = None
        holders = self.holders
        holders.asking()
        try:
            with trio.fail_after(ATTACH_SECONDS_MAX):
                stream = await self._network.open(peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
                keeps = holders.wants_copies(stage)
                await stream.send(encode(Attach(self._run, stage, step, chain, keeps, self.peers)))
                answer: Answer = decode(await stream.receive(), Answer, bytes_max=MESSAGE_BYTES_MAX)
            if isinstance(answer, Attached):
                check(peer, answer.chain)
        except (Unreachable, StreamClosed, trio.TooSlowError, RemoteProtocolError) as error:
            if stream is not None:
                await close(stream)
            holders.failed(stage, peer)
            return str(error) or "no answer in time"
        named = (
            [PeerId(mate) for mate in answer.mates] if isinstance(answer, Attached | ColumnRefusal) else []
        )
        if isinstance(answer, Attached):
            holders.took(stage, peer, named)
            before, self._streams[stage] = self._streams.get(stage), stream
            if before is not None:
                await close(before)
            return ""
        await close(stream)
        holders.refused(stage, peer, named, is_older=isinstance(answer, ColumnRefusal) and answer.is_older)
        return answer.reason if isinstance(answer, ColumnRefusal) else "no answer"

    async def call(self, request: object) -> object:
        """Answer a request (`node.seams.Stage`). Requests about the whole model go to all stages. Raises
        ColumnBroken."""
        match request:
            case api.Forward():
                return await self._pass(request)
            case api.Norm():
                normed = await self._all(request)
                return api.Normed(sum(each.squared_norm for each in normed if isinstance(each, api.Normed)))
            case api.Apply() | api.Discard():
                passed, self._passed = self._passed, 0
                answers = await self._all(request)
                if isinstance(request, api.Apply) and passed and not request.is_skipped:
                    for stage, stream in self._streams.items():
                        self.computed(stream.peer, stage, passed)
                return answers[0]
            case _:
                return await self._own.call(request)

    async def exports(self) -> list[bytes]:
        """Return the parameters of all stages except the first. Raises ColumnBroken."""
        found = []
        for stage in range(1, self._count):
            answer = await self._ask(stage, api.Export(), seconds=EXPORT_SECONDS_MAX)
            if not isinstance(answer, api.Exported):
                await self._give_up(stage)
            else:
                found.append(answer.data)
        return found

    async def _pass(self, request: api.Forward) -> api.Forwarded:
        """Pass a micro-batch through all stages, and its gradient back."""
        step, number, last = request.step, request.microbatch, self._count - 1
        flowing, labels = request.input, request.labels
        found: object = None
        for stage in range(self._count):
            forward = api.Forward(step, number, request.train, flowing, labels if stage == last else None)
            found = await self._ask(stage, forward)
            if not isinstance(found, api.Forwarded) or (stage < last and found.output is None):
                await self._give_up(stage)
                raise ColumnBroken("an answer of the wrong type")
            if stage < last:
                assert found.output is not None
                flowing = found.output
        assert isinstance(found, api.Forwarded)
        if len(found.metrics) != self._metrics or not 0 <= found.samples <= api.SAMPLES_MAX:
            await self._give_up(last)
            raise ColumnBroken("an answer of the wrong type")
        if request.train:
            await self._back(step, number, found.gradient)
            self._passed += 1
        return found

    async def _back(self, step: int, number: int, gradient: Payload | None) -> None:
        for stage in range(self._count - 2, -1, -1):
            if gradient is None:
                await self._give_up(stage + 1)
                raise ColumnBroken("an answer without a gradient")
            done = await self._ask(stage, api.Backward(step, number, gradient))
            if not isinstance(done, api.BackwardDone):
                await self._give_up(stage)
                raise ColumnBroken("an answer of the wrong type")
            gradient = done.gradient

    async def _all(self, request: api.Norm | api.Apply | api.Discard) -> list[object]:
        """Send a request to all stages concurrently, even if one is gone; return their answers in order."""
        answers: dict[int, object] = {}
        broken: list[str] = []

        async def ask(stage: int) -> None:
            try:
                answers[stage] = await self._ask(stage, request)
            except ColumnBroken as error:
                broken.append(str(error))

        async with trio.open_nursery() as nursery:
            for stage in range(self._count):
                nursery.start_soon(ask, stage)
        if broken and not isinstance(request, api.Discard):
            raise ColumnBroken(broken[0])
        return [answers[stage] for stage in sorted(answers)]

    async def _ask(self, stage: int, request: Work, *, seconds: float = CALL_SECONDS_MAX) -> object:
        """Send a request to a stage once its earlier requests are answered. Raises ColumnBroken,
        StageDiverged, or, for the head's own stage, StageFailed."""
        if stage:
            async with self._turns[stage]:
                return await self._ask_holder(stage, request, seconds)
        try:
            async with self._turns[0]:
                return await self._own.call(request)
        except PayloadRefused as error:
            if not isinstance(request, api.Backward):
                raise
            await self._give_up(1)  # the gradient of the second stage's holder cannot be used
            raise ColumnBroken(str(error)) from None

    async def _ask_holder(self, stage: int, request: Work, seconds: float) -> object:
        if (here := self._here.get(stage)) is not None and stage not in self._streams:
            return await self._ask_here(here, stage, request)
        stream = self._streams.get(stage)
        if stream is None:
            raise ColumnBroken(f"nobody holds stage {stage + 1}")
        try:
            with trio.fail_after(seconds):
                await stream.send(encode(Do()), encode(request))
                message, data = await stream.receive_with_payload(self._payload_bytes_max)
            answer: Answer = decode(message, Answer, bytes_max=MESSAGE_BYTES_MAX)
            if isinstance(answer, ColumnRefusal) and answer.is_diverged:
                raise StageDiverged(answer.reason)
            if not isinstance(answer, Did):
                raise StreamClosed(answer.reason if isinstance(answer, ColumnRefusal) else "no answer")
            worked: Worked = decode(bytes(data), Worked, bytes_max=self._payload_bytes_max)
        except (StreamClosed, trio.TooSlowError, RemoteProtocolError) as error:
            await self._break(stage)
            raise ColumnBroken(f"stage {stage + 1}: {error or 'no answer in time'}") from None
        return worked

    async def _ask_here(self, server: StageServer, stage: int, request: Work) -> object:
        """Send a request to a stage that the head holds itself."""
        if server.seat.head is None:
            raise ColumnBroken(f"stage {stage + 1} is not ready on the head itself")
        try:
            return await server.work(request)
        except StageDiverged:
            raise
        except (PayloadRefused, StageFailed) as error:
            if not isinstance(error, PayloadRefused):
                server.seat.failure = str(error)
            await server.rest()
            raise ColumnBroken(f"stage {stage + 1}: {error}") from None

    async def _give_up(self, stage: int) -> None:
        """Break with the holder of a stage, once it owes no other answer."""
        async with self._turns[stage]:
            await self._break(stage)

    async def _break(self, stage: int) -> None:
        stream = self._streams.pop(stage, None)
        self.holders.lost(stage)
        if stream is not None:
            await close(stream)

    async def let_go(self) -> None:
        """Release all holders. Each drops its unfinished step."""
        for stage in list(self._streams):
            await self._break(stage)
        for server in list(self._here.values()):
            await server.rest()

    async def expel(self, peer: PeerId) -> None:
        """Take all its stages from a peer that is no longer a member."""
        for stage in self.holders.expel(peer):
            await self._give_up(stage)

    def holder(self, stage: int) -> PeerId | None:
        """Return the other node that holds a stage of this column; None if no other node does."""
        return self.holders.attached.get(stage)

    def vector(self, name: str) -> memoryview:
        """Return a vector of the head's own stage."""
        return self._own.vector(name)

    async def aclose(self) -> None:
        """Release the holders, and close the head's own stage."""
        await self.let_go()
        await self._own.aclose()
