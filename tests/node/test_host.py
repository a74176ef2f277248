"""A stage in its process answers as it would in this one, and its death is only an answer."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
import trio
import trio.testing

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from node.errors import StageFailed
from node.executor import RealExecutor
from node.runs.host import StageHost
from node.seams import Executor
from partition.codec import pack
from partition.execute import StageExecutor
from partition.stage import (
    ARENAS,
    Applied,
    Apply,
    Discard,
    Done,
    Export,
    Exported,
    Forward,
    Forwarded,
    OptimizerSettings,
    StageSpecification,
    arena_bytes,
)

SPECIFICATION = StageSpecification(
    run=b"a run",
    model="simple-cnn",
    sample_shape=(1, 8, 8),
    classes=10,
    first_layer=6,
    last_layer=14,
    optimizer=OptimizerSettings("adam", learning_rate=1e-3),
)
FORWARD = Forward(
    0,
    0,
    True,
    pack(np.random.default_rng(0).random((4, 64, 2, 2)).astype("float32"), "raw"),
    pack(np.arange(4), "raw"),
)


def gone(pid: int) -> bool:
    """Whether the process has ended and was reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_stage_in_a_process_answers_as_one_in_this_process() -> None:
    torch.set_num_threads(SPECIFICATION.threads)  # sums of a gradient depend on how they are dealt out
    arenas = {name: memoryview(bytearray(size)) for name, size in arena_bytes(SPECIFICATION).items()}
    local = StageExecutor(SPECIFICATION, arenas)
    executor: Executor = RealExecutor()
    host = await executor.open_stage(encode(SPECIFICATION))
    try:
        assert {name: bytes(host.vector(name)) for name in ARENAS} == arenas
        assert await host.call(FORWARD) == local.handle(FORWARD)
        for vector in (host.vector, arenas.__getitem__):
            vector("totals")[:] = vector("gradients")
        assert bytes(host.vector("totals")) == arenas["totals"]
        assert any(host.vector("totals"))
        assert isinstance(await host.call(Apply(0, 4)), Applied)
        local.handle(Apply(0, 4))
        assert {name: bytes(host.vector(name)) for name in ARENAS} == arenas

        # A refusal is an answer; so are bytes that are no request at all, and a request that is too long.
        await host.call(FORWARD)
        with pytest.raises(StageFailed, match="second time"):
            await host.call(FORWARD)
        with pytest.raises(StageFailed, match="not a valid message"):
            await host.call({"type": "Format"})
        with pytest.raises(StageFailed, match="at most"):
            await host.call(bytes(1 << 26))

        # Calls of several tasks are served in the order they were made.
        answers: list[object] = []

        async def ask(request: object) -> None:
            answers.append(type(await host.call(request)))

        async with trio.open_nursery() as nursery:
            for request in (Discard(), FORWARD, Export()):
                nursery.start_soon(ask, request)
                await trio.testing.wait_all_tasks_blocked()
        assert answers == [Done, Forwarded, Exported]
    finally:
        await host.aclose()
    await host.aclose()
    with pytest.raises(StageFailed, match="closed"):
        await host.call(Export())
    with pytest.raises(StageFailed, match="closed"):
        host.vector("parameters")


async def test_killing_the_process_fails_the_call_and_nothing_else() -> None:
    host = await StageHost.open(encode(SPECIFICATION))
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
    await host.aclose()
    assert gone(host.pid)
    assert bytes(parameters) == before  # what was averaged can still be read


async def test_a_cancelled_call_ends_the_process_rather_than_shifting_the_answers() -> None:
    before = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    host = StageHost(SPECIFICATION)  # it waits for its specification, which is enough to be cancelled
    os.kill(host.pid, signal.SIGSTOP)
    with trio.move_on_after(0.05) as scope:
        await host.call(Export())
    assert scope.cancelled_caught
    with pytest.raises(StageFailed, match="cancelled"):
        await host.call(Export())
    await host.aclose()
    assert gone(host.pid)
    assert not before or os.listdir("/proc/self/fd") == before


async def test_a_process_that_is_not_ready_in_time_is_ended() -> None:
    with pytest.raises(StageFailed, match=r"not ready within 0\.01 s"):
        await StageHost.open(encode(SPECIFICATION), start_seconds=0.01)


async def test_a_specification_of_garbage_starts_no_process() -> None:
    with pytest.raises(RemoteProtocolError):
        await RealExecutor().open_stage(b"garbage")


async def test_a_process_that_breaks_says_its_last_line() -> None:
    host = StageHost(SPECIFICATION)
    with pytest.raises(StageFailed, match=r"ended with status 1: .*RemoteProtocolError: not a valid message"):
        await host.call("no specification")
    await host.aclose()
    assert gone(host.pid)


async def test_a_stage_dies_with_its_node() -> None:
    """Even when the node is killed; then the file descriptors, and so the arenas, are gone as well."""
    program = (
        "import sys, trio; from node.runs.host import StageHost\n"
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
        os.kill(pid, signal.SIGSTOP)  # it could not notice the end of its socket now
        node.kill()
    with trio.fail_after(10):
        while not _ended(pid):  # noqa: ASYNC110 - not our child: nobody tells us
            await trio.sleep(0.01)


def _ended(pid: int) -> bool:
    """Whether a process that is not our child has ended; one that nobody reaps may stay as a zombie."""
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
