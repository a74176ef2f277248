"""Two network namespaces joined by a pair of virtual cables, for tests that need two machines.

They are made with `ip` in a laboratory (`tests/lab`), without privileges. A test is skipped if the system
does not allow them. Nothing of the machine's own network is touched, and both namespaces disappear after the
test.
"""

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.lab.network import Lab, held, python
from tests.source import ROOT


@dataclass(frozen=True)
class Machine:
    """One namespace of a laboratory. `host_4` and `host_6` are its addresses on the cable; an address is ""
    if it has none."""

    lab: Lab
    name: str
    host_4: str
    host_6: str

    def start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        """Run `python -m module` in the namespace, with pipes as standard input and output."""
        program = [*self.lab.enter, "ip", "netns", "exec", self.name, python(), "-m", module, *arguments]
        return subprocess.Popen(program, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the namespace."""
        self.lab.run(shlex.join(["ip", "-n", self.name, *arguments]))


@contextmanager
def two_machines(*, link_local: bool = False) -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines on one link, both with IPv4 and IPv6, or with IPv6 `link_local` addresses only. Skip
    the test if the system does not allow namespaces.
    """
    prefix = "fe80" if link_local else "fd87"
    with held() as holder:
        lab = Lab(holder)
        one, other = (
            Machine(lab, letter, "" if link_local else f"10.87.0.{number}", f"{prefix}::{number}")
            for number, letter in enumerate("ab", start=1)
        )
        lab.run(f"ip netns add {one.name}; ip netns add {other.name}")
        one.ip("link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other.name)
        for machine in (one, other):
            if link_local:
                machine.ip("link", "set", "cable", "addrgenmode", "none")
            else:
                machine.ip("address", "add", f"{machine.host_4}/24", "dev", "cable")
            machine.ip("address", "add", f"{machine.host_6}/64", "dev", "cable", "nodad")
            for link in ("lo", "cable"):
                machine.ip("link", "set", link, "up")
        yield one, other
