"""`python -m node.calibration.own_work`: measures the node's own cost of a micro-batch of a stage, and of a
step.

It runs in a process of its own, whose event loop does a node's work for the first of two stages, with the
same parts as a real run. Frames and step messages go over a network connection, the replica's core and shell
decide, and requests go to a process that stands in for the stage's process. That process reads as much memory
as a small stage before it answers, so that the loop finds the caches in the same state as in a run. A third
process plays the rest of the run. Only the loop's own processor time counts. The cost of a node's membership
is not included, because it is part of the share of a processor left for a stage (`partition.calibrate`).

Prints nanoseconds for a micro-batch, for a MiB of its frames, and for a step.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import trio

from crypto.contact import parse_address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from crypto.noise import Data
from node.containment import contain
from node.pipeline.links import Links
from node.pipeline.replica import ReplicaShell
from node.pipeline.spans import Spans
from node.protocols import runs as wire
from node.runs.inbox import PipelineInbox
from node.seams import RealClock, Stream, make_core
from node.stages.framing import HEADER_BYTES, joined, read_header, split
from node.stages.host import StageHost
from node.stages.limits import Allowance
from node.stages.parent import die_with
from node.stages.program import StageProgram
from node.transport.network import RealNetwork
from partition import stage as api
from partition.codecs.codec import Payload, TensorHeader
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.steps.frame_archive import FrameArchive
from partition.steps.frames import Frame, make_frame
from partition.steps.frames import read_header as read_frame_header
from partition.steps.messages import (
    Applied,
    Apply,
    Counted,
    Open,
    Reduced,
    StageCommit,
    StageRoutes,
    StepCommit,
    Sync,
    Synced,
)
from partition.steps.routes import attempts, step_numbers
from partition.steps.shares import Share

HOST = "127.0.0.1"
SWARM = "own work"
SMALL_BYTES, LARGE_BYTES = 4 << 10, 192 << 10
"""Sizes of frames that are compared."""
FEW, MANY = 2, 16
"""Numbers of micro-batches in a step that are compared."""
STEPS, STEPS_IGNORED = 14, 4
"""Number of steps, and how many of the first are ignored, because they open connections and run code for the
first time."""
WALKED_BYTES = 4 << 20
"""Memory to read between steps: more than a core's own caches hold."""
SUM_FLOATS = 1 << 12
SECONDS_MAX = 120.0
_ARENAS = ("parameters", "gradients", "totals", "moments")


class OwnWork(NamedTuple):
    """A node's own cost, in nanoseconds."""

    microbatch: int
    mebibyte: int
    step: int


def measure() -> OwnWork:
    """Measure the costs, which takes some seconds of processor time. Raises RuntimeError if the measurement
    did not end."""
    cases = (FEW, SMALL_BYTES), (MANY, SMALL_BYTES), (MANY, LARGE_BYTES)
    few, many, large = (_typical(_play(*case)) for case in cases)
    microbatch = max(0.0, (many - few) / (MANY - FEW))
    # A micro-batch has three incoming or outgoing frames.
    mebibyte = max(0.0, (large - many) / MANY / 3 / (LARGE_BYTES - SMALL_BYTES) * (1 << 20))
    step = max(0.0, few - FEW * microbatch)
    return OwnWork(*(round(1e9 * value) for value in (microbatch, mebibyte, step)))


def _typical(seconds: list[float]) -> float:
    """Return the median instead of the minimum, because a node in a run is disturbed too."""
    return sorted(seconds)[len(seconds) // 2]


def _play(microbatches: int, size_bytes: int) -> list[float]:
    """Return the processor time of the node's loop in each step, in seconds."""
    me, others = (Identity(bytes([number]) * 32) for number in (1, 2))
    stages = (StagePlan(0, 1, (me.peer,), (1,)), StagePlan(1, 2, (others.peer,), (1,)))
    roster = tuple(sorted((me.peer, others.peer)))
    plan = Plan(bytes(32), NO_HASH, 0, roster, (others.peer,), microbatches, stages)
    program = _AnsweringProgram(size_bytes)
    one_end, other_end = socket.socketpair()
    with one_end, other_end:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            _child(parent, lambda: trio.run(_Others(plan, others, me.peer, size_bytes).run, other_end))
        try:
            cooling = _Cooling()
            node = _Node(plan, me, others.peer, program, cooling.own_seconds)
            return trio.run(node.run, one_end, instruments=[cooling])
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _child(parent: int, run: Callable[[], object]) -> None:
    """Run the function in this process, which was forked by `parent`, and exit when either of them ends."""
    signal.alarm(round(SECONDS_MAX))
    status = 1
    try:
        die_with(parent)
        run()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


class _Cooling(trio.abc.Instrument):
    """Reads through memory whenever the loop has waited, because in a run a stage or other programs would
    have used the caches meanwhile."""

    def __init__(self) -> None:
        self._walked = np.zeros(WALKED_BYTES // 4, np.float32)
        self._seconds = 0.0
        self._waits = False

    def before_io_wait(self, seconds: float) -> None:
        self._waits = seconds > 0

    def after_io_wait(self, seconds: float) -> None:  # noqa: ARG002 - the shape of an instrument
        if self._waits:
            begun = time.thread_time()
            self._walked += 1
            self._seconds += time.thread_time() - begun

    def own_seconds(self) -> float:
        """The processor time of this thread, without the reads through memory."""
        return time.thread_time() - self._seconds


# The node


class _Node:
    """The measured node, which holds the first stage."""

    def __init__(
        self,
        plan: Plan,
        identity: Identity,
        other: PeerId,
        program: StageProgram,
        own_seconds: Callable[[], float],
    ) -> None:
        self._own_seconds = own_seconds
        self._plan = plan
        self._identity = identity
        self._other = other
        self._program = program
        self._stamps: list[float] = []
        self._over = trio.Event()

    async def run(self, end: socket.socket) -> list[float]:
        """Play until enough steps are applied; return the time of each."""
        network = _network(self._identity)
        signer = IdentitySigner(self._identity, SWARM)
        seams: Any = SimpleNamespace(
            clock=RealClock(), network=network, storage=None, executor=None, core=make_core
        )
        runs: Any = SimpleNamespace(seams=seams, members={}, refuse=_raise, containing=_containing)
        inbox = PipelineInbox(runs)
        links = Links(
            network, wire.PIPELINE_PROTOCOL, RealClock(),
            deliver=inbox.deliver, on_reconnected=_ignore, on_stuck=_ignore,
        )  # fmt: skip
        sizes = dict.fromkeys(_ARENAS, 4 * SUM_FLOATS)
        allowance = Allowance(
            arenas=sizes,
            message_bytes_max=1 << 20,
            payload_bytes_max=1 << 20,
            own_bytes=1 << 32,
            threads=1,
            device="cpu",
            start_seconds=SECONDS_MAX,
        )
        host = StageHost(allowance, program=self._program)
        graph = SimpleNamespace(entry=lambda _: SimpleNamespace(backward_outputs=(0,)))
        shell = ReplicaShell(
            signer,
            self._plan,
            cast("Any", SimpleNamespace(graph=graph, dtype="float32")),
            (Share(0, (0,), ((0, SUM_FLOATS),)),),
            cast("Any", SimpleNamespace(call=partial(self._call, host), vector=host.vector)),
            seams,
            lambda peer, message, *payload: links.send(peer, encode(message), *payload),
            refuse=_raise,
            step=0,
            in_flight_max=self._plan.microbatches,
            schedule="1f1b",
            codecs=cast("Any", _Codecs()),
            save=cast("Any", None),
            restore=cast("Any", None),
            archive=FrameArchive(),
            spans=Spans(),
        )
        inbox.follow(plan_hash(self._plan), cast("Any", _Member(self._plan, shell)))
        network.handle(wire.PIPELINE_PROTOCOL, inbox.serve)
        try:
            with trio.fail_after(SECONDS_MAX):
                async with trio.open_nursery() as nursery:
                    await nursery.start(network.run)
                    await nursery.start(links.run)
                    nursery.start_soon(shell.run)
                    await _meet(network, self._other, end)
                    await self._over.wait()
                    nursery.cancel_scope.cancel()
        except trio.TooSlowError:
            raise RuntimeError(f"{len(self._stamps)} steps in {SECONDS_MAX:g} s") from None
        finally:
            await host.aclose()
        stamps = self._stamps[STEPS_IGNORED:]
        return [after - before for before, after in pairwise(stamps)]

    async def _call(self, host: StageHost, request: api.Request) -> api.Reply:
        if isinstance(request, api.Apply):
            self._stamps.append(self._own_seconds())
            if len(self._stamps) > STEPS:
                self._over.set()
        return await host.call(request, seconds=SECONDS_MAX)


class _Codecs:
    """The interface of codecs that the shell uses. Nothing is chosen here."""

    def codec(self, receivers: object, *, is_gradient: bool) -> str:  # noqa: ARG002 - as of LinkCodecs
        return "raw"

    async def learn(self, payload: Payload, *, is_gradient: bool) -> None:
        """Ignore the payload."""


class _Member:
    """The interface of a run's member that the inbox uses."""

    run = None
    steering = SimpleNamespace(steps=1 << 30)

    def __init__(self, plan: Plan, shell: ReplicaShell) -> None:
        self.plan = plan
        self._shell = shell

    async def take_frame(self, sender: PeerId, frame: Any) -> None:
        kept = await self._shell.keep(frame)
        if kept is not None:
            self._shell.receive(RealClock().monotonic(), sender, kept)

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        self._shell.receive(now, sender, message)


@contextmanager
def _containing(_: object, place: str) -> Iterator[None]:
    with contain(place):
        yield


def _raise(_: PeerId, error: RemoteProtocolError) -> None:
    raise error


def _ignore(_: PeerId) -> None:
    """Ignore the peer, because nothing is lost that must be sent again."""


def _network(identity: Identity) -> RealNetwork:
    return RealNetwork(
        identity, os.urandom(32), SWARM, clock=RealClock(), entropy=os.urandom, listen=((HOST, 0),)
    )  # fmt: skip


async def _meet(network: RealNetwork, other: PeerId, end: socket.socket) -> None:
    """Exchange listening addresses with the other process."""
    end.sendall(str(network.addresses[0]).encode())
    address = await trio.to_thread.run_sync(end.recv, 1_000)
    network.learn(other, [parse_address(address.decode())])


# The rest of the run


class _Others:
    """Commits, feeds, and holds the second stage. It answers every message immediately."""

    def __init__(self, plan: Plan, identity: Identity, node: PeerId, size_bytes: int) -> None:
        self._plan, self._node = plan, node
        self._hash, self._attempt = plan_hash(plan), attempts(plan).start
        self._identity = identity
        self._signer = IdentitySigner(identity, SWARM)
        self._payload = _payload(size_bytes)
        self._left = 0

    async def run(self, end: socket.socket) -> None:
        """Play until killed."""
        network = _network(self._identity)
        network.handle(wire.PIPELINE_PROTOCOL, self._serve)
        nobody: Any = None  # this part sends nothing to itself
        links = self._links = Links(
            network, wire.PIPELINE_PROTOCOL, RealClock(),
            deliver=nobody, on_reconnected=_ignore, on_stuck=_ignore,
        )  # fmt: skip
        async with trio.open_nursery() as nursery:
            await nursery.start(network.run)
            await nursery.start(links.run)
            await _meet(network, self._node, end)
            self._say(Sync(plan=self._hash))
            await trio.sleep_forever()

    async def _serve(self, stream: Stream) -> None:
        while True:
            data, _ = await stream.receive_with_payload(LARGE_BYTES)
            message: Any = decode(data, wire.PipelineMessage, bytes_max=wire.PIPELINE_BYTES_MAX)
            self._answer(message)

    def _answer(self, message: Any) -> None:
        match message:
            case Synced():
                self._open(0)
            case Frame():
                header = read_frame_header(message.header)
                self._send_frame(header.step, header.microbatch, "gradient")
            case Counted():
                self._left -= 1
                if not self._left:
                    self._commit(message.step)
            case Reduced():
                named: dict[str, Any] = {"step": message.step, "attempt": message.attempt}
                self._say(Apply(plan=self._hash, samples=1, squared_norm=1.0, **named))
            case Applied():
                self._open(message.step + 1)

    def _open(self, step: int) -> None:
        numbers = step_numbers(self._plan, step)
        self._left = len(numbers)
        routes = (StageRoutes(bytes(len(numbers))),) * len(self._plan.stages)
        place: dict[str, Any] = {"step": step, "attempt": self._attempt, "train": True}
        self._say(Open(plan=self._hash, first=numbers.start, stages=routes, **place))
        for number in numbers:
            self._send_frame(step, number, "input")

    def _commit(self, step: int) -> None:
        numbers = tuple(step_numbers(self._plan, step))
        rows = tuple(
            StageCommit(place, stage.replicas[0], numbers) for place, stage in enumerate(self._plan.stages)
        )
        self._say(StepCommit(plan=self._hash, step=step, attempt=self._attempt, replicas=rows))

    def _send_frame(self, step: int, microbatch: int, direction: Any) -> None:
        place = {"step": step, "microbatch": microbatch, "attempt": self._attempt, "stage": 0}
        frame = make_frame(
            self._signer, self._payload, plan=self._hash, direction=direction, train=True, **place
        )
        self._say(frame, self._payload.data)

    def _say(self, message: object, *payload: Data) -> None:
        self._links.send(self._node, encode(message), *payload)


def _payload(size_bytes: int) -> Payload:
    tensor = TensorHeader("float32", (1, size_bytes // 4))
    return Payload((1,), (tensor,), "raw", bytes(32), memoryview(bytes(size_bytes)))


# The stand-in for a stage's process


class _AnsweringProgram(StageProgram):
    """A fork of this process that answers a stage's requests with frames of one size."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        super().__init__(1, "cpu")

    def _start(self, link: int) -> Any:
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            _child(parent, partial(_answer_requests, socket.socket(fileno=os.dup(link)), self._size_bytes))
        return _Forked(pid)


class _Forked:
    """The part of the interface of `subprocess.Popen` that a StageHost uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            os.waitpid(self.pid, 0)
            self.returncode = 0


def _answer_requests(link: socket.socket, size_bytes: int) -> None:
    socket.recv_fds(link, 16, 8)
    walked = np.zeros(WALKED_BYTES // 4, np.float32)
    payload = _payload(size_bytes)
    while True:
        header = read_header(link.recv(HEADER_BYTES, socket.MSG_WAITALL))
        data = link.recv(header.message, socket.MSG_WAITALL)
        request: Any = joined(
            decode(data, api.Request, bytes_max=1 << 20), b"", (bytes(header.first), bytes(header.second))
        )
        walked += 1
        match request:
            case api.Forward():
                reply: api.Reply = api.Forwarded(payload, None, 0.0, 1)
            case api.Backward():
                reply = api.BackwardDone(None)
            case api.Norm():
                reply = api.Normed(1.0)
            case api.Apply():
                reply = api.Applied(bytes(32))
            case _:
                reply = api.StageDone()
        # The tensors can be any bytes, which lie in memory that only the node has.
        parts = split(reply)
        link.sendall(parts.header(1).encode() + parts.message)


if __name__ == "__main__":
    sys.stdout.write(" ".join(map(str, measure())) + "\n")
