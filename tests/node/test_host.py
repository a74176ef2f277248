"""A stage in a process of its own answers like a stage in this process, and its death is only an error."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from node.errors import StageFailed
from node.executor import RealExecutor
from node.quantities import Memory
from node.seams import Executor
from node.stages.framing import Header, joined, split
from node.stages.host import StageHost
from node.stages.limits import ANSWER_SECONDS, Allowance, allowance_of
from node.stages.program import Spare, StageProgram
from node.storage.budget import ScratchBudget
from partition.codecs.codec import pack, typed
from partition.execute import StageExecutor
from partition.model.graph import StageGraph
from partition.stage import (
    ARENAS,
    Admitted,
    Applied,
    Apply,
    Backward,
    BackwardDone,
    Discard,
    Export,
    Exported,
    Forward,
    Forwarded,
    Import,
    OptimizerSettings,
    Ran,
    Reply,
    Request,
    RunEntryPoint,
    StageDone,
    StageSpecification,
    timed,
)
from partition.stage_layout import arena_bytes
from tests.partition.graphs import GraphBuilder, whole

SAMPLES, WIDTH, CLASSES = 4, 8, 3
LARGE_BYTES = 64 << 20
LINUX = sys.platform == "linux"


def classifier() -> StageGraph:
    build = GraphBuilder()
    batch = build.symbol("batch")
    build.begin("train")
    x = build.input("x", "float32", batch, WIDTH)
    y = build.label("y", "int64", batch)
    weight, bias = build.parameter("fc.weight", CLASSES, WIDTH), build.parameter("fc.bias", CLASSES)
    logits = build.node("linear", x, weight, bias)
    loss = build.node("cross_entropy_loss", logits, y, None, 2)
    build.end(outputs=[logits], loss=loss)
    return whole(build.finish())


SPECIFICATION = StageSpecification(
    run=b"a run",
    graph=classifier(),
    sizes_max=(SAMPLES,),
    optimizer=OptimizerSettings("adam", learning_rate=1e-3),
    allow_unfenced=True,
)
"""The settings of the test's stage. It may run on any kernel; other tests cover kernels that lack a fence."""
ALLOWANCE = allowance_of(SPECIFICATION, len(encode(SPECIFICATION)))
LARGE_ALLOWANCE = dataclasses.replace(
    ALLOWANCE, message_bytes_max=2 * LARGE_BYTES, payload_bytes_max=LARGE_BYTES
)
FORWARD = Forward(
    0,
    0,
    True,
    pack(
        [typed(np.random.default_rng(0).random((SAMPLES, WIDTH)).astype("float32"))], "raw", sizes=(SAMPLES,)
    ),
    pack([typed(np.arange(SAMPLES) % CLASSES)], "raw", sizes=(SAMPLES,)),
)


def gone(pid: int) -> bool:
    """Return whether the process has ended and was reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@asynccontextmanager
async def opened() -> AsyncIterator[StageHost]:
    """Yield a stage that is closed at the end; check that its process is gone."""
    host = await StageHost.open(encode(SPECIFICATION))
    try:
        yield host
    finally:
        await host.aclose()
        assert gone(host.pid)


async def test_a_stage_in_a_process_answers_like_one_in_this_process() -> None:
    torch.set_num_threads(SPECIFICATION.threads)  # gradient sums depend on how samples are split
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(SPECIFICATION).items()}
    local = StageExecutor(SPECIFICATION, arenas)
    executor: Executor = RealExecutor()
    host = await executor.open_stage(encode(SPECIFICATION))
    try:
        assert {name: bytes(host.vector(name)) for name in ARENAS} == arenas
        forwarded = await host.call(FORWARD)
        assert isinstance(forwarded, Forwarded)
        assert 0 < forwarded.busy_nanoseconds < 60 * 10**9
        assert timed(forwarded, 0) == local.handle(FORWARD)
        for vector in (host.vector, arenas.__getitem__):
            vector("totals")[:] = vector("gradients")
        assert bytes(host.vector("totals")) == arenas["totals"]
        assert any(host.vector("totals"))
        assert isinstance(await host.call(Apply(0, SAMPLES)), Applied)
        local.handle(Apply(0, SAMPLES))
        assert {name: bytes(host.vector(name)) for name in ARENAS} == arenas

        # A refusal is an answer. Bytes that are not a request and a request that is too long are refused too.
        await host.call(FORWARD)
        with pytest.raises(StageFailed, match="second time"):
            await host.call(FORWARD)
        with pytest.raises(StageFailed, match="not a valid message"):
            await host.call({"type": "Format"})
        with pytest.raises(StageFailed, match="at most"):
            await host.call(bytes(1 << 26))

        exported = await host.call(Export())
        assert exported == local.handle(Export())
        assert isinstance(exported, Exported)
        assert isinstance(await host.call(Import(exported.data)), StageDone)

        # Calls of several tasks are served in the order in which they were made.
        answers: list[object] = []

        async def ask(request: object) -> None:
            answers.append(type(await host.call(request)))

        async with trio.open_nursery() as nursery:
            for request in (Discard(), FORWARD, Export()):
                nursery.start_soon(ask, request)
                await trio.testing.wait_all_tasks_blocked()
        assert answers == [StageDone, Forwarded, Exported]
    finally:
        await host.aclose()
    await host.aclose()
    with pytest.raises(StageFailed, match="closed"):
        await host.call(Export())
    with pytest.raises(StageFailed, match="closed"):
        host.vector("parameters")


async def test_a_rejected_stage_does_not_open_and_gives_the_reason() -> None:
    operators = ("aten.from_file.default", *SPECIFICATION.graph.operators[1:])
    graph = msgspec.structs.replace(SPECIFICATION.graph, operators=operators)
    with pytest.raises(StageFailed, match="from_file"):
        await StageHost.open(encode(msgspec.structs.replace(SPECIFICATION, graph=graph)))


OPEN_STRICTLY = """
import sys, trio
from node.errors import StageFailed
from node.stages.host import StageHost
from node.stages.program import Spare, StageProgram
async def main():
    try:
        host = await StageHost.open(bytes.fromhex(sys.argv[1]))
        print("open")
        await host.aclose()
    except StageFailed as error:
        print(error)
trio.run(main)
"""


@pytest.mark.skipif(not LINUX, reason="landlock is Linux's")
@pytest.mark.parametrize("allowed", [False, True])
async def test_an_unfenced_stage_opens_only_if_allowed(allowed: bool) -> None:
    specification = encode(msgspec.structs.replace(SPECIFICATION, allow_unfenced=allowed))
    ended = await trio.run_process(
        [
            *(sys.executable, "-m", "tests.node.without_landlock"),
            *(sys.executable, "-c", OPEN_STRICTLY, specification.hex()),
        ],
        capture_stdout=True,
    )
    said = ended.stdout.decode()
    assert said == "open\n" if allowed else "cannot be fenced in here: files: no landlock" in said


async def test_a_thread_started_before_the_fences_fails_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    before = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(before))
    with pytest.raises(StageFailed, match="other threads are already running"):
        await StageHost.open(encode(SPECIFICATION))


async def test_a_killed_stage_fails_its_own_calls_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEERLOOM_SECRET", "hush")
    async with opened() as other:
        async with opened() as host:
            assert host.admitted.flops > 0
            said = " ".join(host.admitted.fences + host.admitted.unfenced)
            assert all(word in said for word in ("limits", "network", "programs", "files", "memory"))
            if LINUX:
                holds_nothing_of_the_nodes(host.pid)
                scratch = Path(os.readlink(f"/proc/{host.pid}/cwd"))
                assert os.listdir(scratch) == []
            parameters = host.vector("parameters")
            before = bytes(parameters)
            os.kill(host.pid, signal.SIGSTOP)  # so that the call is waiting when the process dies

            async def kill() -> None:
                await trio.testing.wait_all_tasks_blocked()
                os.kill(host.pid, signal.SIGKILL)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(kill)
                with pytest.raises(StageFailed, match="ended by SIGKILL"):
                    await host.call(FORWARD)
            with pytest.raises(StageFailed, match="ended by SIGKILL"):
                await host.call(Export())
        assert bytes(parameters) == before  # the average can still be read
        assert not LINUX or not scratch.exists()  # noqa: ASYNC240 - it only looks

        # A stage that stops answering delays only its own calls. Meanwhile the other stage is served.
        frozen = StageHost(ALLOWANCE, stalled_seconds=0.3)
        os.kill(frozen.pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:

            async def notice() -> None:
                with pytest.raises(StageFailed, match=r"has done nothing for 0\.3 s"):
                    await frozen.call(FORWARD, seconds=60.0)

            nursery.start_soon(notice)
            assert isinstance(await other.call(FORWARD), Forwarded)
        await frozen.aclose()
        assert isinstance(await other.call(Discard()), StageDone)


def holds_nothing_of_the_nodes(pid: int) -> None:
    """Check for secrets in the environment, and descriptors beyond link, /dev/null, arenas and stderr."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        assert b"hush" not in file.read()
    held = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    assert [path for path in held if not path.startswith(("socket:", "/dev/null", "/memfd:peerloom-"))] == []
    assert sum(path.startswith("socket:") for path in held) == 1


def running(program: str, budget: ScratchBudget | None = None) -> StageProgram:
    """Return a stage process that runs this program instead of a stage."""

    class Program(StageProgram):
        command = ("-c", program)

    return Program(ALLOWANCE.threads, ALLOWANCE.device, budget)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        (
            "open('cache', 'wb').write(bytes(3 << 20))",
            "has written 3 MiB to the disk: stages hold 2 MiB of the 4 MiB allowed",
        ),
        ("[open(str(number), 'w').close() for number in range(1_001)]", "more than 1000 files"),
    ],
)
async def test_files_that_a_stages_process_writes_count_toward_the_limit(
    tmp_path: Path, written: str, reason: str
) -> None:
    """This matters on systems or devices where the fences do not keep the process from writing."""
    program = f"{written}; import sys, time; time.sleep(60)"
    budget = ScratchBudget(Memory(bytes=4 << 20), tmp_path)
    budget.take(2 << 20)  # a file of another stage
    host = StageHost(ALLOWANCE, scratch=budget, program=running(program, budget))
    with pytest.raises(StageFailed, match=reason):
        await host.call(FORWARD, seconds=60.0)
    await host.aclose()
    assert budget.held_bytes == 2 << 20


async def test_a_late_answer_fails_the_stage() -> None:
    work = Admitted(flops=10**9, saved_bytes=0, peak_bytes=0, seconds=0.0)
    assert ALLOWANCE.answer_seconds(work) > ANSWER_SECONDS + 10
    host = StageHost(ALLOWANCE)
    os.kill(host.pid, signal.SIGSTOP)
    with pytest.raises(StageFailed, match=r"has not answered within 0\.05 s"):
        await host.call(FORWARD, seconds=0.05)
    await host.aclose()
    assert gone(host.pid)


class BareAllowance(Allowance):
    """Allows no memory for what a process needs before it gets its specification."""

    @property
    def watched_bytes(self) -> int:
        return self.own_bytes


async def test_a_stage_that_takes_too_much_memory_is_killed() -> None:
    # Torch alone uses more than a MiB. The process waits for a specification that never comes.
    host = StageHost(BareAllowance(**vars(ALLOWANCE) | {"own_bytes": 1 << 20}))
    with pytest.raises(StageFailed, match=r"took \d+ MiB, at most 1 allowed"):
        await host._start_up(encode(SPECIFICATION), 30.0)
    await host.aclose()
    assert gone(host.pid)


def answered(message: object, *, behind: int = 0, first: int = 0, second: int = 0) -> bytes:
    """Return an answer as the process would send it, with claimed sizes and `behind` bytes after it."""
    data = message if isinstance(message, bytes) else encode(message)
    return Header(len(data), behind, first, second).encode() + data + b"x" * behind


BUNDLE = msgspec.structs.replace(FORWARD.input, data=b"")
GARBAGE = {
    "no message": answered(b"\xc1 garbage"),
    "a message without an end": Header(2**62).encode(),
    "half a message": Header(100).encode() + bytes(50),
    "an answer to nothing": answered(StageDone()),
    "an answer with something behind it": answered(StageDone(), behind=3),
    "tensors that are nobody's": answered(StageDone(), first=3),
    "one bundle too many": answered(Ran(BUNDLE), first=1, second=1),
    "tensors in two places": answered(Ran(FORWARD.input), first=1),
    "tensors without an end": answered(Ran(BUNDLE), first=2**40),
    "a header cut short": b"abc",
}


@pytest.mark.parametrize("garbage", GARBAGE)
async def test_a_process_that_answers_garbage_has_failed(garbage: str) -> None:
    program = (
        "import socket, sys\n"
        "link = socket.socket(fileno=int(sys.argv[1]))\n"
        "link.recv(8, socket.MSG_PEEK)\n"
        f"link.sendall({GARBAGE[garbage]!r})\n"
        "link.shutdown(socket.SHUT_WR)\n"
        "while link.recv(65536): pass\n"
    )
    waiting = cast("Spare", SimpleNamespace(take=lambda *_: running(program)))
    with pytest.raises(StageFailed, match=r"sent an invalid|has closed its end|ended"):
        await StageHost.open(encode(SPECIFICATION), spare=waiting)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_a_message_sent_in_pieces_is_put_together(first: bytes, second: bytes) -> None:
    bundles = [msgspec.structs.replace(BUNDLE, data=data) for data in (first, second)]
    messages: list[Request | Reply] = [
        Forward(3, 4, True, bundles[0], bundles[1], sign=-1),
        Forward(3, 4, False, bundles[1]),
        Backward(3, 4, bundles[0]),
        Forwarded(bundles[0], None, 1.0, 2, (0.5,)),
        Forwarded(None, bundles[1], 1.0, 2),
        Forwarded(None, None, 1.0, 2),
        BackwardDone(bundles[0]),
        RunEntryPoint(b"session", "decode", bundles[1]),
        Ran(bundles[0]),
        Import(first),
        Exported(second),
        Discard(),
    ]
    for message in messages:
        parts = split(message)
        header = parts.header()
        assert header.payloads + header.behind == sum(map(len, (*parts.payloads, parts.behind)))
        kind: Any = Request if isinstance(message, Request) else Reply
        decoded = decode(parts.message, kind, bytes_max=1 << 20)
        payloads = [*parts.payloads, b"", b""][:2]
        assert joined(decoded, parts.behind, payloads) == message


async def test_messages_of_megabytes_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = np.random.default_rng(1)
    activation = pack([typed(draws.random((4, 256, 768), "float32"))], "raw", sizes=(4,))
    program = (
        "import socket, sys\n"
        "from node.stages.process import _Link, _map\n"
        "from node.stages.framing import joined, split\n"
        "from crypto.encoding import decode\n"
        "from partition.stage import Exported, Ran, Request\n"
        "link = _Link(socket.socket(fileno=int(sys.argv[1])))\n"
        f"whole = _map(link.settings()[2][0], {2 * LARGE_BYTES})\n"
        f"link._requests, link._answers = whole[:{LARGE_BYTES}], whole[{LARGE_BYTES}:]\n"
        "parts = link.receive()\n"
        "request = joined(decode(parts.message, Request, bytes_max=1 << 23), b'', parts.payloads)\n"
        "answer = split(Ran(request.input))\n"
        "link.give(answer.payloads)\n"
        "link.send(answer, 0)\n"
        "link.receive()\n"
        f"link.send(split(Exported(bytes({LARGE_BYTES}))), 0)\n"
        "link.receive()\n"
    )
    host = StageHost(LARGE_ALLOWANCE, program=running(program))
    try:
        ran = await host.call(Forward(0, 0, True, activation), seconds=60.0)
        exported = await host.call(Export(), seconds=60.0)
        longer = msgspec.structs.replace(activation, data=bytes(LARGE_BYTES + 1))
        with pytest.raises(StageFailed, match="bytes of tensors, at most"):
            await host.call(Forward(0, 0, True, longer))
    finally:
        await host.aclose()
    assert ran == Ran(activation)
    assert exported == Exported(bytes(LARGE_BYTES))


async def test_a_call_being_copied_fails_if_its_stage_is_closed() -> None:
    host = StageHost(
        dataclasses.replace(ALLOWANCE, message_bytes_max=2 * LARGE_BYTES, payload_bytes_max=LARGE_BYTES)
    )
    large = msgspec.structs.replace(BUNDLE, data=bytes(LARGE_BYTES))
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(StageFailed, match="closed"):
                await host.call(Backward(0, 0, large), seconds=60.0)

        nursery.start_soon(ask)
        await trio.lowlevel.checkpoint()
        await trio.lowlevel.checkpoint()
        await host.aclose()


async def test_a_cancelled_call_ends_the_process() -> None:
    before = os.listdir("/proc/self/fd") if LINUX else []
    host = StageHost(ALLOWANCE)  # the process waits for its specification, so the call can be cancelled
    os.kill(host.pid, signal.SIGSTOP)
    with trio.move_on_after(0.05) as scope:
        await host.call(Export(), seconds=60.0)
    assert scope.cancelled_caught
    with pytest.raises(StageFailed, match="cancelled"):
        await host.call(Export())
    await host.aclose()
    assert gone(host.pid)
    assert not before or os.listdir("/proc/self/fd") == before


async def test_closing_a_stage_ends_a_waiting_call() -> None:
    host = StageHost(ALLOWANCE)
    os.kill(host.pid, signal.SIGSTOP)
    async with trio.open_nursery() as nursery:

        async def ask() -> None:
            with pytest.raises(StageFailed, match="closed"):
                await host.call(Export(), seconds=60.0)

        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        await host.aclose()


async def test_a_process_that_is_not_ready_in_time_is_killed() -> None:
    with pytest.raises(StageFailed, match=r"was not ready within 0\.01 s"):
        await StageHost.open(encode(SPECIFICATION), start_seconds=0.01)


async def test_an_invalid_specification_starts_no_process() -> None:
    with pytest.raises(RemoteProtocolError):
        await RealExecutor().open_stage(b"garbage")


async def test_a_process_that_fails_is_reported_with_its_last_line() -> None:
    host = StageHost(ALLOWANCE)
    with pytest.raises(StageFailed, match=r"ended with status 1: .*RemoteProtocolError: not a valid message"):
        await host.call("no specification", seconds=60.0)
    await host.aclose()
    assert gone(host.pid)


async def test_a_stage_process_ends_when_its_node_is_killed() -> None:
    """With the process its file descriptors are gone, and so are the arenas."""
    program = (
        "import sys, trio; from node.stages.host import StageHost\n"
        "async def main():\n"
        "    host = await StageHost.open(bytes.fromhex(sys.argv[1]))\n"
        "    print(host.pid, flush=True)\n"
        "    await trio.sleep_forever()\n"
        "trio.run(main)"
    )
    node = subprocess.Popen(  # noqa: ASYNC220 - it only forks
        [sys.executable, "-c", program, encode(SPECIFICATION).hex()], stdout=subprocess.PIPE
    )
    with node:
        assert node.stdout is not None
        pid = int(await trio.to_thread.run_sync(node.stdout.readline))
        os.kill(pid, signal.SIGSTOP)  # the process cannot notice the end of its socket now
        node.kill()
    with trio.fail_after(10):
        while not _ended(pid):  # noqa: ASYNC110 - not our child: nobody tells us
            await trio.sleep(0.01)


def _ended(pid: int) -> bool:
    """Return whether a process that is not our child has ended; an unreaped one may stay as a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return gone(pid)


async def test_functions_run_in_a_thread_and_return_their_value() -> None:
    assert await RealExecutor(threads=1).run(lambda: 6 * 7, seconds=3600) == 42


def test_importing_the_executor_imports_no_torch() -> None:
    program = "import sys, node.executor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_a_stage_uses_the_spare_process_for_its_settings() -> None:
    spare = Spare()
    spare.keep(SPECIFICATION.threads, SPECIFICATION.device)
    kept = spare._program
    assert kept is not None
    spare.keep(SPECIFICATION.threads, SPECIFICATION.device)
    assert spare._program is kept, "a second spare process was started"
    assert spare.take(SPECIFICATION.threads + 1, SPECIFICATION.device) is None
    host = await StageHost.open(encode(SPECIFICATION), spare=spare)
    try:
        assert host.pid == kept.process.pid
        assert host.admitted.fences
        assert isinstance(await host.call(FORWARD), Forwarded)
        assert spare.take(SPECIFICATION.threads, SPECIFICATION.device) is None, (
            "a spare process that is in use was handed out again"
        )
    finally:
        await host.aclose()


def test_a_spare_process_that_died_or_was_discarded_leaves_nothing() -> None:
    spare = Spare()
    spare.keep(1, "cpu")
    first = spare._program
    assert first is not None
    first.process.kill()
    first.process.wait()
    assert spare.take(1, "cpu") is None
    spare.keep(1, "cpu")
    second = spare._program
    assert second is not None
    assert second is not first
    spare.drop()
    assert second.process.returncode is not None
    assert not any(os.path.isdir(kept.scratch.path) for kept in (first, second))
