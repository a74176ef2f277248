"""The process around a node: its settings before the node serves anything."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from node.errors import EXIT_FORCED
from tests.source import ROOT

COLLECTED_MAX = 2_000
"""Maximum number of objects that a full garbage collection may scan. Imports make over 60,000 objects; to
scan them would stop an event loop for 40 ms.
"""


def test_garbage_collection_does_not_scan_imported_objects() -> None:
    program = (
        "import gc, trio\n"
        "from node import process\n"
        "from node.config import Config\n"
        "trio.run = lambda *arguments: len(gc.get_objects())\n"
        "print(process.main(Config()))\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(printed.stdout) <= COLLECTED_MAX


def test_a_second_signal_kills_a_node_that_is_leaving(tmp_path: Path) -> None:
    program = f"""
import pathlib, trio
from node import config, process

async def announce(self): print("ready", flush=True)

async def hang(self):
    print("leaving", flush=True)
    await trio.sleep_forever()

process.Alerts.run, process.Node.leave = announce, hang
listen = config.Listen(addresses=(config.read_listen("127.0.0.1:0"),))
resources = config.Resources(calibrate=False)
process.main(config.Config(
    data_dir=pathlib.Path({str(tmp_path)!r}), listen=listen, resources=resources,
    join=config.JoinSettings(lan=False), web=config.Web(None),
))
"""
    terminal, its_end = os.openpty()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=its_end) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"leaving\n"
        assert b"leaving... (Ctrl-C again: at once)" in os.read(terminal, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == EXIT_FORCED
    os.close(terminal)
    os.close(its_end)
