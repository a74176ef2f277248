"""The proof that a captured model gives the same answers when it is served: `python -m
node.serving.proof_process`.

A node runs the proof for everything that it publishes, on the stored bytes, so no service has an unproved
model. The proof needs torch, so it runs in a separate process, which is fenced like a stage's.
`partition.capture.serving_proof` describes what is compared, and the cost. For a transformers folder, `serve`
first compares the graph with the original model, because the graph does not contain that model.
"""

import gc
import os
import sys
from contextlib import suppress

import msgspec
import trio

from crypto.errors import RemoteProtocolError
from node.errors import RunFailed, UsageError
from node.services.torch_extra import NO_TORCH, has_torch, torch_remedy
from node.serving.planning import served_graph
from node.stages import sandbox
from node.stages.parent import die_with
from node.stages.piped import PipedProcess
from node.stages.scratch import Scratch
from partition.model.check import check_graph
from partition.model.graph import GRAPH_BYTES_MAX, decode_graph

MEMORY_BYTES_MIN = 1 << 30
"""The proof may always use this much memory: enough for torch and the largest parameters of a small model."""
SAID_BYTES_MAX = 65_536
MIXES_DO = (
    "have nothing but causal attention mix tokens: scaled_dot_product_attention(..., is_causal=True) "
    "without a mask"
)
_ROOT = __file__.rpartition("/node/")[0]


class _Asked(msgspec.Struct, frozen=True):
    name: str
    context: int
    threads: int
    memory_bytes: int
    parent: int


class _Said(msgspec.Struct, frozen=True):
    """The result of the proof. `refused` is empty if the model may be served."""

    refused: str = ""
    do: str = ""


async def prove_served(name: str, data: bytes, context: int, *, threads: int, memory_bytes: int) -> None:
    """Prove that a captured graph, served in sessions of `context` tokens, gives the logits of its model.

    Raises:
        UsageError: it does not; errors call the model `name`.
        RunFailed: the proof could not be computed.
    """
    if not has_torch():
        raise UsageError(
            f"{name}: {NO_TORCH}, and the proof of a model before it is served needs it", torch_remedy()
        )
    memory = max(memory_bytes, MEMORY_BYTES_MIN)
    asked = msgspec.json.encode(_Asked(name, context, threads, memory, os.getpid()))
    scratch = await trio.to_thread.run_sync(Scratch)
    try:
        environment = sandbox.environment(os.environ, scratch=scratch.path, path=_ROOT, threads=threads)
        process = PipedProcess(
            [sys.executable, "-P", "-m", "node.serving.proof_process"], cwd=scratch.path, env=environment
        )
        try:
            # A client that disconnects cancels this task, and with it the process.
            with suppress(trio.BrokenResourceError):
                await process.send(asked + b"\n" + data)
                await process.end_input()
            answer = b""
            while (more := await process.receive()) and len(answer) < SAID_BYTES_MAX:
                answer += more
        finally:
            await process.aclose()
    except OSError as error:
        raise RunFailed(f"{name}: the proof before serving it cannot be started: {error}") from None
    finally:
        await trio.to_thread.run_sync(scratch.remove)
    try:
        said = msgspec.json.decode(answer, type=_Said)
    except msgspec.MsgspecError:
        raise RunFailed(
            (
                f"{name}: the proof before serving it ended with status {process.status}: "
                f"it may need more memory than {memory >> 20} MiB"
            ),
            "give the node more: --memory",
        ) from None
    if said.refused:
        raise UsageError(said.refused, said.do or None)


# In the process


def main() -> None:
    asked = msgspec.json.decode(sys.stdin.buffer.readline(SAID_BYTES_MAX), type=_Asked)
    die_with(asked.parent)
    from partition.capture.errors import CaptureRefused
    from partition.capture.serving_proof import prove_graph_served
    from partition.execute import load_late_modules, prepare_process

    load_late_modules()
    gc.freeze()
    sandbox.enter(
        scratch=os.getcwd(), device="cpu", memory_bytes=asked.memory_bytes, allow_unfenced=True
    )  # the graph is the user's own, so a missing fence must not prevent the proof
    prepare_process(asked.threads)
    try:
        captured = decode_graph(sys.stdin.buffer.read(GRAPH_BYTES_MAX))
        check_graph(captured)
        served = served_graph(captured, asked.name, asked.context)
        prove_graph_served(served, captured)
        said = _Said()
    except CaptureRefused as error:
        said = _Said(f"{asked.name}: this model cannot be served: {error}", MIXES_DO)
    except RemoteProtocolError as error:
        said = _Said(f"{asked.name}: is not a graph that can be served: {error}")
    except UsageError as error:
        what, do = error.written
        said = _Said(what, do or "")
    sys.stdout.buffer.write(msgspec.json.encode(said))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
