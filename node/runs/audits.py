"""Audits of committed steps: signed frames are fetched from members of a run and recomputed.

`/peerloom/frames/1`: a node sends the frames that it keeps of a run (`partition.steps.frame_archive`) to the
run's members on request. An audit fetches a stage's incoming and outgoing frames, both signed, loads the
stage's parameters at that step into a separate process, and recomputes the outgoing frame. It can only use
the parameters of the first step or of a checkpoint; for other steps the run would have to be trained again.

A frame is `right` if it has the same bytes, or values as close as different processors compute them.
Otherwise it is `wrong`, and the signature identifies its author. If something is missing, there is no
verdict.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId, peer_text
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.content.graphs import Models
from node.errors import RunFailed, StageFailed, StreamClosed, Unreachable
from node.placement.admission import Machine, build_stage_spec
from node.protocols.audits import (
    ANSWER_BYTES_MAX,
    FRAMES_PROTOCOL,
    QUESTION_BYTES_MAX,
    ROWS_MAX,
    Answer,
    FrameRow,
    FramesHere,
    FrameShown,
    Question,
    ShowFrame,
    WhichFrames,
)
from node.protocols.calls import conversation
from node.protocols.manifest import Run, run_text
from node.seams import Seams, Stage, Stream, StreamLimits
from partition import stage as api
from partition.codecs.codec import Payload, check_length, unpack
from partition.plan.plan import Plan, plan_hash
from partition.stage import StageSpecification
from partition.stage_layout import payload_bytes_max
from partition.steps.frame_archive import FrameArchive, FrameKey
from partition.steps.frames import PAYLOAD_BYTES_MAX, Direction, FrameHeader, check_signed, read_header

STREAMS = StreamLimits(message_bytes_max=QUESTION_BYTES_MAX, streams_per_peer_max=2)
RUNS_MAX = 16
"""Maximum number of runs whose members may ask for frames: those with the newest plans."""
PLANS_MAX = 64
"""Maximum number of plans of one run whose frames are known. Frames are judged by the newest plan of each cut
of the model into stages."""
REQUESTS_MAX = 64
"""Maximum number of requests on one stream."""
REQUEST_SECONDS_MAX = 10.0
CALL_SECONDS_MAX = 30.0
EXPIRE_SECONDS = 30.0
"""Seconds between two searches for expired frames."""
FRAMES_AUDITED_MAX = 4
"""Maximum number of frames in one audit, but at least one of each stage. The inputs of all frames are in
memory at once."""
NEAR = 1e-3
"""Largest accepted difference between the values of two kinds of processors, relative to a tensor's largest
value."""
NEAR_CODED = 5e-2
"""The same limit if a codec rounded the values: one step of int8 is a hundredth of the largest value of a
group."""


class AuditService(Protocol):
    """The attributes of `node.runs.runs.Runs` that audits use."""

    seams: Seams
    signer: Signer
    models: Models
    checkpoints: Checkpoints
    copies: CheckpointReplicator
    refuse: Callable[[PeerId, RemoteProtocolError], None]
    live: Callable[[], Collection[PeerId]]

    @property
    def machine(self) -> Machine: ...


@dataclass(frozen=True)
class FrameVerdict:
    """The verdict on one frame."""

    author: PeerId
    stage: int
    """The stage that computed the frame."""
    microbatch: int
    verdict: str
    detail: str = ""


Ranges = tuple[tuple[int, int], ...]
"""The layers of each stage."""


@dataclass
class _Known:
    """A known run: all its members so far, the layers of each plan by hash, and the newest plan of each
    cut."""

    run: Run
    members: frozenset[bytes] = frozenset()
    cuts: dict[bytes, Ranges] = field(default_factory=dict)
    plans: dict[Ranges, Plan] = field(default_factory=dict)

    def admit(self, plan: Plan) -> None:
        """Add a plan that came into force."""
        self.members |= {*plan.roster, self.run.requester}
        cut = _ranges(plan)
        self.cuts[plan_hash(plan)] = cut
        while len(self.cuts) > PLANS_MAX:
            del self.cuts[next(iter(self.cuts))]
        self.plans.pop(cut, None)
        self.plans[cut] = plan
        self.plans = {each: found for each, found in self.plans.items() if each in self.cuts.values()}

    def is_cut_as(self, plan: Plan, name: bytes) -> bool:
        """Return whether the plan with this hash gave each stage the same layers as `plan`."""
        return self.cuts.get(name) == _ranges(plan)


def _ranges(plan: Plan) -> Ranges:
    return tuple((stage.first_layer, stage.last_layer) for stage in plan.stages)


@dataclass(frozen=True)
class _Case:
    """A frame that a stage sent, with the frames from which the stage computed it."""

    number: int
    row: FrameRow
    input: Payload
    labels: Payload | None
    header: FrameHeader
    payload: Payload | None


class Audits:
    """The audit service of one node."""

    def __init__(self, service: AuditService) -> None:
        self.archive = FrameArchive()
        self._service = service
        self._runs: dict[bytes, _Known] = {}
        service.seams.network.handle(FRAMES_PROTOCOL, self._serve, STREAMS)

    async def run(self) -> None:
        """Drop frames as they expire, until cancelled."""
        while True:
            await trio.sleep(EXPIRE_SECONDS)
            self.archive.expire(self._service.seams.clock.monotonic())

    def admit(self, run: Run, plan: Plan) -> None:
        """Allow the members of a plan to ask for frames of its run, even after the run has ended."""
        known = self._runs.pop(run.id, None) or _Known(run)
        known.admit(plan)
        self._runs[run.id] = known
        while len(self._runs) > RUNS_MAX:
            del self._runs[next(iter(self._runs))]

    # Requests of other peers

    async def _serve(self, stream: Stream) -> None:
        try:
            for _ in range(REQUESTS_MAX):
                with trio.move_on_after(REQUEST_SECONDS_MAX) as waiting:
                    question: Question = decode(
                        await stream.receive(), Question, bytes_max=QUESTION_BYTES_MAX
                    )
                if waiting.cancelled_caught:
                    return
                answer, data = self._answer(stream.peer, question)
                with trio.move_on_after(CALL_SECONDS_MAX):
                    await (stream.send(encode(answer), data) if data else stream.send(encode(answer)))
        except RemoteProtocolError as error:
            self._service.refuse(stream.peer, error)
        except StreamClosed:
            return

    def _answer(self, peer: PeerId, question: Question) -> tuple[Answer, memoryview]:
        nothing = memoryview(b"")
        known = self._runs.get(question.run)
        may_ask = known is not None and peer in known.members
        if isinstance(question, WhichFrames):
            keys = list(self.archive.of_step(question.run, question.step)) if may_ask else []
            rows = [FrameRow(key.stage, key.direction, key.microbatch, key.author) for key in keys]
            return FramesHere(tuple(rows[:ROWS_MAX])), nothing
        kept = self.archive.get(_key(question)) if may_ask else None
        if kept is None:
            return FrameShown(), nothing
        if kept.payload is None:
            return FrameShown(kept.fact), nothing
        return FrameShown(kept.fact, has_data=True), kept.payload.data

    # Audits by this node

    async def audit(self, text: str, step: int | None) -> dict[str, Any]:
        """Recompute frames of a committed step of a run. Schema `peerloom/audit/1`.

        Raises RunFailed if the run has no plan here, or if no frame can be judged.
        """
        known = next((row for row in self._runs.values() if row.run.text == text), None)
        if known is None:
            raise RunFailed(f"run {text[:8]} has no frames: it has no plan here, or is in local mode")
        plans = [plan for plan in reversed(known.plans.values()) if len(plan.stages) > 1]
        if not plans:
            raise RunFailed(f"run {text[:8]} has one stage, so there are no frames between stages")
        newest = next(reversed(known.plans.values()))
        peers = [peer for peer in newest.members if peer in self._reachable()]
        steps = [step] if step is not None else await self._steps(known.run, peers)
        for each in steps:
            rows = await self._rows(known.run, each, peers)
            if rows:
                return _document(known.run, each, await self._judge_by_its_plan(known, plans, each, rows))
        said = ", ".join(map(str, steps)) or "none"
        raise RunFailed(
            f"run {text[:8]}: no member keeps frames of a step that can be judged "
            f"(tried: {said}); frames are kept for ten minutes, and can be judged at "
            "the first step and after a checkpoint"
        )

    def _reachable(self) -> set[PeerId]:
        return {*self._service.live(), self._service.signer.peer}

    async def _steps(self, run: Run, peers: Sequence[PeerId]) -> list[int]:
        """Return the steps whose parameters can be fetched, newest first: those of checkpoints, and the first
        step."""
        return sorted({0, *await self._service.copies.steps(run.text, peers)}, reverse=True)

    async def _rows(self, run: Run, step: int, peers: Sequence[PeerId]) -> dict[FrameRow, list[PeerId]]:
        """Return the frames of a step that members keep, each with its holders."""
        found: dict[FrameRow, list[PeerId]] = {}

        async def ask(peer: PeerId) -> None:
            answer, _ = await self._ask(peer, WhichFrames(run.id, step))
            for row in answer.rows if isinstance(answer, FramesHere) else ():
                found.setdefault(row, []).append(peer)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
        return found

    async def _ask(self, peer: PeerId, question: Question) -> tuple[Answer, memoryview]:
        """Send a question to a member, or answer it directly if the member is this node. Return an empty
        FrameShown if there is no answer."""
        if peer == self._service.signer.peer:
            return self._answer(peer, question)
        try:
            talk = conversation(
                self._service.seams.network,
                peer,
                FRAMES_PROTOCOL,
                seconds=CALL_SECONDS_MAX,
                message_bytes_max=ANSWER_BYTES_MAX,
            )
            async with talk as stream:
                await stream.send(encode(question))
                data, payload = await stream.receive_with_payload(PAYLOAD_BYTES_MAX)
                answer: Answer = decode(data, Answer, bytes_max=ANSWER_BYTES_MAX)
                return answer, payload
        except (Unreachable, StreamClosed):
            return FrameShown(), memoryview(b"")
        except RemoteProtocolError as error:
            self._service.refuse(peer, error)
            return FrameShown(), memoryview(b"")

    async def _fetch(
        self, known: _Known, plan: Plan, step: int, row: FrameRow, holders: Sequence[PeerId]
    ) -> tuple[FrameHeader, Payload | None] | None:
        """Return a frame that its author signed under a plan with this cut, with its payload if one of its
        holders keeps it; None if there is none."""
        found: tuple[FrameHeader, Payload | None] | None = None
        for peer in holders:
            answer, data = await self._ask(peer, ShowFrame(known.run.id, step, row))
            if not isinstance(answer, FrameShown) or answer.header is None:
                continue
            try:
                header = self._checked(answer.header, step, row)
                if not known.is_cut_as(plan, header.plan):
                    continue
                if not answer.has_data:
                    found = found or (header, None)
                    continue
                check_length(header.tensors, header.codec, len(data))
                return header, Payload(header.sizes, header.tensors, header.codec, header.digest, data)
            except RemoteProtocolError as error:
                self._service.refuse(peer, error)
        return found

    def _checked(self, fact: Fact, step: int, row: FrameRow) -> FrameHeader:
        """Return the content of a signed header. Raises RemoteProtocolError if it belongs to a different
        frame."""
        check_signed(self._service.signer, fact)
        header = read_header(fact)
        of = header.step, header.stage, header.direction, header.microbatch, fact.author
        if of != (step, row.stage, row.direction, row.microbatch, row.author) or not header.train:
            raise RemoteProtocolError("another frame than the one asked for")
        return header

    async def _judge_by_its_plan(
        self, known: _Known, plans: Sequence[Plan], step: int, rows: dict[FrameRow, list[PeerId]]
    ) -> list[FrameVerdict]:
        """Judge by the plan under which the frames were sent, because other plans give the stages different
        layers."""
        verdicts: list[FrameVerdict] = []
        for plan in plans:
            verdicts = await self._judge(known, plan, step, rows)
            if any(each.verdict != "unknown" for each in verdicts):
                break
        return verdicts

    async def _judge(
        self, known: _Known, plan: Plan, step: int, rows: dict[FrameRow, list[PeerId]]
    ) -> list[FrameVerdict]:
        """Recompute the frames that stages sent for some micro-batches, one stage at a time. All frames are
        fetched first, since an active run may drop its older steps while a process starts."""
        cases: list[_Case | FrameVerdict] = []
        for number, row in _chosen(plan, rows):
            cases.append(await self._case(known, plan, step, number, row, rows))
        verdicts = [case for case in cases if isinstance(case, FrameVerdict)]
        for number in range(len(plan.stages)):
            mine = [case for case in cases if isinstance(case, _Case) and case.number == number]
            if not mine:
                continue
            stage, specification = await self._open(known.run, plan, step, number)
            try:
                verdicts += [await self._judge_one(stage, specification, step, case) for case in mine]
            finally:
                with trio.CancelScope(shield=True):
                    await stage.aclose()
        return sorted(verdicts, key=lambda each: (each.stage, each.microbatch))

    async def _open(self, run: Run, plan: Plan, step: int, number: int) -> tuple[Stage, StageSpecification]:
        """Open a stage with its parameters from before this step. Raises RunFailed."""
        service, executor = self._service, self._service.seams.executor
        holders = [peer for peer in map(PeerId, plan.members) if peer in self._reachable()]
        try:
            graph = await service.models.get(run.manifest.graph_hash, holders)
            build = partial(build_stage_spec, run, graph, plan, number, service.machine)
            specification, _, data = await executor.run(build, apart=True)
            stage = await executor.open_stage(data)
            try:
                if step == 0:
                    await service.models.fill(stage, specification, holders)
                else:
                    kept = await service.copies.fetch(run.text, step, holders)
                    ranges = list(_ranges(plan))
                    arenas = stage.vector("parameters"), stage.vector("moments")
                    await service.checkpoints.restore_layers(
                        kept.checkpoint, run, graph, (ranges, number), arenas, holders
                    )
                await stage.call(api.Restore(step))
            except BaseException:
                with trio.CancelScope(shield=True):
                    await stage.aclose()
                raise
        except (Unreachable, StageFailed, RemoteProtocolError, OSError) as error:
            raise RunFailed(
                f"run {run.text[:8]}: stage {number + 1} cannot be computed here: {error}"
            ) from None
        return stage, specification

    async def _case(
        self,
        known: _Known,
        plan: Plan,
        step: int,
        number: int,
        row: FrameRow,
        rows: dict[FrameRow, list[PeerId]],
    ) -> "_Case | FrameVerdict":
        """Return a frame with the frames that its stage had received, or a verdict that says why it cannot be
        judged."""
        directions: tuple[Direction, ...] = ("input", "labels") if row.direction == "gradient" else ("input",)
        given: dict[str, Payload] = {}
        for direction in directions:
            # A stage may present an input signed with a key of its own, so only frames by the stage before
            # it, or by trainers, count.
            feeds = not number or direction == "labels"
            authors = plan.trainers if feeds else plan.stages[number - 1].replicas
            of = number, direction, row.microbatch
            for each in rows:
                is_wanted = (each.stage, each.direction, each.microbatch) == of and each.author in authors
                if is_wanted and direction not in given:
                    fetched = await self._fetch(known, plan, step, each, rows[each])
                    if fetched is not None and fetched[1] is not None:
                        given[direction] = fetched[1]
            if direction not in given:
                reason = f"its {direction} is not kept any more"
                return FrameVerdict(PeerId(row.author), number, row.microbatch, "unknown", reason)
        found = await self._fetch(known, plan, step, row, rows[row])
        if found is None:
            return FrameVerdict(PeerId(row.author), number, row.microbatch, "unknown", "nobody shows it")
        return _Case(number, row, given["input"], given.get("labels"), *found)

    async def _judge_one(
        self, stage: Stage, specification: StageSpecification, step: int, case: "_Case"
    ) -> FrameVerdict:
        """Recompute one frame."""
        row, header, payload = case.row, case.header, case.payload
        verdict = partial(FrameVerdict, PeerId(row.author), case.number, row.microbatch)
        try:
            done = await stage.call(
                api.Forward(step, row.microbatch, True, case.input, case.labels, codec=header.codec)
            )
            assert isinstance(done, api.Forwarded)
            await stage.call(api.Discard())
            await stage.call(api.Restore(step))
        except StageFailed as error:
            return verdict("unknown", f"it cannot be computed: {error}")
        computed = done.gradient if row.direction == "gradient" else done.output
        if computed is None:
            return verdict("unknown", "this stage sends nothing")
        if computed.digest == header.digest:
            return verdict("right", "the same bytes")
        if payload is None or header.codec == "int4":
            return verdict("unknown", "the bytes differ; its values are not kept, or carry earlier rounding")
        compare = partial(_distance, computed, payload, payload_bytes_max(specification))
        try:
            distance = await self._service.seams.executor.run(compare)
        except RemoteProtocolError as error:
            return verdict("wrong", str(error))
        if distance <= (NEAR if header.codec == "raw" else NEAR_CODED):
            return verdict("right", f"the values agree within {distance:.1e}")
        return verdict("wrong", f"the values differ by {distance:.1e} of the largest")


def _chosen(plan: Plan, rows: Collection[FrameRow]) -> list[tuple[int, FrameRow]]:
    """Return the frames to judge, each with the stage that sent it: frames sent forward, and frames that the
    last stage sent back."""
    last = len(plan.stages) - 1
    found: list[tuple[int, FrameRow]] = []
    for number, stage in enumerate(plan.stages):
        sent = ("gradient", number - 1) if number == last else ("input", number + 1)
        of_stage = [r for r in rows if (r.direction, r.stage) == sent and r.author in stage.replicas]
        of_stage.sort(key=lambda row: (row.microbatch, row.author))
        found += [(number, row) for row in of_stage[: max(1, FRAMES_AUDITED_MAX // len(plan.stages))]]
    return found


def _key(question: ShowFrame) -> FrameKey:
    row = question.row
    return FrameKey(question.run, question.step, row.stage, row.direction, row.microbatch, row.author)


def _distance(computed: Payload, shown: Payload, bytes_max: int) -> float:
    """Return the largest difference between two frames' tensors, relative to the largest value of each
    tensor. Raises RemoteProtocolError if their shapes differ or they are not tensors."""
    worst = 0.0
    ours, theirs = unpack(computed, bytes_max=bytes_max), unpack(shown, bytes_max=bytes_max)
    if [(kind, array.shape) for kind, array in ours] != [(kind, array.shape) for kind, array in theirs]:
        raise RemoteProtocolError("tensors of other shapes")
    for (_, mine), (_, other) in zip(ours, theirs, strict=True):
        if mine.size:
            one, two = np.asarray(mine, np.float64), np.asarray(other, np.float64)
            largest = max(float(np.abs(one).max()), 1e-30)
            distance = float(np.abs(one - two).max()) / largest
            worst = max(worst, distance if np.isfinite(distance) else np.inf)
    return worst


def _document(run: Run, step: int, verdicts: Sequence[FrameVerdict]) -> dict[str, Any]:
    return {
        "schema": "peerloom/audit/1",
        "run": run_text(run.id),
        "step": step,
        "frames": [
            {
                "peer": peer_text(each.author),
                "stage": each.stage,
                "microbatch": each.microbatch,
                "verdict": each.verdict,
                "detail": each.detail,
            }
            for each in verdicts
        ],
    }
