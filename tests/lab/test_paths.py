"""Two machines share two networks with different speeds: large transfers use the faster one."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.lab.network import FULL, Host, Machine, laboratory, python

RATE_MIN = 0.8
"""The transfer must reach at least this share of its rate when only the faster network exists."""
SECONDS_MAX = 150
BYTES_MIN = 7_000_000
"""In averaging, a machine receives half of the 16 MB back, and half of the other's; a state is sent whole."""
RATES = ("10mbit", "100mbit")
"""The rate of each segment."""
SETTINGS = {"PEERLOOM_CALIBRATE": "false", "PEERLOOM_ALLOW_UNFENCED": "true"}


def shape(machine: Machine, interface: str, rate: str) -> None:
    machine.run(f"tc qdisc add dev {interface} root tbf rate {rate} burst 64kb latency 50ms")


@contextmanager
def program(
    machine: Machine, folder: Path, environment: dict[str, str], *arguments: str
) -> "Iterator[subprocess.Popen[bytes]]":
    """Run `tests.lab.two_paths` on the machine; the program is killed at the end of the block."""
    command = [python(), "-m", "tests.lab.two_paths", str(folder), *arguments]
    process = machine.start(command, environment=environment, output=folder.with_suffix(".log"))
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def rates(folder: Path, *, has_slow: bool) -> dict[str, float]:
    """Return the bytes per second that the second of two machines received, by kind of transfer."""
    folder.mkdir()
    # The slow network comes first by name, and the machines join each other over it.
    hosts = [Host(name, "eth1", 1) for name in "ab"]
    if has_slow:
        hosts = [Host(name, "eth0", 0, more=(("eth1", 1),)) for name in "ab"]
    environment = SETTINGS if has_slow else SETTINGS | {"PEERLOOM_ONE_PATH": "1"}
    with laboratory(hosts) as lab:
        for machine in lab.machines.values():
            for interface, segment in machine.host.cables:
                shape(machine, interface, RATES[segment])
        first, second = lab.machines.values()
        there = f"{first.hosts[4]}:9747"
        with (
            program(first, folder / "a", environment, "first"),
            program(second, folder / "b", environment, "second", there) as process,
        ):
            process.wait(SECONDS_MAX)
    output = (folder / "b.log").read_text()
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert [line["what"] for line in lines] == ["averaging", "state"], output
    assert all(line["bytes"] > BYTES_MIN for line in lines), lines
    return {line["what"]: line["bytes_per_second"] for line in lines}


@pytest.mark.skipif(not FULL, reason="PEERLOOM_LAB=full measures both networks")
def test_averaging_and_state_transfers_use_the_faster_of_two_networks(tmp_path: Path) -> None:
    both, fast = rates(tmp_path / "both", has_slow=True), rates(tmp_path / "fast", has_slow=False)
    print({what: f"{both[what] / 1e6:.1f} of {fast[what] / 1e6:.1f} MB/s" for what in both})  # noqa: T201
    for what, rate in both.items():
        assert rate >= RATE_MIN * fast[what], (what, both, fast)
