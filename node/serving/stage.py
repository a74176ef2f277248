"""One stage of a service, in its process: loading it, and computing the batches of the provider's core."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import trio

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.content.graphs import Models
from node.errors import SessionRefused, StageFailed, Unreachable
from node.placement.admission import Machine
from node.protocols.services import Service, ServiceManifest
from node.seams import Clock, Executor, Seams, Stage
from node.serving import tensors
from partition import stage as api
from partition.codecs.codec import Payload, Typed, pack, unpack
from partition.model.cut import cut_layers
from partition.model.graph import ITEM_BYTES, SERVE, Graph, Size, StageGraph, StoredValues, TensorType
from partition.model.head import head_input
from partition.model.serving import ROWS_MAX, attention_layers
from partition.serve.messages import SESSION_BYTES, Answer, CloseCode, UnitWork
from partition.serve.provider import ComputeBatch
from partition.serve.session_places import SESSIONS_MAX
from partition.serve.turns import BATCH_TOKENS_MAX
from partition.stage_layout import parameter_layout, payload_bytes_max

CACHE_SHARE = 0.5
"""Share of a slot's memory for keys and values. The rest is for parameters and computing."""
OF_UNITS = (1, 2)
"""The inputs of the entry point `serve` for the positions of tokens and the wanted rows."""
TOKENS = Size(0)
"""The tensor dimension that is the number of tokens in a batch."""
SPARE_TOKENS = 128
"""Maximum number of places in a session's last page that stay empty."""
READING_PAUSE = 4
"""After unpacking a weight, the process serves only its sessions for this multiple of the time that the
unpacking took."""
NOBODY = bytes(SESSION_BYTES)
"""A session id that is never used."""
SHORT_BYTES = 64 << 10
"""Maximum number of bytes of tensors joined on the event loop: a decoded token of each of many sessions."""

Outcome = list[tuple[Answer | None, tuple[Typed, ...]]]


class BatchRefused(Exception):
    """The stage refused a batch, but continues. `session` is the session of the refused unit, if known."""

    def __init__(self, code: CloseCode, reason: str, session: bytes = b"") -> None:
        super().__init__(reason)
        self.code = code
        self.session = session


def specification(service: Service, graph: Graph, number: int, machine: Machine) -> api.StageSpecification:
    """Return the specification for the stage's process. Raises RemoteProtocolError if such a stage is
    impossible."""
    manifest = service.manifest
    if not any(entry.name == SERVE for entry in graph.entries):
        raise RemoteProtocolError("the model was not captured to be served")
    try:
        graphs = cut_layers(graph, manifest.graph, manifest.ranges(len(graph.layers)))
        return api.StageSpecification(
            run=service.id,
            graph=graphs[number],
            sizes_max=(BATCH_TOKENS_MAX, ROWS_MAX, manifest.context),
            threads=manifest.threads,
            device=machine.device,
            memory_bytes_max=max(1, machine.memory_bytes),
            allow_unfenced=machine.allow_unfenced,
            cache_bytes=min(
                int(machine.memory_bytes * CACHE_SHARE), sessions_bytes(graphs[number], manifest)
            ),
        )
    except ValueError as error:
        raise RemoteProtocolError(f"the service does not fit its model: {error}") from None


def token_bytes(graph: StageGraph) -> int:
    """Return the bytes of keys and values of one token in a stage."""
    kinds = [kind for _, *pair in attention_layers(graph, graph.entry(SERVE)) for kind in pair]
    return sum(
        ITEM_BYTES[kind.dtype] * prod(side for side in kind.shape if isinstance(side, int)) for kind in kinds
    )


def sessions_bytes(graph: StageGraph, manifest: ServiceManifest) -> int:
    """Return the maximum number of bytes of keys and values of all sessions that a stage may have."""
    return token_bytes(graph) * SESSIONS_MAX * (manifest.context + SPARE_TOKENS)


class HeldStage:
    """A stage that answers. `open` makes one; `aclose` must be called at the end."""

    def __init__(
        self, service: Service, number: int, wanted: api.StageSpecification, stage: Stage, clock: Clock
    ) -> None:
        self._clock = clock
        self.service = service
        self.number = number
        self.specification = wanted
        self.bits = b""
        """The bit class of its process: see `partition.execute.bit_class`."""
        self.needed_bytes = wanted.memory_bytes_max
        """Maximum memory that it needs of the memory it was given."""
        self._stage = stage
        self._packed: frozenset[int] = frozenset()
        """Rows of the parameter table whose values only the process has."""
        self._reading = trio.Lock()
        entry = wanted.graph.entry(SERVE)
        self._given = _boundary_forms(wanted.graph, entry.inputs)
        self._sent = () if self.is_last else _boundary_forms(wanted.graph, entry.outputs)
        self._has_hidden = not self.is_last or head_input(wanted.graph) is not None

    @classmethod
    async def open(
        cls,
        seams: Seams,
        service: Service,
        number: int,
        machine: Machine,
        models: Models,
        holders: Callable[[], Sequence[PeerId]],
        me: PeerId,
    ) -> "HeldStage":
        """Fetch the graph, start the process, and fill it with the stage's weights, from here or from
        holders. Raises StageFailed with the reason."""
        machine = replace(machine, allow_unfenced=machine.allow_unfenced or service.publisher == me)
        try:
            graph = await models.get(service.manifest.graph, holders())
            build = partial(specification, service, graph, number, machine)
            wanted = await seams.executor.run(build, apart=True)
            stage = await seams.executor.open_stage(await seams.executor.run(partial(encode, wanted)))
        except Unreachable as error:
            raise StageFailed(error.detail) from None
        except RemoteProtocolError as error:
            raise StageFailed(str(error)) from None
        except OSError as error:
            raise StageFailed(f"no process can be started: {error}") from None
        try:
            await models.fill(stage, wanted, holders())
            held = cls(service, number, wanted, stage, seams.clock)
            probed = await stage.call(api.FindBits())
            if isinstance(probed, api.BitsFound):
                held.bits, held._packed = probed.bits, frozenset(probed.packed)
                held.needed_bytes = probed.needed_bytes
            return held
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await stage.aclose()
            if isinstance(error, RemoteProtocolError):
                raise StageFailed(str(error)) from None
            raise

    @property
    def tokens_max(self) -> int:
        """Return the number of tokens of all sessions for which it has room; 0 if it keeps none."""
        each = token_bytes(self.specification.graph)
        return self.specification.cache_bytes // each if each else 0

    @property
    def is_last(self) -> bool:
        return self.number == self.service.manifest.stages - 1

    async def read_stored(self, offset: int, length: int, executor: Executor) -> bytes | None:
        """Return a range of the graph's stored values, for the next replica. It comes from the arena or, if
        the values are packed, from the process. Return None if the values belong to another stage."""
        for slot in parameter_layout(self.specification):
            source = slot.parameter.source
            if isinstance(source, StoredValues) and source.offset <= offset < source.offset + source.length:
                begin = offset - source.offset
                if offset + length > source.offset + source.length:
                    return None
                try:
                    if slot.row in self._packed:
                        return await self._read_packed(api.ReadValues(slot.row, begin, length))
                    start = slot.begin_bytes + begin
                    part = self._stage.vector("parameters")[start : start + length]
                    return await executor.run(partial(bytes, part))
                except StageFailed:
                    return None
        return None

    async def _read_packed(self, asked: api.ReadValues) -> bytes | None:
        """Let the process unpack a packed weight, and return it. Raises StageFailed."""
        async with self._reading:
            # Shielded, because a cancelled call would end the process, and a peer can cancel this call.
            with trio.CancelScope(shield=True):
                begun = self._clock.monotonic()
                found = await self._stage.call(asked)
                took = self._clock.monotonic() - begun
            # Sessions wait while a requested weight is unpacked, so pause between requests.
            await trio.sleep(READING_PAUSE * took)
        if not isinstance(found, api.ValuesRead) or len(found.data) != asked.length:
            return None
        return found.data

    def check(self, work: UnitWork, arrays: Sequence[Typed]) -> None:
        """Raise RemoteProtocolError if a unit is invalid for this stage. If its process had to refuse the
        unit, the whole batch would fail for all doors."""
        if work.is_hidden and not self._has_hidden:
            raise RemoteProtocolError(
                "hidden states were requested, but the model's logits are not made from any"
            )
        if self.number == 0:
            tensors.check_ids(work, arrays, self.service.manifest.vocabulary)
        else:
            tensors.check_boundary(work, arrays, self._given)

    async def compute(self, asked: ComputeBatch, executor: Executor) -> Outcome:
        """Return the results of a batch, one row per unit. Raises Refusal, or StageFailed if the process is
        gone."""
        hidden = [unit for unit in asked.units if unit.work.is_hidden and self.is_last]
        others = [unit for unit in asked.units if unit not in hidden]
        if not (hidden and others):
            return await self._compute(asked, executor)
        found: dict[bytes, tuple[Answer | None, tuple[Typed, ...]]] = {}
        # If the second part is refused, computing the first part twice changes nothing.
        for part in (others, hidden):
            outcome = await self._compute(replace(asked, units=tuple(part)), executor)
            found |= {unit.session: row for unit, row in zip(part, outcome, strict=True)}
        return [found[unit.session] for unit in asked.units]

    async def _compute(self, asked: ComputeBatch, executor: Executor) -> Outcome:
        units = tuple(
            api.Unit(unit.session, unit.work.position, unit.work.tokens, unit.work.wanted)
            for unit in asked.units
        )
        size = sum(array.nbytes for unit in asked.units for _, array in unit.arrays)
        join = partial(_join, [unit.arrays for unit in asked.units], self._given)
        payload = join() if size <= SHORT_BYTES else await executor.run(join)
        try:
            is_hidden = self.is_last and any(unit.work.is_hidden for unit in asked.units)
            served = await self._stage.call(api.Serve(units, payload, is_hidden=is_hidden))
        except SessionRefused as error:
            code: CloseCode = "busy" if error.has_no_room else "position"
            raise BatchRefused(code, str(error), error.session) from None
        except StageFailed as error:
            await self.try_process()
            raise BatchRefused("failed", str(error)) from None
        if not isinstance(served, api.Served):
            raise StageFailed("the stage's process gave an unrequested answer")
        works = [unit.work for unit in asked.units]
        bytes_max = payload_bytes_max(self.specification)
        split = partial(_split, served, works, bytes_max, self._sent, is_last=self.is_last)
        try:
            return split() if not self.is_last and size <= SHORT_BYTES else await executor.run(split)
        except (ValueError, RemoteProtocolError) as error:
            raise StageFailed(f"the stage's process gave an invalid answer: {error}") from None

    async def fork(self, session: bytes, base: bytes, tokens: int) -> None:
        """Let the process begin a session with the first tokens of another session. If it refuses, it also
        refuses the new session's first unit. Raises StageFailed if the process is gone."""
        try:
            await self._stage.call(api.CopySession(session, base, tokens))
        except SessionRefused:
            return
        except StageFailed:
            await self.try_process()

    async def try_process(self) -> None:
        """Raise StageFailed if the process is gone."""
        await self.forget(NOBODY)

    async def forget(self, session: bytes) -> None:
        """Let the process forget a session. Raises StageFailed if the process is gone."""
        await self._stage.call(api.EndSession(session))

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            await self._stage.aclose()


def _boundary_forms(graph: StageGraph, numbers: Sequence[int]) -> tuple[tensors.BoundaryForm, ...]:
    """Return the tensors that cross a boundary. Positions and wanted rows are not among them, because every
    stage derives these from the units. Raises RemoteProtocolError, as `boundary_form`."""
    types = dict(graph.entry(SERVE).types)
    return tuple(boundary_form(graph.types[types[number]]) for number in numbers if number not in OF_UNITS)


def boundary_form(kind: TensorType) -> tensors.BoundaryForm:
    """Return the form of a tensor that crosses a boundary. Raises RemoteProtocolError if it does not have one
    row per token."""
    axes = [axis for axis, side in enumerate(kind.shape) if side == TOKENS]
    if len(axes) != 1 or any(isinstance(side, Size) and side != TOKENS for side in kind.shape):
        raise RemoteProtocolError(
            "the model cannot be split there for serving: a tensor does not have one row per token"
        )
    return tensors.BoundaryForm(
        kind.dtype, tuple(side if isinstance(side, int) else 0 for side in kind.shape), axes[0]
    )


def _join(units: Sequence[Sequence[Typed]], form: Sequence[tensors.BoundaryForm]) -> Payload:
    return pack(tensors.join(units, form), "raw")


def _split(
    served: api.Served,
    works: Sequence[UnitWork],
    bytes_max: int,
    form: Sequence[tensors.BoundaryForm],
    *,
    is_last: bool,
) -> Outcome:
    arrays = [] if served.output is None else unpack(served.output, bytes_max=bytes_max)
    if not is_last:
        return [(None, rows) for rows in tensors.split(arrays, form, [work.tokens for work in works])]
    if not arrays:
        return [tensors.answer(work, None) for work in works]
    outcome: Outcome = []
    begin = 0
    for work in works:
        outcome.append(tensors.answer(work, arrays[0][1][begin : begin + work.wanted]))
        begin += work.wanted
    return outcome
