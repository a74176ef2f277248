"""A column: one pipeline of all stages, the first at its head, the others at peers that work for this head.

    head: Attach(run, stage, step, chain)  ->  Attached(chain, mates) or Refusal(reason, mates)
    head: Do, with a request of `partition.stage` as payload  ->  Did, with its answer, or Refusal

To the head's trainer a column is one stage: `ColumnStage` passes a micro-batch through all of them and its
gradient back. As many micro-batches as there are stages are under way at once, one in each; they stay in
order, so a step is exact within the column, and its sums do not depend on how fast anybody is. Columns have
nothing to do with each other but that the holders of each stage average (`node.local.member`).

A holder that is gone breaks the column: the step that was under way is dropped everywhere, and the head looks
for another holder of that stage, one whose own head is gone or a node with a free slot. Other heads name
those that they know: a holder that is left over may be unknown to the head that lacks it. Where there is
none, a node of the column holds two (`node.local.merging`); what the head itself holds is asked in its own
process. Long because a head and the stages that work for it are the two sides of one protocol.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from crypto.registers import Budget, Register, Silence
from node.errors import PayloadRefused, StageDiverged, StageFailed, StreamClosed, Unreachable
from node.seams import Network, Stage, Stream, StreamLimits
from partition import stage as api
from partition.codecs.codec import Payload
from partition.plan.plan import STAGES_MAX, STEPS_MAX
from partition.run.tickets import Chain
from partition.stage import REASON_LENGTH_MAX

PROTOCOL = "/peerloom/column/1"
MESSAGE_BYTES_MAX = 32 * 1024
"""A full chain of tickets; requests and answers are payloads."""
HELD_MAX = 8
"""Stages that one node holds of a run: each has a process of its own, which takes some 0.3 GB beside them."""
STREAMS = StreamLimits(message_bytes_max=MESSAGE_BYTES_MAX, streams_per_peer_max=HELD_MAX + 4)
MATES_MAX = 32
HEADS_ASKED = 2
"""How many other heads are asked each time that a stage is missing: one after another, all are."""
CALL_SECONDS_MAX = 60.0
"""A holder that owes an answer for so long is given up."""
ATTACH_SECONDS_MAX = 5.0
HEAD_PATIENCE_SECONDS = CALL_SECONDS_MAX
"""How long a head may ask for nothing before another that wants its holder gets it: a round of averaging
between two steps takes less."""
BEGINNING_SECONDS = 10.0
"""As much for a head that has made no step: it may look for holders of its other stages meanwhile."""
HEADS = Budget(1, 1, 1, HEAD_PATIENCE_SECONDS, BEGINNING_SECONDS, BEGINNING_SECONDS)
HEAD_SECONDS_MAX = 300.0
"""A head that has asked for nothing for so long loses its holder, whoever else wants that: while it has a
head, a holder looks for no other."""
EXPORT_SECONDS_MAX = 300.0

Hash = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_LENGTH_MAX)]


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach"):
    """Work for me: I am a head of this run after so many steps, and a member by this chain. `keeps` asks for
    copies of the head's own stage to be kept, for whoever takes that over. `column` are other nodes that
    work for it: a holder shows itself to them where the head is gone."""

    run: Hash
    stage: Annotated[int, msgspec.Meta(ge=1, lt=STAGES_MAX)]
    step: Annotated[int, msgspec.Meta(ge=0, le=STEPS_MAX)]
    chain: Chain
    keeps: bool = False
    column: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=STAGES_MAX)] = ()


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached"):
    """I do, and am a member by this chain; `mates` hold the same stage."""

    chain: Chain
    mates: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MATES_MAX)]


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """No; `is_diverged`: what was computed is no finite number, and the column goes on. `mates` may hold the
    stage: another head names them, which holds none but the first. `is_older`: a newcomer's state is of an
    earlier step than another holder's, which it takes over now; ask again."""

    reason: Reason
    is_diverged: bool = False
    mates: Annotated[tuple[Subject, ...], msgspec.Meta(max_length=MATES_MAX)] = ()
    is_older: bool = False


class Do(msgspec.Struct, frozen=True, array_like=True, tag="do"):
    """The payload is a request to your stage."""


class Did(msgspec.Struct, frozen=True, array_like=True, tag="did"):
    """The payload is its answer."""


Question = Attach | Do
Answer = Attached | Did | Refusal
Work = api.Forward | api.Backward | api.Norm | api.Apply | api.Discard | api.Export
"""The requests that a head sends to another's stage."""
Worked = api.Forwarded | api.BackwardDone | api.Normed | api.Applied | api.Done | api.Exported


class ColumnBroken(Exception):
    """A stage of the column has no holder any more."""


class ColumnStage:
    """Implements `node.seams.Stage` for the head's trainer. `attach` finds holders for missing stages.

    Several Forwards at once, which pass each stage in the order in which they were called; else one call at a
    time.
    """

    def __init__(
        self, run: bytes, own: Stage, count: int, network: Network, *, metrics: int, payload_bytes_max: int
    ) -> None:
        """`metrics` are how many the model has. `payload_bytes_max` bounds answers: a micro-batch's tensors,
        or the parameters of a stage."""
        self.computed: Callable[[PeerId, int, int], None] = lambda _peer, _stage, _microbatches: None
        """Hears of each holder, once a step is made, its stage and how many micro-batches it passed."""
        self._passed = 0
        self._metrics = metrics
        self._run = run
        self._own = own
        self._count = count
        self._network = network
        self._payload_bytes_max = payload_bytes_max
        self._streams: dict[int, Stream] = {}
        self._here: dict[int, StageServer] = {}
        """The stages that the head holds beside the first, of which some may work for it now."""
        self._hosts: dict[int, PeerId] = {}
        """Peers that agreed to hold a stage beside another one of this column."""
        self._turns = [trio.Lock() for _ in range(count)]
        """One lock for each stage: it takes one request at a time, in order."""
        self.mates: dict[int, dict[PeerId, None]] = {stage: {} for stage in range(1, count)}
        """The peers that were reported to hold a stage."""
        self._heads_asked = 0
        self.has_looked = False
        """Whether holders have been looked for."""
        self.is_older = False
        """Whether the last peer that was asked is fetching a newer state."""

    @property
    def missing(self) -> tuple[int, ...]:
        """The stages that nobody holds for this head."""
        held = {*self._streams, *(stage for stage, server in self._here.items() if server.head is not None)}
        return tuple(stage for stage in range(1, self._count) if stage not in held)

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The other nodes of this column."""
        return tuple(dict.fromkeys(stream.peer for stream in self._streams.values()))

    @property
    def here(self) -> Mapping[int, "StageServer"]:
        """The stages that the head holds beside the first."""
        return self._here

    def hold_here(self, stage: int, server: "StageServer") -> None:
        """The head holds this stage itself; `mend` has it work."""
        self._here[stage] = server

    def drop_here(self, stage: int) -> None:
        """The head holds this stage no more."""
        self._here.pop(stage, None)

    def agreed(self, stage: int, peer: PeerId) -> None:
        """A peer will hold this stage, also beside another."""
        self._hosts[stage] = peer
        self.mates[stage] = {peer: None, **self.mates[stage]}

    async def mend(
        self,
        known: Sequence[PeerId],
        heads: Sequence[PeerId],
        step: int,
        chain: Chain,
        check: Callable[[PeerId, Chain], None],
    ) -> None:
        """Find holders for the stages that are missing: peers said to hold them first, then other members. If
        none does, some of the other `heads` are asked for names, for the next time."""
        for stage in self.missing:
            if stage in self._here:
                await self._here[stage].work_for(self._network.peer, step)
                continue
            taken = set(self.peers) - {self._hosts.get(stage)}
            for peer in dict.fromkeys((*self.mates[stage], *known)):
                if peer not in taken and not await self.attach(stage, peer, step, chain, check):
                    break
            else:
                first, self._heads_asked = self._heads_asked, self._heads_asked + HEADS_ASKED
                for number in range(first, first + min(HEADS_ASKED, len(heads))):
                    await self.attach(stage, heads[number % len(heads)], step, chain, check)
        self.has_looked = True

    async def attach(
        self,
        stage: int,
        peer: PeerId,
        step: int,
        chain: Chain,
        check: Callable[[PeerId, Chain], None],
    ) -> str:
        """Have `peer` hold a stage; why it does not, empty where it does. `check` raises RemoteProtocolError
        where it is no member."""
        stream: Stream | None = None
        self.is_older = False
        try:
            with trio.fail_after(ATTACH_SECONDS_MAX):
                stream = await self._network.open(peer, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
                keeps = not any(self._streams.keys() - {stage})
                await stream.send(encode(Attach(self._run, stage, step, chain, keeps, self.peers)))
                answer: Answer = decode(await stream.receive(), Answer, bytes_max=MESSAGE_BYTES_MAX)
            if isinstance(answer, Attached):
                check(peer, answer.chain)
        except (Unreachable, StreamClosed, trio.TooSlowError, RemoteProtocolError) as error:
            if stream is not None:
                await close(stream)
            self.mates[stage].pop(peer, None)
            if self._hosts.get(stage) == peer:
                del self._hosts[stage]
            return str(error) or "no answer in time"
        self.is_older = isinstance(answer, Refusal) and answer.is_older
        named = answer.mates if isinstance(answer, Attached | Refusal) else ()
        mates = dict.fromkeys((peer, *(PeerId(mate) for mate in named)))
        if not isinstance(answer, Attached):
            await close(stream)
            del mates[peer]
        self.mates[stage] = dict(list({**mates, **self.mates[stage]}.items())[:MATES_MAX])
        if isinstance(answer, Attached):
            before, self._streams[stage] = self._streams.get(stage), stream
            if before is not None:
                await close(before)
            return ""
        return answer.reason if isinstance(answer, Refusal) else "no answer"

    async def call(self, request: object) -> object:
        """See `node.seams.Stage`: what concerns the whole model goes to all stages. Raises ColumnBroken."""
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
        """The parameters of all stages but the first. Raises ColumnBroken."""
        found = []
        for stage in range(1, self._count):
            answer = await self._ask(stage, api.Export(), seconds=EXPORT_SECONDS_MAX)
            if not isinstance(answer, api.Exported):
                await self._give_up(stage)
            else:
                found.append(answer.data)
        return found

    async def _pass(self, request: api.Forward) -> api.Forwarded:
        """A micro-batch through all stages, and its gradient back."""
        step, number, last = request.step, request.microbatch, self._count - 1
        flowing, labels = request.input, request.labels
        found: object = None
        for stage in range(self._count):
            forward = api.Forward(step, number, request.train, flowing, labels if stage == last else None)
            found = await self._ask(stage, forward)
            if not isinstance(found, api.Forwarded) or (stage < last and found.output is None):
                await self._give_up(stage)
                raise ColumnBroken("an answer that is none")
            if stage < last:
                assert found.output is not None
                flowing = found.output
        assert isinstance(found, api.Forwarded)
        if len(found.metrics) != self._metrics or not 0 <= found.samples <= api.SAMPLES_MAX:
            await self._give_up(last)
            raise ColumnBroken("an answer that is none")
        if request.train:
            await self._back(step, number, found.gradient)
            self._passed += 1
        return found

    async def _back(self, step: int, number: int, gradient: Payload | None) -> None:
        for stage in range(self._count - 2, -1, -1):
            if gradient is None:
                await self._give_up(stage + 1)
                raise ColumnBroken("a gradient that is none")
            done = await self._ask(stage, api.Backward(step, number, gradient))
            if not isinstance(done, api.BackwardDone):
                await self._give_up(stage)
                raise ColumnBroken("an answer that is none")
            gradient = done.gradient

    async def _all(self, request: api.Norm | api.Apply | api.Discard) -> list[object]:
        """Ask all stages at once; their answers in order. All are asked, also where one is gone."""
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
        """One request to one stage, once those before it are answered. Raises ColumnBroken, StageDiverged, or
        StageFailed of the own one."""
        if stage:
            async with self._turns[stage]:
                return await self._ask_holder(stage, request, seconds)
        try:
            async with self._turns[0]:
                return await self._own.call(request)
        except PayloadRefused as error:
            if not isinstance(request, api.Backward):
                raise
            await self._give_up(1)  # its gradient cannot be used
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
            if isinstance(answer, Refusal) and answer.is_diverged:
                raise StageDiverged(answer.reason)
            if not isinstance(answer, Did):
                raise StreamClosed(answer.reason if isinstance(answer, Refusal) else "no answer")
            worked: Worked = decode(bytes(data), Worked, bytes_max=self._payload_bytes_max)
        except (StreamClosed, trio.TooSlowError, RemoteProtocolError) as error:
            await self._break(stage)
            raise ColumnBroken(f"stage {stage + 1}: {error or 'no answer in time'}") from None
        return worked

    async def _ask_here(self, server: "StageServer", stage: int, request: Work) -> object:
        """One request to a stage that the head holds itself."""
        if server.head is None:
            raise ColumnBroken(f"stage {stage + 1} is not ready here")
        try:
            return await server.work(request)
        except StageDiverged:
            raise
        except (PayloadRefused, StageFailed) as error:
            if not isinstance(error, PayloadRefused):
                server.failure = str(error)
            await server.rest()
            raise ColumnBroken(f"stage {stage + 1}: {error}") from None

    async def _give_up(self, stage: int) -> None:
        """Break with the holder of a stage, once it owes no answer to others."""
        async with self._turns[stage]:
            await self._break(stage)

    async def _break(self, stage: int) -> None:
        stream = self._streams.pop(stage, None)
        if stream is not None:
            self.mates[stage].pop(stream.peer, None)
            await close(stream)

    async def let_go(self) -> None:
        """Let all holders go: each drops what it had of a step."""
        for stage in list(self._streams):
            await self._break(stage)
        for server in list(self._here.values()):
            await server.rest()

    async def expel(self, peer: PeerId) -> None:
        """This peer is no member any more: it holds no stage of this column."""
        for stage, mates in self.mates.items():
            mates.pop(peer, None)
            if self.holder(stage) == peer:
                await self._give_up(stage)

    def holder(self, stage: int) -> PeerId | None:
        """Return the other node that holds a stage of this column, None where there is none."""
        stream = self._streams.get(stage)
        return None if stream is None else stream.peer

    def vector(self, name: str) -> memoryview:
        """Return a vector of the head's own stage."""
        return self._own.vector(name)

    async def aclose(self) -> None:
        """Let the holders go, and close the own stage."""
        await self.let_go()
        await self._own.aclose()


async def close(stream: Stream) -> None:
    with trio.CancelScope(shield=True), trio.move_on_after(1):
        await stream.aclose()


class _Head:
    """A head that a holder works for, by one stream."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.scope = trio.CancelScope()
        self.silence = Silence()

    @property
    def silent_since(self) -> float:
        return self.silence.since


class StageServer:
    """A member's stage that works for a head, one at a time. `stage` is opened, and nobody else's.

    `between` is called after each step of the head, before it is told: the numbers may change there. `settle`
    is called before they are evaluated or handed over, where they are to be what the run ends with. While
    there is no head, `lock` keeps one from beginning.
    """

    def __init__(
        self,
        stage: Stage,
        number: int,
        *,
        accept: Callable[[PeerId, Attach], Attached | Refusal],
        apply: Callable[[int, int], None],
        payload_bytes_max: int,
    ) -> None:
        """`accept` raises RemoteProtocolError for whoever is no member; `apply` hears how many
        steps its head has made, and the samples of the last."""
        self.number = number
        self.head: PeerId | None = None
        self.failure = ""
        """Why the stage can do no more, where it has failed."""
        self.last_head: PeerId | None = None
        """The head that it worked for last."""
        self.companions: list[PeerId] = []
        """The other nodes that worked for it."""
        self.keeps_copies = False
        """Whether that has asked for copies of its own stage to be kept."""
        self.lock = trio.Lock()
        self._stage = stage
        self._accept = accept
        self._apply = apply
        self._payload_bytes_max = payload_bytes_max
        self._heads: Register[_Head] = Register(HEADS)
        self._own: _Head | None = None
        self.between: Callable[[], Awaitable[None]] | None = None
        self.settle: Callable[[], Awaitable[None]] | None = None

    async def serve(self, stream: Stream, attach: Attach) -> None:
        """Work for the head on the other side of `stream`, until it ends, or says nothing for too long."""
        if attach.stage != self.number:
            await stream.send(encode(Refusal("another stage is held here")))
            return
        attached = self._accept(stream.peer, attach)
        if isinstance(attached, Refusal):
            await stream.send(encode(attached))
            return
        head = _Head(stream.peer)
        if self._own is not None and self._own.peer == stream.peer:
            self._let_go(self._own)  # an earlier stream of the same head
        evicted = self._heads.admit(trio.current_time(), head, stream.peer, stream.peer)
        if evicted is None:
            await stream.send(encode(Refusal("busy: it works for another head")))
            return
        for each in evicted:
            self._let_go(each)
        self._own, self.head = head, stream.peer
        self.last_head, self.keeps_copies = stream.peer, attach.keeps
        self.companions = [PeerId(peer) for peer in attach.column]
        with head.scope:
            try:
                async with self.lock:
                    await self._stage.call(api.Discard())
                    await self._stage.call(api.Restore(attach.step))
                    self._apply(attach.step, 0)
                await stream.send(encode(attached))
                while True:
                    await self._answer(stream, head)
            except StageFailed as error:
                self.failure = str(error)
            finally:
                self._heads.leave(head)
                if head is self._own:
                    self._own = self.head = None
                    with trio.CancelScope(shield=True), suppress(StageFailed):
                        async with self.lock:
                            await self._stage.call(api.Discard())

    def expel(self, peer: PeerId) -> None:
        """This peer is no member any more: do not work for it."""
        if self._own is not None and self._own.peer == peer:
            self._let_go(self._own)

    def _let_go(self, head: "_Head") -> None:
        self._heads.leave(head)
        head.scope.cancel()

    async def _answer(self, stream: Stream, head: "_Head") -> None:
        try:
            with trio.fail_after(HEAD_SECONDS_MAX), head.silence.waiting(trio.current_time):
                message, data = await stream.receive_with_payload(self._payload_bytes_max)
        except trio.TooSlowError:
            raise StreamClosed("a head that asks for nothing") from None
        question: Question = decode(message, Question, bytes_max=MESSAGE_BYTES_MAX)
        if not isinstance(question, Do):
            raise RemoteProtocolError("a head that attaches twice")
        request: Work = decode(bytes(data), Work, bytes_max=self._payload_bytes_max)
        try:
            async with self.lock:
                worked = await self._do(request)
        except PayloadRefused as error:  # what came cannot be used: the head, or one before it, is at fault
            await stream.send(encode(Refusal(str(error)[:REASON_LENGTH_MAX])))
            raise StreamClosed("a payload that cannot be used") from None
        except StageDiverged as error:
            await stream.send(encode(Refusal(str(error)[:REASON_LENGTH_MAX], is_diverged=True)))
            return
        except StageFailed as error:
            await stream.send(encode(Refusal(str(error)[:REASON_LENGTH_MAX])))
            raise
        if isinstance(request, api.Apply):
            self._heads.credit(head)
        try:
            with trio.fail_after(HEAD_SECONDS_MAX), head.silence.waiting(trio.current_time):
                await stream.send(encode(Did()), encode(worked))
        except trio.TooSlowError:
            raise StreamClosed("a head that takes no answer") from None

    async def work_for(self, head: PeerId, step: int) -> None:
        """Begin to work for the head that is this node itself, after so many steps. Raises StageFailed."""
        if self._own is None and self.between is not None:
            async with self.lock:
                await self._stage.call(api.Discard())
                await self._stage.call(api.Restore(step))
                self._apply(step, 0)
                self.head = head

    async def work(self, request: Work) -> object:
        """Answer a request of this node's own head. Raises PayloadRefused, StageDiverged, StageFailed."""
        async with self.lock:
            return await self._do(request)

    async def rest(self) -> None:
        """Work for this node's own head no more for now: drop what there was of a step."""
        self.head = None
        with suppress(StageFailed):
            async with self.lock:
                await self._stage.call(api.Discard())

    def close(self) -> None:
        """Work for nobody any more."""
        if self._own is not None:
            self._own.scope.cancel()

    async def _do(self, request: Work) -> object:
        if isinstance(request, api.Norm):
            totals, gradients = self._stage.vector("totals"), self._stage.vector("gradients")
            totals[:] = gradients
        is_result = isinstance(request, api.Export) or (
            isinstance(request, api.Forward) and not request.train
        )
        if is_result and self.settle is not None:
            await self.settle()
        worked = await self._stage.call(request)
        if isinstance(request, api.Apply):
            self._apply(request.step + 1, request.samples)
            if self.between is not None:
                await self.between()
        return worked
