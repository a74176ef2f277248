"""Children that a script forks from the process of its node keep no part of the node.

The workers of torch's DataLoader are such children. They outlive a killed script for as long as their current
item takes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from node.storage.folder_lock import find_holder, lock
from tests.source import ROOT

WITH_A_LOADER = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import node

torch.set_num_threads(1)

def links():
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try: found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError: pass
    return found

def try_out(function):
    try: return repr(function())
    except Exception as error: return f"{type(error).__name__}: {error}"

class Items(Dataset):
    def __len__(self): return 1_000
    def __getitem__(self, index):
        if index >= 2: time.sleep(60)  # still busy when the script is killed
        found = links()
        told = {
            "child": os.getpid(),
            "left": sorted(link for number, link in found.items() if ours.get(number) == link),
            "step": try_out(optimizer.step),
            "call": try_out(me.members),
            "close": try_out(me.close),
        }
        return json.dumps(told)

before = links()
with node.sync(swarm="forks", preset="local", listen=[sys.argv[1]], lan=False) as me:
    model = torch.nn.Linear(2, 2)
    optimizer = me.optimizer(torch.optim.SGD(model.parameters(), 0.1), run_id="forks", local_steps=10)
    ours = {number: link for number, link in links().items() if number not in before}
    print(json.dumps({"id": me.id, "address": me.addresses[0], "links": len(ours)}), flush=True)
    loader = DataLoader(Items(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for number, told in enumerate(loader):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        print(told, flush=True)
"""

PLAIN = """
import json, os, sys, time
import node

with node.sync(swarm="forks", preset="local", listen=[sys.argv[1]], lan=False) as me:
    told = {"id": me.id, "address": me.addresses[0], "folder": me.status()["data_dir"]}
    print(json.dumps(told), flush=True)
    if sys.argv[2:] == ["fork"] and not os.fork():
        with node.sync(swarm="forks", preset="local", listen=["127.0.0.1:0"], lan=False) as own:
            print(json.dumps({"id": own.id, "folder": own.status()["data_dir"]}), flush=True)
        sys.exit()  # runs what the parent registered for its own end
    if sys.argv[2:] == ["fork"]:
        os.wait()
        print(json.dumps({"members": len(me.members())}), flush=True)
    if sys.argv[2:] != ["end"]:
        time.sleep(60)
"""

WITH_A_LOOP = """
import json, multiprocessing, os, pathlib, sys, time
import trio
import node
from node import config

def work():
    print(json.dumps({"child": os.getpid()}), flush=True)
    time.sleep(60)

async def main():
    settings = config.Config(
        data_dir=pathlib.Path(sys.argv[2]),
        listen=config.Listen(addresses=(config.read_listen(sys.argv[1]),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False),
    )
    async with node.Node(settings) as me:
        print(json.dumps({"id": str(me.id), "address": str(me.addresses[0])}), flush=True)
        multiprocessing.get_context("fork").Process(target=work).start()
        await trio.sleep(60)

trio.run(main)
"""


class Script:
    """Start a program with one of these texts, which prints lines of JSON."""

    def __init__(self, folder: Path, text: str, *arguments: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "PEERLOOM_DATA_DIR"}
        with (folder / "stderr").open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", text, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**environment, "PYTHONPATH": str(ROOT), "XDG_DATA_HOME": str(folder)},
            )

    def tell(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the script ended"
        told: dict[str, Any] = json.loads(line)
        return told

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def ended(script: Script) -> Iterator[Script]:
    try:
        yield script
    finally:
        script.kill()
        if script.process.stdout is not None:
            script.process.stdout.close()


def test_a_killed_script_can_restart_while_its_loader_still_runs(tmp_path: Path) -> None:
    children: list[int] = []
    try:
        with ended(Script(tmp_path, WITH_A_LOADER, "127.0.0.1:0")) as script:
            first = script.tell()
            assert first["links"] > 5, "the parent should hold a lock, sockets and the loop's descriptors"
            for told in (script.tell(), script.tell()):
                children.append(told["child"])
                kept = [link for link in told["left"] if "/records.sqlite" not in link]
                assert kept == [], "the child holds more than the files of SQLite, on which it has no lock"
                belongs = f"this node belongs to process {script.process.pid}"
                assert belongs in told["step"]
                assert belongs in told["call"]
                assert told["close"] == "None"
            script.kill()
            for child in children:
                os.kill(child, 0)  # the process still exists
            with ended(Script(tmp_path, PLAIN, first["address"], "end")) as again:
                second = again.tell()
            assert second["id"] == first["id"]
            assert second["address"] == first["address"]
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def test_a_forked_child_can_open_a_node_of_its_own(tmp_path: Path) -> None:
    with ended(Script(tmp_path, PLAIN, "127.0.0.1:0", "fork")) as script:
        parent, child = script.tell(), script.tell()
        assert script.tell() == {"members": 0}, "the parent's node no longer answers"
    assert child["id"] != parent["id"]
    said = (tmp_path / "stderr").read_text()
    assert f"process {script.process.pid} holds {parent['folder']}" in said
    assert f"takes {child['folder']}" in said


def test_children_forked_under_trio_hold_neither_folder_nor_port(tmp_path: Path) -> None:
    folder, children = tmp_path / "data", []
    try:
        with ended(Script(tmp_path, WITH_A_LOOP, "127.0.0.1:0", str(folder))) as script:
            host, _, port = script.tell()["address"].partition(":")
            children.append(script.tell()["child"])
            assert find_holder(folder) == str(script.process.pid)
            script.kill()
            assert find_holder(folder) is None
            with lock(folder), socket.create_server((host, int(port))):
                os.kill(children[0], 0)  # the process still exists
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
