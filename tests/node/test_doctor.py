"""`doctor`: every check passes on a sound machine, and a failing check says what is wrong and what to do
about it."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from crypto.contact import Address, make_address
from node import config
from node.doctor.local_checks import Scene, _paths, look_here
from node.doctor.remote_checks import look_there
from node.doctor.steps import CheckStep, Steps
from node.errors import CheckFailed
from node.main import run
from node.seams import RealClock
from node.services.autonat import ReachService
from node.stages.sandbox import Fenced
from node.transport.network import RealNetwork
from tests.node.nets import free_port, make_network, running, unused_address
from tests.source import ROOT

SWARM = "test"


def scene(tmp_path: Path, *, announce: tuple[Address, ...] = (), swarm: str = SWARM, **options: Any) -> Scene:
    settings = config.Config(
        data_dir=tmp_path / "data",
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),), announce=announce),
        swarm=config.SwarmSettings(name=swarm),
        resources=config.Resources(allow_unfenced=True),  # these tests do not need a kernel with fences
    )
    return Scene(settings, beacon_port=free_port(), **options)


@asynccontextmanager
async def somebody(*, echoes: bool = True) -> AsyncIterator[RealNetwork]:
    """Run a node that answers dial-backs and echoes."""
    network = make_network("s")
    async with running(network), trio.open_nursery() as nursery:
        if echoes:
            nursery.start_soon(ReachService(network, RealClock(), counters=Counter()).echo)
        yield network
        nursery.cancel_scope.cancel()


async def here(scene: Scene) -> dict[str, CheckStep]:
    steps = Steps(lambda _: None)
    await look_here(steps, scene)
    return {step.name: step for step in steps.all}


async def there(scene: Scene, address: Address) -> dict[str, CheckStep]:
    steps = Steps(lambda _: None)
    await look_there(steps, scene, address)
    return {step.name: step for step in steps.all}


def outcomes(steps: dict[str, CheckStep]) -> dict[str, str]:
    return {name: step.outcome for name, step in steps.items()}


# --- this machine ----------------------------------------------------------------------------------


async def test_every_check_passes_on_a_sound_machine(tmp_path: Path) -> None:
    found = await here(scene(tmp_path))
    assert [step for step in found.values() if step.outcome == "failed"] == []
    assert not (tmp_path / "data").exists()  # the check does not change the folder
    (tmp_path / "data").mkdir(mode=0o700)
    found = await here(scene(tmp_path))
    assert "writable" in found["data folder"].detail
    assert list((tmp_path / "data").iterdir()) == []


async def test_a_data_folder_that_is_a_file_is_reported_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    found = await here(scene(tmp_path))
    assert found["data folder"].outcome == "failed"
    assert "--data-dir" in found["data folder"].remedy


async def test_a_missing_fence_is_reported_with_the_setting_that_waives_it(tmp_path: Path) -> None:
    missing = Fenced(("limits: some",), ("files: no landlock (Function not implemented)",))
    looked = scene(tmp_path, try_fences=lambda _: missing)
    assert "allows" in (await here(looked))["fences"].detail
    looked.config = config.Config(data_dir=tmp_path / "data", listen=looked.config.listen)
    found = await here(looked)
    assert found["fences"].outcome == "failed"
    assert "no landlock" in found["fences"].detail
    assert "allow_unfenced" in found["fences"].remedy


async def test_keys_that_other_users_may_read_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("identity.key", "static.key"):
        (folder / name).write_bytes(os.urandom(32))
        (folder / name).chmod(0o600)
    secret = tmp_path / "swarm.key"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o644)
    looked = scene(tmp_path)
    keyed = config.SwarmSettings(name=SWARM, key_file=secret)
    looked.config = config.Config(data_dir=folder, listen=looked.config.listen, swarm=keyed)
    found = await here(looked)
    assert found["identity"].outcome == "ok"
    assert found["swarm key"].outcome == "failed"
    assert "chmod 600" in found["swarm key"].remedy
    (folder / "identity.key").chmod(0o644)
    secret.chmod(0o600)
    found = await here(looked)
    assert found["identity"].outcome == "failed"
    assert found["swarm key"].outcome == "ok"


async def test_a_lock_held_by_an_unresponsive_process_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    program = (
        "import pathlib, sys, time, node.storage.folder_lock as f\n"
        "with f.lock(pathlib.Path(sys.argv[1])): print(flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:  # noqa: ASYNC220 - waits for one line
        try:
            assert holder.stdout is not None
            holder.stdout.readline()
            found = await here(scene(tmp_path))
        finally:
            holder.kill()
    assert found["lock"].outcome == "failed"
    assert f"process {holder.pid} holds it" in found["lock"].detail


async def test_a_port_used_by_another_program_is_reported_with_the_next_one(tmp_path: Path) -> None:
    looked = scene(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        listen = config.Listen(addresses=(config.read_listen(f"127.0.0.1:{port}"),))
        looked.config = config.Config(data_dir=tmp_path / "data", listen=listen)
        found = await here(looked)
    assert f"another program has {port}" in found[f"port 127.0.0.1:{port}"].detail


async def test_each_path_to_a_peer_is_shown_with_a_remedy(tmp_path: Path) -> None:
    def row(name: str, way: str, relay: str | None = None) -> dict[str, Any]:
        return {
            "name": name,
            "peer": 52 * name[0],
            "path": {"way": way, "relay": relay, "bytes_per_second": None},
        }

    here, steps = scene(tmp_path), Steps(lambda _step: None)
    here.status = {"addresses": ["/ip4/10.0.0.7/tcp/9747"]}
    here.peers = {"peers": [row("ann", "direct"), row("bob", "punched"), row("cid", "relayed", 52 * "a")]}
    await steps.check("paths", partial(_paths, here))
    assert steps.all[-1].document["detail"] == (
        "1 reached directly; bob by a punched path; cid through ann; to reach all directly, let TCP and UDP "
        "port 9747 through firewall and router, or start with --announce HOST:PORT"
    )
    here.peers["peers"].pop()
    await steps.check("paths", partial(_paths, here))
    assert "--announce" not in steps.all[-1].document["detail"]


async def test_a_check_that_takes_too_long_is_cancelled() -> None:
    steps = Steps(lambda _: None)

    async def hang() -> str:
        await trio.sleep_forever()

    assert not await steps.check("disk", hang, seconds=0.05)
    assert (steps.failed[0].outcome, steps.failed[0].detail) == ("failed", "no end within 0.05 s")


# --- another node ----------------------------------------------------------------------------------


async def test_all_checks_of_a_sound_node_pass(tmp_path: Path) -> None:
    looked = scene(tmp_path)
    async with somebody() as node:
        found = await there(looked, node.addresses[0])
        assert outcomes(found) == {
            "name": "skipped",
            "connect": "ok",
            "handshake": "ok",
            "peer id": "ok",
            "swarm": "ok",
            "datagram": "ok",
            "datagram size": "ok",
            "latency": "ok",
            "dial back": "ok",
        }
        found = await there(looked, Address("dns", "localhost", node.port))
        assert found["name"].outcome == "ok"
        assert "127.0.0.1" in found["name"].detail


async def test_a_peer_with_a_different_id_is_reported_with_the_expected_one(tmp_path: Path) -> None:
    async with somebody() as node:
        found = await there(scene(tmp_path), node.addresses[0].of(make_network("x").peer))
    assert found["peer id"].outcome == "failed"
    assert found["peer id"].detail.count("...") == 2


async def test_later_checks_are_skipped_if_nothing_listens(tmp_path: Path) -> None:
    found = await there(scene(tmp_path), unused_address())
    assert found["connect"].outcome == "failed"
    assert "nothing listens" in found["connect"].detail
    later = ("handshake", "peer id", "swarm", "datagram", "datagram size", "latency", "dial back")
    assert [found[name].outcome for name in later] == ["skipped"] * len(later)


async def test_a_node_of_a_different_swarm_fails_the_handshake(tmp_path: Path) -> None:
    async with somebody() as node:
        found = await there(scene(tmp_path, swarm="other"), node.addresses[0].of(None))
    assert found["connect"].outcome == "ok"
    assert found["handshake"].outcome == "failed"
    assert "swarm 'other'" in found["handshake"].remedy


async def test_lost_datagrams_and_closed_ports_are_detected(
    tmp_path: Path,
) -> None:
    closed = unused_address()
    async with somebody(echoes=False) as node:
        ReachService(node, RealClock(), counters=Counter())
        node.inbox("/peerloom/reach/1")  # receives datagrams but answers none
        found = await there(scene(tmp_path, announce=(closed,), echo_seconds=0.1), node.addresses[0])
    assert found["datagram"].outcome == "failed"
    assert "UDP port" in found["datagram"].remedy
    assert found["dial back"].outcome == "failed"
    assert f"{closed.short} (refused)" in found["dial back"].detail


async def test_an_older_node_without_dial_back_passes_the_checks(
    tmp_path: Path,
) -> None:
    async with somebody(echoes=False) as node:
        found = await there(scene(tmp_path, echo_seconds=0.1), node.addresses[0])
    assert found["dial back"].outcome == "skipped"
    assert "does not speak" in found["dial back"].detail


# --- the command -------------------------------------------------------------------------------------


def test_the_command_exits_with_6_if_a_check_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--listen", "127.0.0.1:0", "--no-lan", "--data-dir", str(tmp_path / "data")]
    assert run(["doctor", *flags, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "peerloom/doctor/1"
    assert document["ok"]
    assert {step["name"] for step in document["steps"]} >= {"config", "clock", "ipv4", "udp", "computing"}
    nobody = make_address("127.0.0.1", unused_address().port).short
    assert run(["doctor", nobody, *flags]) == CheckFailed.exit_code == 6
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("failed   connect") for line in lines)
    assert lines[-1].endswith("checks failed")
    assert run(["doctor", "--listen", "nonsense"]) == 6
    assert run(["doctor", "10.0.0.5:99999"]) == 2
