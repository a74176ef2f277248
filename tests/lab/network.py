"""A laboratory of machines: network namespaces joined by virtual cables, switches and a router.

The laboratory is one user, mount and network namespace, made by `unshare` without privileges; each machine is
a network namespace inside it. Everything vanishes with the process that holds it, and this machine's own
network is not touched. Not here: nodes (`tests.lab.nodes`) and what is expected of them.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.source import ROOT

COMMAND_SECONDS = 30
TOOLS = ("unshare", "nsenter", "ip", "tc")
"""Required programs, from Debian's packages util-linux and iproute2."""
WANTED = os.environ.get("PEERLOOM_LAB", "")
"""With `required`, a laboratory that cannot be built fails the test, because a skipped test proves nothing.
With `full`, in addition every plan is played, which takes several minutes."""
FULL = WANTED == "full"

_HOLD = "mount -t tmpfs none /run && mkdir -p /run/netns && ip link set lo up && echo ready && exec cat"


@dataclass(frozen=True)
class Extra:
    """An additional interface of a machine: a `bridge` without a port, a `tun` that no program has opened, or
    a `dead_end`, which has a carrier and leads nowhere."""

    name: str
    kind: str
    network: str
    """The address with its prefix length; `{n}` stands for the machine's number."""


DOCKER = (
    Extra("docker0", "bridge", "172.17.0.1/16"),
    Extra("br-0f1e2d3c4b5a", "bridge", "172.18.0.1/16"),
    Extra("br-1f1e2d3c4b5a", "bridge", "172.19.0.1/16"),
    Extra("br-2f1e2d3c4b5a", "bridge", "172.20.0.1/16"),
)
"""A machine with Docker and three networks of Compose, whose addresses are the same on each such machine."""
LAPTOP = (
    Extra("docker0", "bridge", "172.17.0.1/16"),
    Extra("virbr0", "bridge", "192.168.122.1/24"),
    Extra("tailscale0", "tun", "100.101.102.{n}/32"),
)
STORAGE = tuple(Extra(f"aa{index}", "dead_end", f"10.20{index}.0.{{n}}/24") for index in range(4))
"""Four networks that have a carrier and come first by name, but contain no other machine."""


@dataclass(frozen=True)
class Host:
    """One machine of a plan. Its interface on the switch of `segment` is called `interface`; `more` lists
    further interfaces, each with the segment of its switch."""

    name: str
    interface: str = "eth0"
    segment: int = 0
    extras: Sequence[Extra] = ()
    families: Sequence[int] = (4,)
    more: Sequence[tuple[str, int]] = ()

    @property
    def cables(self) -> list[tuple[str, int]]:
        return [(self.interface, self.segment), *self.more]


@dataclass
class Machine:
    """A running machine of a laboratory. `hosts` are its addresses on its switch, by family."""

    lab: "Lab"
    host: Host
    number: int
    hosts: dict[int, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.host.name

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        output: Path | None = None,
    ) -> "subprocess.Popen[bytes]":
        """Run a program on the machine, in a process group of its own, with its output in the file
        `output`."""
        program = [*self.lab.enter, "ip", "netns", "exec", self.name, *arguments]
        with open(output or os.devnull, "ab") as file:
            return subprocess.Popen(
                program,
                cwd=ROOT,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, script: str) -> str:
        """Run lines of `sh` on the machine; return what they print."""
        return self.lab.run(f"ip netns exec {self.name} sh -ec '{script}'")


class Lab:
    """Machines by name. Each segment is a switch with the networks 10.77.SEGMENT.0/24 and
    fd77:SEGMENT+1::/64. If there are several segments, a router joins them, and is the default route of all
    machines."""

    def __init__(self, holder: "subprocess.Popen[str]") -> None:
        self._holder = holder
        self.machines: dict[str, Machine] = {}
        self.enter = [
            "nsenter",
            "--target",
            str(holder.pid),
            "--user",
            "--preserve-credentials",
            "--mount",
            "--net",
            f"--wd={ROOT}",
        ]

    def run(self, script: str) -> str:
        """Run lines of `sh` in the laboratory, outside of its machines; return what they print."""
        done = subprocess.run(
            [*self.enter, "sh", "-ec", script], capture_output=True, text=True, timeout=COMMAND_SECONDS
        )
        assert done.returncode == 0, f"{script}\n{done.stderr}"
        return done.stdout

    def build(self, hosts: Sequence[Host], *, mtu: int, has_router: bool) -> None:
        segments = sorted({segment for host in hosts for _, segment in host.cables})
        lines = []
        for segment in segments:
            lines += [f"ip link add sw{segment} mtu {mtu} type bridge", f"ip link set sw{segment} up"]
        for number, host in enumerate(hosts, start=1):
            machine = self.machines[host.name] = Machine(self, host, number)
            lines += _machine_lines(machine, mtu)
        if has_router:
            lines += _router_lines(segments, mtu)
            lines += _route_lines(self.machines.values())
        self.run("\n".join(lines))


def _machine_lines(machine: Machine, mtu: int) -> list[str]:
    host, name, number = machine.host, machine.name, machine.number
    lines = [f"ip netns add {name}", f"ip -n {name} link set lo up"]
    if 6 not in host.families:
        lines.append(
            f"ip netns exec {name} sh -c 'for each in all default; do "
            "echo 1 > /proc/sys/net/ipv6/conf/$each/disable_ipv6; done'"
        )
    for interface, segment in host.cables:
        end = f"to-{name}-{segment}"
        lines += [
            f"ip link add {interface} netns {name} mtu {mtu} type veth peer name {end} mtu {mtu}",
            f"ip link set {end} master sw{segment} up",
        ]
        for family in host.families:
            here = f"10.77.{segment}.{number}" if family == 4 else f"fd77:{segment + 1:x}::{number:x}"
            machine.hosts.setdefault(family, here)
            suffix = "/24" if family == 4 else "/64 nodad"
            lines.append(f"ip -n {name} address add {here}{suffix} dev {interface}")
        lines.append(f"ip -n {name} link set {interface} up")
    for extra in host.extras:
        make = f"ip -n {name} link add {extra.name} type bridge"
        if extra.kind == "tun":
            make = f"ip netns exec {name} ip tuntap add mode tun name {extra.name}"
        elif extra.kind == "dead_end":
            make = f"ip -n {name} link add {extra.name} type veth peer name end-{extra.name}"
            make += f"; ip -n {name} link set end-{extra.name} up"
        lines += [
            make,
            f"ip -n {name} address add {extra.network.format(n=number)} dev {extra.name}",
            f"ip -n {name} link set {extra.name} up",
        ]
    return lines


def _router_lines(segments: Sequence[int], mtu: int) -> list[str]:
    lines = [
        "ip netns add router",
        "ip -n router link set lo up",
        "ip netns exec router sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward'",
        "ip netns exec router sh -c 'echo 1 > /proc/sys/net/ipv6/conf/all/forwarding'",
    ]
    for segment in segments:
        lines += [
            f"ip link add r{segment} netns router mtu {mtu} type veth peer name to-r{segment} mtu {mtu}",
            f"ip link set to-r{segment} master sw{segment} up",
            f"ip -n router address add 10.77.{segment}.254/24 dev r{segment}",
            f"ip -n router address add fd77:{segment + 1:x}::fe/64 dev r{segment} nodad",
            f"ip -n router link set r{segment} up",
        ]
    return lines


def _route_lines(machines: Iterable[Machine]) -> list[str]:
    lines = []
    for machine in machines:
        segment = machine.host.segment
        if 4 in machine.host.families:
            lines.append(f"ip -n {machine.name} route add default via 10.77.{segment}.254")
        if 6 in machine.host.families:
            lines.append(f"ip -6 -n {machine.name} route add default via fd77:{segment + 1:x}::fe")
    return lines


@contextmanager
def laboratory(hosts: Sequence[Host], *, mtu: int = 1_500, has_router: bool = False) -> Iterator[Lab]:
    """Build these machines. Skip the test, with the reason, if the system does not allow it."""
    with held() as holder:
        lab = Lab(holder)
        lab.build(hosts, mtu=mtu, has_router=has_router)
        yield lab


@contextmanager
def held() -> Iterator["subprocess.Popen[str]"]:
    """Start the process that holds a laboratory, and ends when its input closes. Skip the test if the system
    cannot have a laboratory."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        refuse(f"a laboratory needs {', '.join(missing)} (util-linux, iproute2)")
    program = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", _HOLD]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            _, said = holder.communicate(timeout=COMMAND_SECONDS)
            refuse(f"no laboratory here: {said.strip() or 'unshare failed'}")
        try:
            yield holder
        finally:
            holder.communicate(timeout=COMMAND_SECONDS)


def refuse(reason: str) -> None:
    if WANTED in ("required", "full"):
        pytest.fail(reason)
    pytest.skip(reason)


def python() -> str:
    """Return the interpreter of this test run."""
    return sys.executable
