"""An owner's limits: they are enforced by measurement, changed while the node runs, and corrected if
wrong."""

import os
from pathlib import Path

import pytest
import trio

from crypto.identity import Identity
from node import config
from node.errors import UsageError
from node.placement.provider import CHANGEABLE
from node.quantities import Memory
from node.runtime import Node
from node.seams import RealClock, Stream
from node.services.capacity import Capacity, measure, usable_device, within
from node.storage.keys import NodeKeys
from node.transport.network import RealNetwork
from node.transport.pace import Pace
from partition.plan.observed import LinkRow, limited_rows
from tests.node.test_slots import asked, only
from tests.stack import assert_equal, reference, simulate, swarm, weights
from tests.test_runs_end import all_ended

FILE = """
[resources]
memory = "4GB"
cores = 1
device = "cpu"
disk = "2GB"
scratch = "1GB"
location = "eu-west"
accept_runs = "listed"
[offer]
slots = 2
hours = "22:00-07:00"
idle = "10m"
load = "30%"
mains_only = true
battery_min = "30%"
battery_low = "never"
metered = "no"
upload = "10Mbit/s"
download = "2.5MB/s"
peers = []
runs = []
own_data = []
peer_sessions = 4
peer_tokens = 6000
peer_cache = "30%"
"""


def test_every_rule_of_an_owner_can_be_set_at_run_time(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(FILE)
    found = config.Config.load(file)
    assert (found.offer.upload_bytes_per_second, found.offer.download_bytes_per_second) == (
        1_250_000,
        2_500_000,
    )
    assert (found.resources.disk.bytes, found.resources.memory.bytes) == (2 * 10**9, 4 * 10**9)
    settings = [line.split(" =")[0] for line in FILE.splitlines() if " =" in line]
    assert set(settings) == set(CHANGEABLE)


@pytest.mark.parametrize("text", ["10", "10Mbit/h", "-1Mbit/s", "1kB/s", "fast"])
def test_an_invalid_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--config|upload"):
        config.resolve({"upload": text}, {})


# Wrong declarations


def test_a_wrong_declaration_is_corrected_at_start_and_reported() -> None:
    declared = config.Resources(device="cuda:7", memory=Memory(bytes=10**15), cores=4_000)
    found = measure(declared)
    assert (found.device, found.cores) == ("cpu", os.cpu_count())
    assert found.memory_free_bytes <= found.memory_total_bytes
    assert found.flops_per_second > 0
    device, cores, memory = found.corrected
    assert device.startswith("device cuda:7: ")
    assert device.endswith("; the CPU computes")
    assert cores == f"cores 4000: this machine has only {os.cpu_count()}, and offers {os.cpu_count()}"
    assert memory.startswith("memory 1000000.0 GB: this machine has only ")
    assert found.measured(0.0).corrected == found.corrected


def test_a_right_or_missing_declaration_is_not_corrected() -> None:
    assert usable_device("auto")[1] == usable_device("cpu")[1] == ""
    assert measure(config.Resources(cores=1, memory=Memory(bytes=1 << 20))).corrected == ()


def test_fewer_cores_reduce_the_rate_and_more_restore_it() -> None:
    whole = Capacity("cpu", 4, 8 << 30, 16 << 30, 4e9, "")
    half = within(whole, config.Resources(cores=1, memory=Memory(bytes=2 << 30)))
    assert (half.cores, half.flops_per_second, half.memory_free_bytes) == (1, 1e9, 2 << 30)
    again = within(half, config.Resources())
    assert (again.cores, again.flops_per_second, again.memory_free_bytes) == (4, 4e9, 8 << 30)


def test_an_offer_too_small_to_be_useful_is_reported_by_slot() -> None:
    offer = Capacity("cpu", 4, 3 << 30, 16 << 30, 4e9, "")
    assert offer.measured(0.0, 2).small == ()
    memory, cores = offer.measured(0.0, 8).small
    assert memory.startswith("memory 0.40 GB for each of 8 slots: a stage's process takes 0.42 GB before it")
    assert cores.startswith("cores 4 for each of 8 slots: ")


# Bandwidth


def test_a_rate_limit_covers_all_streams_and_short_messages() -> None:
    pace = Pace()
    assert pace.take(0.0, 10**9) == 0.0
    pace.limit(1_000_000)
    assert pace.take(10.0, 50_000) == 0.0, "a pause did not leave room for a burst"
    assert pace.take(10.0, 500_000) == pytest.approx(0.5)
    assert pace.take(10.5, 100_000) == pytest.approx(0.1)
    assert pace.take(1000.0, 50_000) == 0.0


def network(number: int) -> RealNetwork:
    seed = bytes([number]) * 32
    keys = NodeKeys(Identity(seed), seed, is_new=True)
    return RealNetwork(
        keys.identity,
        keys.static,
        "default",
        clock=RealClock(),
        entropy=os.urandom,
        listen=[("127.0.0.1", 0)],
    )


@pytest.mark.parametrize("way", ["up", "down"])
def test_bulk_keeps_the_owners_rate_without_delaying_control(way: str) -> None:
    """Real sockets. 3 MB at 40 Mbit/s take 0.6 s, and a request during that time is not delayed."""
    rate, size = 5_000_000, 3_000_000

    async def scenario() -> None:
        one, other = network(1), network(2)
        arrived: list[float] = []

        async def serve_bulk(stream: Stream) -> None:
            await stream.receive_with_payload(size)
            arrived.append(trio.current_time())

        async def serve_echo(stream: Stream) -> None:
            await stream.send(await stream.receive())

        other.handle("/bulk/1", serve_bulk)
        other.handle("/echo/1", serve_echo)
        async with trio.open_nursery() as nursery:
            for each in (one, other):
                await nursery.start(each.run)
            one.learn(other.peer, other.addresses)
            if way == "up":
                one.paces.up.limit(rate)
            else:
                other.paces.down.limit(rate)
            bulk = await one.open(other.peer, "/bulk/1")
            begun = trio.current_time()
            async with trio.open_nursery() as sending:
                sending.start_soon(bulk.send, b"head", bytes(size))
                await trio.sleep(0.1)
                echo = await one.open(other.peer, "/echo/1")
                await echo.send(b"now?")
                assert await echo.receive() == b"now?"
                assert not arrived, "the bulk transfer was over before the request was answered"
            with trio.fail_after(30):
                while not arrived:  # noqa: ASYNC110 - real time
                    await trio.sleep(0.01)
            taken = size / (arrived[0] - begun)
            assert taken < 1.15 * rate
            nursery.cancel_scope.cancel()

    trio.run(scenario)


def test_planners_see_only_the_bandwidth_that_an_owner_allows() -> None:
    rows = [LinkRow(bytes(32), 100, 200, 5)]
    assert limited_rows(rows, 0, 0) == (rows[0],)
    assert limited_rows(rows, 50, 150) == (LinkRow(bytes(32), 50, 150, 5),)


# At run time


def test_bandwidth_and_disk_change_while_the_node_runs() -> None:
    async def scenario() -> None:
        async with swarm("a", preset="lan") as group:
            node = group.nodes["a"]
            node.set("upload", "10Mbit/s")
            node.set("disk", "1GB")
            await trio.sleep(1)
            assert node.measurements.limits == (1_250_000, 0)
            assert node.runs.guests._blobs.guest_bytes_max == 10**9
            node.set("location", "eu-west")
            await trio.sleep(1)
            assert node.state.capacity is not None
            assert node.state.capacity.location == "eu-west"

    simulate(scenario)


@pytest.mark.parametrize(("name", "value"), [("memory", "1GB"), ("slots", "1")])
def test_a_stage_beyond_new_owner_limits_is_handed_over(name: str, value: str) -> None:
    """b gives up its stage, and c continues it."""

    async def scenario() -> None:
        async with swarm("abc", stage_seconds=0.4) as group:
            a, b, c = (group.nodes[each] for each in "abc")
            b.set("slots", "2")
            only(group, "b")
            await trio.sleep(5)
            runs = [asked(a, number) for number in ((1, 2) if name == "slots" else (1,))]
            for run in runs:
                await a.runs.submit(run)
            c.limit(accept_runs="swarm")
            await trio.sleep(3)
            assert b.runs.slots.free == 2 - len(runs)
            b.set(name, value)
            await trio.sleep(10)
            assert b.runs.slots.free == (2 if name == "memory" else 0)
            held = [node for node in (b, c) for member in node.runs.members.values() if member.hosts]
            assert c in held
            await all_ended(group)
            for run in runs:
                assert_equal(weights(group, "a", run), reference(run), "float64")

    simulate(scenario)


def test_a_node_refuses_changes_that_need_a_restart() -> None:
    async def scenario() -> None:
        async with swarm("a", preset="lan") as group:
            node: Node = group.nodes["a"]
            with pytest.raises(UsageError, match="cannot be changed while the node runs"):
                node.set("name", "b")
            with pytest.raises(UsageError, match="want an amount"):
                node.set("memory", "much")

    simulate(scenario)
