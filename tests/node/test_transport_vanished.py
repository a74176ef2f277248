"""A machine that vanishes, and one that only sleeps, each in a network namespace, in real time on the real
kernel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from node.errors import StreamClosed
from node.seams import Stream
from node.transport.settings import TransportSettings
from tests.node.nets import conversation, echo

MESSAGES = [bytes((number,)) * 2**20 for number in range(24)]
HASTY = TransportSettings(vanished_seconds=0.25, look_seconds=0.05)


async def when_the_wire_is_cut() -> None:
    """After all packets are discarded, the waiting reader gets an error."""
    async with conversation(echo, settings=HASTY) as (stream, alice, _):
        await stream.send(b"hello")
        assert await stream.receive() == b"hello"
        await trio.run_process(["ip", "link", "set", "lo", "down"])
        await stream.send(b"anybody there?")
        with pytest.raises(StreamClosed, match="machine is gone"):
            await stream.receive()
        assert alice.counters["connections_vanished"] == 1


async def when_the_reader_sleeps() -> None:
    """The kernel of a stopped process answers, so no connection is abandoned and nothing is lost."""
    taken: list[bytes] = []
    done = trio.Event()

    async def sleep_and_read(stream: Stream) -> None:
        await trio.sleep(8 * HASTY.vanished_seconds)
        while len(taken) < len(MESSAGES):
            taken.append(await stream.receive())
        done.set()

    async with conversation(sleep_and_read, settings=HASTY) as (stream, alice, _):
        for message in MESSAGES:
            await stream.send(message)
        await done.wait()
        assert alice.counters["connections_vanished"] == 0
    assert taken == MESSAGES


def play(name: str) -> None:
    """Play one of the two scenarios, with time-outs of a quarter of a second instead of a minute."""

    async def main() -> None:
        with trio.fail_after(20):
            await {"cut": when_the_wire_is_cut, "sleep": when_the_reader_sleeps}[name]()

    trio.run(main)


@pytest.mark.parametrize("name", ["cut", "sleep"])
def test_a_vanished_machine_is_abandoned_but_a_sleeping_reader_is_not(name: str) -> None:
    inside = ["unshare", "--map-root-user", "--net", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "ip link set lo up"]).returncode:
        pytest.skip("no network namespaces for us on this machine")
    code = f"from tests.node.test_transport_vanished import play; play({name!r})"
    command = f"ip link set lo up && exec {sys.executable} -c '{code.replace(chr(39), chr(34))}'"
    done = subprocess.run(
        [*inside, command], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
