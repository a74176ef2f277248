"""Two network namespaces joined by a pair of virtual cables, for tests that need two machines.

Made with `ip`, as root; a test that cannot have them is skipped. Nothing of the machine's own network is
touched, and both namespaces go away with the test.
"""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.source import ROOT

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Machine:
    """One namespace. `host_4` and `host_6` are its addresses on the cable; no `host_4`: it has none."""

    name: str
    host_4: str
    host_6: str

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Run `python -m module` there; its standard input and output are pipes."""
        program = ["ip", "netns", "exec", self.name, sys.executable, "-m", module, *arguments]
        return subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ip(self, *arguments: str) -> None:
        """`ip` inside of it."""
        _ip("-n", self.name, *arguments)


@contextmanager
def two_machines(*, link_local: bool = False) -> Iterator[tuple[Machine, Machine]]:
    """Two machines on one link, both with IPv4 and IPv6, or with `link_local` addresses of IPv6 alone; skips
    the test where they cannot be had."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    tag = f"peerloom-{os.getpid()}-{next(_numbers)}"
    machines = tuple(
        Machine(f"{tag}-{letter}", "", f"fe80::{number}")
        if link_local
        else Machine(f"{tag}-{letter}", f"10.87.0.{number}", f"fd87::{number}")
        for number, letter in enumerate("ab", start=1)
    )
    made = []
    try:
        try:
            for machine in machines:
                _ip("netns", "add", machine.name)
                made.append(machine)
            one, other = machines
            one.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other.name)
            for machine in machines:
                if link_local:
                    machine.ip("link", "set", "cable", "addrgenmode", "none")
                else:
                    machine.ip("address", "add", f"{machine.host_4}/24", "dev", "cable")
                machine.ip("address", "add", f"{machine.host_6}/64", "dev", "cable", "nodad")
                for link in ("lo", "cable"):
                    machine.ip("link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield one, other
    finally:
        for machine in made:
            _ip("netns", "delete", machine.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
