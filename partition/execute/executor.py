"""Computing a stage with torch: forward, backward and the optimizer step over shared arenas.

It runs in the stage's own process (`node.stages.process`), never in the node's. `partition.stage` defines the
requests; `partition.execute.interpret` computes a graph.

The sums hold exactly the micro-batches that were answered: the gradients and the batch statistics of a
micro-batch are added in its backward pass. All mistakes of a peer are found, and refused, in the forward
pass. If an operator still raises in the backward pass (for example because no memory is left), some sums
would include the micro-batch and others would not. So the error leaves `handle`, and the process ends and
discards its sums, like a replica that dies.

A micro-batch is removed from the sums in the same way as it was added, but backward from the loss times -1.
Negation does not round, so exactly the bits that were added are subtracted, wherever the cuts are; only the
rounding of the two additions remains.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from crypto.errors import RemoteProtocolError
from partition.codecs.codec import Payload, Rounding
from partition.execute.attention import ROWS, padded
from partition.execute.bit_class import bit_class
from partition.execute.interpret import LabelOutOfRange, Program, Results, compile_entry
from partition.execute.open_step import Flight, OpenStep
from partition.execute.pages import UnitRefused
from partition.execute.products import Products
from partition.execute.seeds import seed_of
from partition.execute.served_weights import ServedWeights
from partition.execute.serving import ServedStage
from partition.execute.sessions import StageSessions
from partition.execute.stage_arenas import StageArenas
from partition.execute.step_arithmetic import (
    add_statistics,
    kept_shares,
    scalar,
)
from partition.execute.tensor_io import BadPayload, Boundary, NotFinite, blaming, is_finite
from partition.model.graph import EVALUATE, SERVE, TRAIN, StageEntry, TensorType
from partition.stage import (
    REASON_LENGTH_MAX,
    SAMPLES_MAX,
    Applied,
    Apply,
    Backward,
    BackwardDone,
    BitsFound,
    CopySession,
    Discard,
    EndSession,
    Export,
    Exported,
    FindBits,
    Forget,
    Forward,
    Forwarded,
    Import,
    Norm,
    Normed,
    PayloadPart,
    Ran,
    ReadValues,
    Refused,
    Reload,
    Reply,
    Request,
    Restore,
    RunEntryPoint,
    Serve,
    Served,
    StageDone,
    StageSpecification,
    ValuesRead,
)


class StageExecutor:
    """One replica of a stage. Not thread-safe; one request at a time.

    `arenas` maps each name of `partition.stage.ARENAS` to zeroed, writable memory of `arena_bytes`. First
    parameters that have a recipe are written to it immediately; stored ones stay zero until the node writes
    them and sends `Reload`. `room_bytes` is the extra memory that a served stage may use for speed.

    Raises:
        LocalProtocolError: an arena is missing or has the wrong size.
        RemoteProtocolError: a graph that `partition.execute.admit` would have refused.
    """

    def __init__(
        self, specification: StageSpecification, arenas: Mapping[str, memoryview], room_bytes: int = 0
    ) -> None:
        graph = specification.graph
        self._specification = specification
        self._graph = graph
        self._device = torch.device(specification.device)
        self._boundary = Boundary(specification, self._device)
        self._needed_bytes = max(0, specification.memory_bytes_max - room_bytes)
        self._programs: dict[tuple[str, bool], Program] = {}
        self._arenas = StageArenas(specification, arenas, self._device)
        names = {entry.name for entry in graph.entries}
        self._evaluated = EVALUATE if EVALUATE in names else TRAIN
        self._sessions = StageSessions(specification, self._device)
        least = ROWS * specification.threads
        products = Products(least, padded(specification.sizes_max[0], least), room_bytes)
        self._weights = ServedWeights(graph, self._arenas.slots, self._arenas.values, products)
        self._served = ServedStage(specification, self._boundary, self._device) if SERVE in names else None
        self._open = OpenStep()

    def handle(self, request: Request) -> Reply:
        """Answer one request. A request that no correct peer makes is answered by `Refused` and changes
        nothing."""
        try:
            return self._answer(request)
        except BadPayload as error:
            return Refused(str(error)[:REASON_LENGTH_MAX], error.part, "values" if error.of_values else "")
        except NotFinite as error:
            return Refused(str(error)[:REASON_LENGTH_MAX], fault="divergence")
        except UnitRefused as error:
            return Refused(str(error)[:REASON_LENGTH_MAX], fault=error.fault, session=error.session)
        except RemoteProtocolError as error:
            return Refused(str(error)[:REASON_LENGTH_MAX])

    def _answer(self, request: Request) -> Reply:
        match request:
            case Forward():
                return self._forward(request)
            case Backward():
                return self._backward(request)
            case Norm():
                return Normed(self._arenas.squared_norm())
            case Apply():
                return self._apply(request)
            case RunEntryPoint():
                return self._run(request)
            case Serve():
                return self._serve(request)
            case FindBits():
                return self._probe()
            case ReadValues():
                return ValuesRead(self._weights.read(request))
            case Export() if self._weights.released:
                raise RemoteProtocolError(
                    "the stage's weights are packed for serving; read them with `ReadValues`"
                )
            case CopySession():
                return self._fork(request)
            case Export():
                return Exported(self._arenas.export())
        self._obey(request)
        return StageDone()

    def _obey(self, request: Forget | Discard | EndSession | Import | Reload | Restore) -> None:
        match request:
            case Forget():
                self._open.let_go(request.step, request.microbatch)
            case Discard():
                self._boundary.forget()
                self._forget()
            case EndSession():
                self._sessions.end(request.session)
                if self._served is not None:
                    self._served.pages.end(request.session)
            case Import():
                self._import(request)
            case Reload():
                self._take(None)
            case Restore():
                self._take(request.step)

    # Forward and backward

    def _forward(self, request: Forward) -> Forwarded:
        name = TRAIN if request.train else self._evaluated
        program = self._program(name, request.train)
        entry = self._graph.entry(name)
        if program.uses_states:
            raise RemoteProtocolError(f"'{TRAIN}' has states, but states belong to sessions")
        self._open.admit(request)
        with blaming("input"):
            sizes = self._boundary.sizes(request.input)
            inputs = self._boundary.take(request.input, self._kinds(entry, entry.inputs), sizes)
        labels = self._labels(entry, request.labels, sizes)
        is_repeated = self._specification.recompute and request.train and entry.loss is None
        try:
            results = self._compute(program, entry, inputs, labels, sizes, request, keeps=not is_repeated)
        except LabelOutOfRange as error:
            raise BadPayload(str(error), "labels" if labels else "input", of_values=True) from None
        if not all(is_finite(tensor) for pair in results.statistics for tensor in pair):
            raise NotFinite("the statistics of a batch norm are not finite")
        if entry.loss is not None:
            return self._close(request, entry, program, inputs, results, sizes)
        output, rounding = None, Rounding()
        if request.sign > 0:
            kinds = self._kinds(entry, entry.outputs)
            output, rounding = self._boundary.give(results.outputs, kinds, sizes, request.codec)
        if request.train and entry.backward_outputs:
            self._open.hold(request, Flight(request.sign, sizes, inputs, None if is_repeated else results))
        elif request.train:
            # No gradient will come back for this micro-batch, so its forward pass is all there is.
            self._count(program, results, request)
        return Forwarded(output, None, 0.0, sizes[0], (), rounding=rounding)

    def _close(
        self,
        request: Forward,
        entry: StageEntry,
        program: Program,
        inputs: list[torch.Tensor],
        results: Results,
        sizes: tuple[int, ...],
    ) -> Forwarded:
        """Finish the last stage's forward pass, and go backward."""
        loss = results.loss
        assert loss is not None
        numbers = [scalar(loss, "the loss"), *(scalar(metric, "a metric") for metric in results.metrics)]
        samples = sizes[0]
        if results.count is not None:
            counted = scalar(results.count, "the count of samples")
            if counted != int(counted) or not 0 <= counted <= SAMPLES_MAX:
                raise RemoteProtocolError(f"a count of {counted} samples")
            samples = int(counted)
        gradient, rounding = None, Rounding()
        if request.train:
            if loss.requires_grad:
                torch.autograd.backward(loss, torch.full_like(loss, request.sign))
            self._count(program, results, request)
            gradient, rounding = self._gradients(entry, inputs, sizes, request)
        return Forwarded(None, gradient, numbers[0], samples, tuple(numbers[1:]), rounding=rounding)

    def _backward(self, request: Backward) -> BackwardDone:
        program = self._program(TRAIN, True)
        entry = self._graph.entry(TRAIN)
        is_counted = self._open.has_counted(request)
        if is_counted and not entry.backward_outputs and not request.gradient.tensors:
            return BackwardDone(None)
        held = self._open.held(request)
        kinds = self._kinds(entry, entry.backward_outputs)
        with blaming("gradient"):
            gradients = self._boundary.take(request.gradient, kinds, held.sizes, are_gradients=True)
        results = held.results
        if results is None:
            results = self._compute(program, entry, held.inputs, [], held.sizes, request, keeps=True)
        self._open.end_flight(request.microbatch)
        if request.sign < 0:
            gradients = [gradient.neg_() for gradient in gradients]
        # A floating-point value may have no gradient, because the model detached it.
        outputs = dict(zip(entry.outputs, results.outputs, strict=True))
        pairs = [
            (outputs[value], gradient.to(outputs[value].dtype))
            for value, gradient in zip(entry.backward_outputs, gradients, strict=True)
            if outputs[value].requires_grad
        ]
        if pairs:
            tensors, given = zip(*pairs, strict=True)
            torch.autograd.backward(tensors, given)
        self._count(program, results, request)
        gradient, rounding = self._gradients(entry, held.inputs, held.sizes, request)
        return BackwardDone(gradient, rounding=rounding)

    def _compute(
        self,
        program: Program,
        entry: StageEntry,
        inputs: list[torch.Tensor],
        labels: list[torch.Tensor],
        sizes: tuple[int, ...],
        request: Forward | Backward,
        *,
        keeps: bool,
    ) -> Results:
        """Run the program; with gradients if this is training and `keeps` is set, so that a backward pass can
        follow."""
        is_training = isinstance(request, Backward) or request.train
        if is_training and keeps:
            for number, tensor in zip(entry.inputs, inputs, strict=True):
                tensor.requires_grad_(number in entry.backward_inputs)
        run, held = self._specification.run, self._arenas
        seed = partial(seed_of, run, request.step, request.microbatch, entry.name)
        with torch.set_grad_enabled(is_training and keeps), self._precision():
            return program.run(held.parameters, held.constants, {}, inputs, labels, sizes, seed)

    def _precision(self) -> AbstractContextManager[object]:
        if self._specification.autocast == "off":
            return nullcontext()
        return torch.autocast(self._device.type, torch.bfloat16)

    def _gradients(
        self,
        entry: StageEntry,
        inputs: list[torch.Tensor],
        sizes: tuple[int, ...],
        request: Forward | Backward,
    ) -> tuple[Payload | None, Rounding]:
        """Return the gradients for the previous stage."""
        if not entry.backward_inputs or request.sign < 0:
            return None, Rounding()
        given = dict(zip(entry.inputs, inputs, strict=True))
        leaves = [given[number] for number in entry.backward_inputs]
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        return self._boundary.give_gradients(gradients, sizes, request.codec)

    def _labels(
        self, entry: StageEntry, payload: Payload | None, sizes: tuple[int, ...]
    ) -> list[torch.Tensor]:
        if payload is None:
            if entry.labels:
                raise RemoteProtocolError("this stage needs labels")
            return []
        # If two payloads disagree about their sizes, blame the one whose size is unusual.
        usual = self._specification.sizes_max
        is_odd = payload.sizes != sizes and payload.sizes == usual
        part: PayloadPart = "input" if is_odd else "labels"
        with blaming(part):
            return self._boundary.take(payload, self._kinds(entry, entry.labels), sizes)

    def _count(self, program: Program, results: Results, request: Forward | Backward) -> None:
        """Add the statistics, after the gradients. Record whether the sums hold the micro-batch."""
        microbatches = self._specification.microbatches
        add_statistics(self._arenas.statistics, program, results, request, microbatches=microbatches)
        self._open.count(request)
        if request.sign < 0 and not self._open.counted:
            self._arenas.clear_sums()  # remove the rounding errors of what was taken out
        else:
            self._arenas.give_sums()

    # Entry points without gradients

    def _run(self, request: RunEntryPoint) -> Ran:
        program = self._program(request.entry, False)
        entry = self._graph.entry(request.entry)
        if entry.labels:
            raise RemoteProtocolError(f"'{request.entry}' needs labels, so it cannot be run by itself")
        sizes = self._boundary.sizes(request.input)
        inputs = self._boundary.take(request.input, self._kinds(entry, entry.inputs), sizes)
        states = self._sessions.states(request.session, self._boundary.shapes(self._sessions.kinds, sizes))
        held = self._arenas
        try:
            with torch.no_grad(), self._precision():
                results = program.run(held.parameters, held.constants, states, inputs, [], sizes)
            kinds = self._kinds(entry, entry.outputs)
            output, _ = self._boundary.give(results.outputs, kinds, sizes, request.codec)
            self._sessions.keep(request.session, states, results.updates)
        except RemoteProtocolError as error:
            if not program.in_place or not self._sessions.has(request.session):
                raise
            # Some states may already be updated, so the call cannot be undone.
            self._sessions.end(request.session)
            raise RemoteProtocolError(f"the session is over: {error}") from None
        return Ran(output)

    def _serving(self) -> ServedStage:
        if self._served is None:
            raise RemoteProtocolError(f"the stage has no entry point '{SERVE}'")
        return self._served

    def _probe(self) -> BitsFound:
        served, program, held = self._serving(), self._program(SERVE, False), self._arenas
        bits = bit_class(self._specification, served, program, held.parameters, held.constants)
        return BitsFound(bits, self._weights.released, self._needed_bytes)

    def _serve(self, request: Serve) -> Served:
        served, held = self._serving(), self._arenas
        self._weights.products.forget()
        return served.serve(request, self._program(SERVE, False), held.parameters, held.constants)

    def _fork(self, request: CopySession) -> StageDone:
        self._serving().pages.fork(request.session, request.base, request.tokens)
        return StageDone()

    # The step

    def _apply(self, request: Apply) -> Applied:
        self._open.check_applied(request.step)
        if request.is_skipped:
            # rounding errors may be as far from finite as the gradients that were sent
            self._boundary.forget()
        else:
            moved = self._graph.entry(TRAIN).moved
            kept = kept_shares(self._program(TRAIN, True), moved, self._specification.microbatches)
            self._arenas.step(request, kept)
        self._arenas.clear_totals()
        self._forget()
        self._open.advance()
        return Applied(self._arenas.digest())

    def _forget(self) -> None:
        self._open.clear()
        self._arenas.clear_sums()

    def _import(self, request: Import) -> None:
        self._arenas.import_values(request.data)
        self._boundary.forget()
        self._forget()
        self._open.next_step = None

    def _take(self, step: int | None) -> None:
        """Read the values that the node wrote: first parameters (if `step` is None), or all state after
        `step` steps."""
        self._arenas.take(has_moments=step is not None)
        self._boundary.forget()
        self._forget()
        self._open.next_step = step
        if self._served is not None:
            self._program(SERVE, False)
            self._weights.take(self._arenas.parameters)

    # Tables

    def _program(self, entry: str, train: bool) -> Program:
        if (entry, train) not in self._programs:
            products = self._weights.products if entry == SERVE else None
            program = compile_entry(self._graph, entry, train=train, device=self._device, products=products)
            self._programs[entry, train] = program
        return self._programs[entry, train]

    def _kinds(self, entry: StageEntry, numbers: Sequence[int]) -> list[TensorType]:
        types = dict(entry.types)
        return [self._graph.types[types[number]] for number in numbers]
