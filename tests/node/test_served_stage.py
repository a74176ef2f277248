"""A stage that serves, in its sandboxed process."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trio
import trio.testing
from msgspec.structs import replace

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from node.errors import SessionRefused, StageFailed
from node.executor import RealExecutor
from node.seams import RealClock
from node.serving.stage import HeldStage
from node.stages.host import StageHost
from partition.capture import capture
from partition.capture.models.gpt import gpt
from partition.capture.state_dict import bytes_of
from partition.codecs.codec import Typed, pack, unpack
from partition.model.cut import cut
from partition.model.graph import StoredValues
from partition.model.serving import serving_graph
from partition.serve.messages import UnitWork
from partition.stage import (
    BitsFound,
    EndSession,
    Export,
    FindBits,
    ReadValues,
    Reload,
    Serve,
    Served,
    StageSpecification,
    Unit,
    ValuesRead,
)
from partition.stage_layout import parameter_layout
from tests.partition.serving_world import Chain, session

CONTEXT = 96


async def test_packed_weights_leave_the_arena_and_are_read_back_bit_for_bit() -> None:
    torch.manual_seed(1)
    task = gpt((CONTEXT,), 65, layers=1, heads=2, width=64)
    captured = capture(
        task.model, task.example_inputs, labels=task.labels, loss=task.loss, dynamic=task.dynamic
    )
    (share,) = cut(serving_graph(captured.graph, CONTEXT), captured.hash, ())
    values = task.model.state_dict()
    specification = StageSpecification(
        b"service", share, (128, 96, CONTEXT), cache_bytes=1 << 18, memory_bytes_max=1 << 30
    )
    host = await StageHost.open(encode(specification))
    try:
        arena = host.vector("parameters")
        for slot in parameter_layout(specification):
            arena[slot.begin_bytes : slot.end_bytes] = bytes_of(values[slot.name])
        await host.call(Reload())
        found = await host.call(FindBits())
        assert isinstance(found, BitsFound)
        assert found.packed
        for slot in parameter_layout(specification):
            data = bytes_of(values[slot.name])
            is_empty = 4096 * bytes(1) in bytes(arena[slot.begin_bytes : slot.end_bytes])
            assert is_empty == (slot.row in found.packed)
            part = len(data) // 3
            read = await host.call(ReadValues(slot.row, part, len(data) - part))
            assert isinstance(read, ValuesRead)
            assert read.data == data[part:]
        # A peer that hangs up in the middle of its question ends only its own stream.
        service: Any = SimpleNamespace(manifest=SimpleNamespace(stages=1))
        held = HeldStage(service, 0, specification, host, RealClock())
        held._packed = frozenset(found.packed)
        packed = next(slot for slot in parameter_layout(specification) if slot.row in found.packed)
        source = packed.parameter.source
        assert isinstance(source, StoredValues)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(held.read_stored, source.offset, 64, RealExecutor())
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        assert await held.read_stored(source.offset, 64, RealExecutor()) == bytes_of(values[packed.name])[:64]
        with pytest.raises(StageFailed, match=f"row {slot.row} does not have"):
            await host.call(ReadValues(slot.row, 0, len(data) + 1))
        with pytest.raises(StageFailed, match="weights are packed"):
            await host.call(Export())
    finally:
        await host.aclose()


async def test_a_stage_in_its_process_serves_like_one_in_this_process() -> None:
    torch.manual_seed(1)
    task = gpt((CONTEXT,), 65, layers=1, heads=2, width=16)
    captured = capture(
        task.model, task.example_inputs, labels=task.labels, loss=task.loss, dynamic=task.dynamic
    )
    graph = serving_graph(captured.graph, CONTEXT)
    (share,) = cut(graph, captured.hash, ())
    specification = StageSpecification(
        b"service", share, (64, 16, CONTEXT), cache_bytes=1 << 20, memory_bytes_max=1 << 30
    )
    values = task.model.state_dict()
    text = torch.randint(0, 65, (70,))
    host = await StageHost.open(encode(specification))
    try:
        arena = np.frombuffer(host.vector("parameters"), dtype=np.float32)
        for slot in parameter_layout(specification):
            arena[slot.offset : slot.offset + slot.size] = values[slot.name].numpy().ravel()
        del arena
        await host.call(Reload())

        async def serve(unit: Unit) -> torch.Tensor | None:
            given = text[unit.position : unit.position + unit.tokens].numpy()
            reply = await host.call(Serve((unit,), pack([("int64", given)], "raw")))
            assert isinstance(reply, Served)
            assert reply.busy_nanoseconds > 0
            if reply.output is None:
                return None
            return torch.from_numpy(unpack(reply.output, bytes_max=1 << 20)[0][1].copy())

        assert await serve(Unit(session(0), 0, 60)) is None
        found = await serve(Unit(session(0), 60, 10, 10))
        with pytest.raises(SessionRefused) as refused:
            await serve(Unit(session(1), 5, 1, 1))
        assert (refused.value.session, refused.value.has_no_room) == (session(1), False)
        await host.call(EndSession(session(0)))
        with pytest.raises(SessionRefused):
            await serve(Unit(session(0), 69, 1, 1))
    finally:
        await host.aclose()
    here = Chain(graph, values, tokens=64)
    here.logits([Unit(session(0), 0, 60, 1)], text[:60].tolist())
    wanted = here.logits([Unit(session(0), 60, 10, 10)], text[60:].tolist())
    assert found is not None
    assert torch.equal(found, wanted)


def test_a_stage_without_a_head_refuses_requests_for_hidden_states() -> None:
    model = torch.nn.Embedding(65, 65)  # the logits are looked up in a table
    for has_head in (False, True):
        module = torch.nn.Sequential(model, torch.nn.Linear(65, 65)) if has_head else model
        ids = torch.zeros((2, 8), dtype=torch.int64)
        bounds: Any = {"batch": (1, 8, {0: 0, "y": 0}), "tokens": (2, CONTEXT, {0: 1, "y": 1})}
        captured = capture(module, (ids,), labels={"y": ids}, loss=_loss, dynamic=bounds)
        (share,) = cut(serving_graph(captured.graph, CONTEXT), captured.hash, ())
        specification = StageSpecification(b"service", share, (64, 16, CONTEXT), memory_bytes_max=1 << 30)
        service: Any = SimpleNamespace(manifest=SimpleNamespace(stages=1, vocabulary=65))
        stage: Any = None
        held = HeldStage(service, 0, specification, stage, RealClock())
        arrays: tuple[Typed, ...] = (("int64", np.zeros(3, np.int64)),)
        work = UnitWork(session(0), 0, 0, 3, 3, 1)
        held.check(work, arrays)
        with nullcontext() if has_head else pytest.raises(RemoteProtocolError, match="hidden states"):
            held.check(replace(work, is_hidden=True), arrays)


def _loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")
