"""The rivals of the nodes in `pipeline.py`: the same model and micro-batches without nodes.

Each rival consists of one or two processes of its own. They are kept while the benchmark runs, and train a
number of steps on request. Like a stage's process they are nice, so that a busy machine slows all of them
equally.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from node.stages.sandbox import NICE
from partition.capture.models.gpt import GPT, GPTConfiguration, next_token_correct, next_token_loss
from partition.codecs.codec import Payload, pack, typed
from partition.execute import StageExecutor, prepare_process
from partition.execute.interpret import DTYPES, Results, compile_entry
from partition.execute.tensor_io import tensor_of
from partition.execute.values import first_values
from partition.model.cut import cut_layers
from partition.model.graph import StageGraph, decode_graph, graph_hash
from partition.model.sizes import evaluate, shape_of
from partition.stage import (
    Apply,
    Backward,
    BackwardDone,
    Forward,
    Forwarded,
    OptimizerSettings,
    Refused,
    StageSpecification,
)
from partition.stage_layout import arena_bytes, parameter_layout

Ranges = tuple[tuple[int, int], ...]
Perform = Callable[[str, int], list[float]]
"""Runs the named job this many times; returns the seconds of each."""
STAGES = 2
BUSY_STEP = 0
"""The step whose micro-batches a stage computes again and again, to measure the time of each."""


@dataclass(frozen=True)
class Task:
    """The model, its captured graph, and the shape of a step: `microbatches` of `samples` times `window`
    bytes."""

    model: GPTConfiguration
    graph: bytes
    optimizer: OptimizerSettings
    samples: int
    window: int
    microbatches: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens in one step."""
        return self.samples * self.window * self.microbatches

    def stages(self, ranges: Ranges) -> tuple[StageGraph, ...]:
        return cut_layers(decode_graph(self.graph), graph_hash(self.graph), ranges)

    def arrays(self) -> tuple[Any, Any]:
        """Return tokens and targets of every micro-batch of a step."""
        shape = (self.microbatches, self.samples, self.window + 1)
        drawn = np.random.default_rng(0).integers(0, self.model.vocabulary, shape)
        return np.ascontiguousarray(drawn[..., :-1]), np.ascontiguousarray(drawn[..., 1:])


class Rival:
    """`count` processes that run `made(*given, rank)` on request and report the time of each run. They start
    while other code runs; the first request waits for them."""

    def __init__(self, made: Callable[..., Perform], count: int, *given: Any) -> None:
        context = get_context("spawn")
        self._links: list[Any] = []
        self._processes = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, made, given, rank), daemon=True)
            process.start()
            theirs.close()
            self._links.append(ours)
            self._processes.append(process)
        self._starts = list(self._links)

    def seconds(self, what: str, times: int) -> list[list[float]]:
        """Return, for each process, the seconds of each of the `times` runs."""
        while self._starts:
            self._starts.pop().recv()
        for link in self._links:
            link.send((what, times))
        return [link.recv() for link in self._links]

    def close(self) -> None:
        """End the processes, because torch would take long to exit by itself."""
        for link, process in zip(self._links, self._processes, strict=True):
            link.close()
            process.kill()
            process.join()


def _serve(link: Any, made: Callable[..., Perform], given: Sequence[Any], rank: int) -> None:
    os.nice(NICE)
    perform = made(*given, rank)
    link.send(None)
    while True:
        try:
            what, times = link.recv()
        except EOFError:
            return
        link.send(perform(what, times))


def timed(step: Callable[[], object], times: int) -> list[float]:
    """Return the seconds of each of the `times` steps."""
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begun)
    return seconds


# One process


def eager(task: Task, threads: int, rank: int) -> Perform:
    """Return the job of the module as its author wrote it, with torch's own optimizer."""
    del rank
    torch.set_num_threads(threads)
    model = GPT(task.model)
    optimizer = _adamw(task, model.parameters())
    tokens, targets = (torch.from_numpy(array) for array in task.arrays())

    def step() -> None:
        samples = 0
        for given, wanted in zip(tokens, targets, strict=True):
            output = model(given)
            loss, count = next_token_loss(output, wanted)
            loss.backward()  # type: ignore[no-untyped-call]  # so in torch
            samples += int(count) + 0 * int(next_token_correct(output, wanted))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= samples
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return lambda _, times: timed(step, times)


def executor(task: Task, threads: int, rank: int) -> Perform:
    """Return the job of the stage's own executor, with the whole model as its only stage."""
    del rank
    prepare_process(threads)
    layers = len(decode_graph(task.graph).layers)
    held = Held(task, task.stages(((0, layers),))[0], threads)
    tokens, targets = task.arrays()
    sizes = task.samples, task.window
    batches = [
        (pack([typed(given)], "raw", sizes), pack([typed(wanted)], "raw", sizes))
        for given, wanted in zip(tokens, targets, strict=True)
    ]
    steps = iter(range(1 << 30))

    def step() -> None:
        number, samples = next(steps), 0
        for microbatch, (inputs, labels) in enumerate(batches):
            samples += held.ask(Forward(number, microbatch, True, inputs, labels), Forwarded).samples
        held.apply(number, samples)

    return lambda _, times: timed(step, times)


class Held:
    """A stage's executor with its own arenas."""

    def __init__(self, task: Task, stage: StageGraph, threads: int) -> None:
        self.specification = StageSpecification(
            b"benchmark",
            stage,
            (task.samples, task.window),
            microbatches=task.microbatches,
            optimizer=task.optimizer,
            threads=threads,
        )
        self.arenas = {
            name: memoryview(bytearray(size)) for name, size in arena_bytes(self.specification).items()
        }
        self._executor = StageExecutor(self.specification, self.arenas)

    def ask(self, request: Any, kind: type[Any]) -> Any:
        reply = self._executor.handle(request)
        assert not isinstance(reply, Refused), reply
        assert isinstance(reply, kind), reply
        return reply

    def apply(self, step: int, samples: int) -> None:
        self.arenas["totals"][:] = self.arenas["gradients"]
        self._executor.handle(Apply(step, samples))


# Two processes


def stage(task: Task, ranges: Ranges, store: str, rank: int) -> Perform:
    """Return the jobs of one of two stages: `alone` computes micro-batches without waiting, `gloo` trains
    with the other stage."""
    prepare_process(1)
    graphs = task.stages(ranges)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(graphs))
    alone, piped = _alone(task, graphs, rank), _Piped(task, graphs, rank)
    train = piped.last if rank else piped.first

    def perform(what: str, times: int) -> list[float]:
        dist.barrier()
        if what == "alone":
            return alone(times)
        return timed(train, times)

    return perform


def _alone(task: Task, graphs: Sequence[StageGraph], rank: int) -> Callable[[int], list[float]]:
    """Return the job that measures each micro-batch, forward and backward, with an input that was computed
    once."""
    held = Held(task, graphs[rank], 1)
    sizes = (task.samples, task.window)
    arrays = task.arrays()
    inputs, labels = (pack([typed(array[0])], "raw", sizes) for array in arrays)
    given, gradient = inputs, None
    is_last = rank == len(graphs) - 1
    if not is_last:
        gradient = _like(held.ask(Forward(BUSY_STEP, 0, False, inputs), Forwarded).output)
    for graph in graphs[:rank]:
        given = _output(task, graph, given)

    def microbatch(number: int) -> None:
        held.ask(Forward(BUSY_STEP, number, True, given, labels if is_last else None), Forwarded)
        if gradient is not None:
            held.ask(Backward(BUSY_STEP, number, gradient), BackwardDone)

    numbers = iter(range(1 << 19))
    return lambda times: timed(lambda: microbatch(next(numbers)), times)


def _output(task: Task, graph: StageGraph, given: Payload) -> Payload:
    found: Payload = Held(task, graph, 1).ask(Forward(BUSY_STEP, 0, False, given), Forwarded).output
    return found


def _like(payload: Payload) -> Payload:
    """Return gradients of ones for a payload's floating-point tensors."""
    arrays = [np.ones(header.shape, header.dtype) for header in payload.tensors if "float" in header.dtype]
    return pack([typed(array) for array in arrays], "raw", payload.sizes)


class _Piped:
    """One step of the schedule one forward, one backward (1F1B) over torch.distributed, written for two
    stages."""

    def __init__(self, task: Task, graphs: Sequence[StageGraph], rank: int) -> None:
        assert len(graphs) == STAGES
        self.graph = graphs[rank]
        self.entry = self.graph.entry("train")
        self.program = compile_entry(self.graph, "train", train=True, device=torch.device("cpu"))
        self.parameters = _parameters(self.graph)
        self.constants = {
            row: tensor_of(constant, torch.device("cpu"))
            for row, constant in zip(self.graph.constant_rows, self.graph.constants, strict=True)
        }
        self.optimizer = _adamw(task, self.parameters.values())
        self.sizes = (task.samples, task.window)
        self.tokens, self.targets = (torch.from_numpy(array) for array in task.arrays())
        self.samples = task.tokens
        self._rows = evaluate(self.graph.expressions, self.sizes)
        self._sent: list[Any] = []

    def first(self) -> None:
        """Run the first stage's step: with two micro-batches in flight, one comes back for each new one."""
        flying: deque[tuple[dict[int, Tensor], list[Tensor], list[Any]]] = deque()
        entry = self.entry
        for given in self.tokens:
            results = self._run([given], [])
            outputs = dict(zip(entry.outputs, results.outputs, strict=True))
            self._send([outputs[number].detach() for number in entry.outputs], 1)
            flying.append((outputs, *self._coming(entry.backward_outputs, 1)))
            if len(flying) == STAGES:
                self._back(*flying.popleft())
        while flying:
            self._back(*flying.popleft())
        self._finish()

    def last(self) -> None:
        """Run the last stage's step, which sends each micro-batch back immediately."""
        entry = self.entry
        coming = self._coming(entry.inputs, 0)
        for number, wanted in enumerate(self.targets, start=1):
            inputs, works = coming
            _wait(works)
            if number < len(self.targets):
                coming = self._coming(entry.inputs, 0)
            given = dict(zip(entry.inputs, inputs, strict=True))
            for value in entry.backward_inputs:
                given[value].requires_grad_()
            results = self._run(inputs, [wanted])
            assert results.loss is not None
            results.loss.backward()  # type: ignore[no-untyped-call]  # so in torch
            self._send([_gradient(given[value]) for value in entry.backward_inputs], 0)
        self._finish()

    def _run(self, inputs: list[Tensor], labels: list[Tensor]) -> Results:
        return self.program.run(self.parameters, self.constants, {}, inputs, labels, self.sizes)

    def _send(self, tensors: Sequence[Tensor], to: int) -> None:
        self._sent += [dist.isend(tensor.contiguous(), to) for tensor in tensors]

    def _coming(self, values: Sequence[int], source: int) -> tuple[list[Tensor], list[Any]]:
        """Return the tensors that will receive these values, and the operations to wait for."""
        types = dict(self.entry.types)
        kinds = [self.graph.types[types[number]] for number in values]
        tensors = [torch.empty(shape_of(kind, self._rows), dtype=DTYPES[kind.dtype]) for kind in kinds]
        return tensors, [dist.irecv(tensor, source) for tensor in tensors]

    def _back(self, outputs: dict[int, Tensor], gradients: list[Tensor], works: list[Any]) -> None:
        _wait(works)
        torch.autograd.backward([outputs[number] for number in self.entry.backward_outputs], gradients)

    def _finish(self) -> None:
        _wait(self._sent)
        self._sent.clear()
        for row in sorted(self.graph.tied):
            dist.all_reduce(_gradient(self.parameters[row]))
        for parameter in self.parameters.values():
            _gradient(parameter).div_(self.samples)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _adamw(task: Task, parameters: Iterable[Tensor]) -> torch.optim.AdamW:
    """Return AdamW in the form that a stage uses: torch's plain loop over the tensors."""
    settings = task.optimizer
    return torch.optim.AdamW(
        parameters,
        settings.learning_rate,
        settings.betas,
        settings.epsilon,
        settings.weight_decay,
        foreach=False,
    )


def _parameters(graph: StageGraph) -> dict[int, Tensor]:
    specification = StageSpecification(b"benchmark", graph, tuple(each.minimum for each in graph.symbols))
    found = {}
    for slot in parameter_layout(specification):
        value = torch.empty(slot.shape)
        first_values(slot.parameter, 0, torch.float32, value)
        found[slot.row] = value.requires_grad_()
    return found
