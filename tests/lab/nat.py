"""A laboratory of address NATs: sites behind real NATs and firewalls, joined by a model of the internet.

Each site has a public address of its own. Behind the address are a router that translates with nftables, for
some presets a carrier's router in front of it, and the machines. Mapping and filtering are named as in RFC
4787. Not here: the proof that the presets work (`test_nat.py`), nodes (`tests.lab.nodes`).
"""

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.lab.network import COMMAND_SECONDS, Host, Lab, Machine, held, python, refuse

PORTS = 20_000
"""The number of external ports of a NAT that does not preserve ports, counted from `PORT_BASE`."""
PORT_BASE, PORT_BASE_REBOOTED = 20_000, 42_000
HOME_SECONDS = 300
"""Seconds for which a UDP mapping is kept: RFC 4787 requires this long, and home routers nearly comply."""
SHORT_SECONDS = 50
"""Seconds for which carriers' NATs were measured to keep mappings."""


@dataclass(frozen=True)
class Nat:
    """How a router translates. A mapping expires after `seconds` without traffic."""

    mapping: Literal["independent", "dependent"] = "independent"
    """"independent": one inner address and port has one outer port for all destinations; "dependent": one for
    each destination."""
    filtering: Literal["independent", "address and port"] = "address and port"
    """"independent": any host may send to a mapping; "address and port": only endpoints that the machine has
    written to."""
    has_hairpin: bool = False
    has_udp: bool = True
    seconds: int = HOME_SECONDS


HOME = Nat()
SYMMETRIC = Nat(mapping="dependent")
FULL_CONE = Nat(filtering="independent", has_hairpin=True)
UDP_BLOCKED = Nat(has_udp=False)
SHORT = Nat(seconds=SHORT_SECONDS)
CARRIER = Nat(seconds=60)


@dataclass(frozen=True)
class Site:
    """One site on the internet: `machines` behind `nat`, which may be behind a `carrier`'s router. Without a
    `nat`, the site is one machine with a public address."""

    name: str
    machines: tuple[str, ...] = ()
    nat: Nat | None = None
    carrier: Nat | None = None
    has_ipv6: bool = False
    """The machines have global IPv6 addresses; a router's firewall lets in only answers."""
    rate: str = ""
    """The rate in both directions, as `tc` reads it, such as `100mbit`."""
    delay_seconds: float = 0.0
    """Delay in one direction between the site and the rest of the internet: see `tests.lab.long_line`."""

    @property
    def names(self) -> tuple[str, ...]:
        return self.machines or (self.name,)


PRESETS = {
    "public": Site("public", has_ipv6=True),
    "home": Site("home", nat=HOME),
    "symmetric": Site("symmetric", nat=SYMMETRIC),
    "cone": Site("cone", nat=FULL_CONE),
    "carrier": Site("carrier", nat=HOME, carrier=CARRIER),
    "blocked": Site("blocked", nat=UDP_BLOCKED),
    "firewall6": Site("firewall6", nat=SYMMETRIC, has_ipv6=True),
    "short": Site("short", nat=SHORT),
}


def named(preset: str, name: str, *machines: str, rate: str = "", delay_seconds: float = 0.0) -> Site:
    """Return a site like the preset, under a different name."""
    return replace(PRESETS[preset], name=name, machines=machines, rate=rate, delay_seconds=delay_seconds)


def can_be_direct(one: Site, other: Site, transport: Literal["tcp", "udp"]) -> bool:
    """Return whether two sites can have a path without a relay, judged by the mappings alone.

    An IPv6 firewall does not translate, so each side knows the other's address. Behind NATs, each side must
    know the outer port from which the other sends, unless its own NAT filters nothing.
    """
    sites = (one, other)
    if transport == "udp" and any(
        nat is not None and not nat.has_udp for site in sites for nat in nats(site)
    ):
        return False
    if all(site.has_ipv6 for site in sites):
        return True
    return all(
        is_mapped_alike(writer) or lets_everybody_in(reader)
        for writer, reader in ((one, other), (other, one))
    )


def nats(site: Site) -> list[Nat]:
    """Return the NATs of a site, the one nearest to the machines first."""
    return [nat for nat in (site.nat, site.carrier) if nat is not None]


def is_mapped_alike(site: Site) -> bool:
    return all(nat.mapping == "independent" for nat in nats(site))


def lets_everybody_in(site: Site) -> bool:
    return all(nat.filtering == "independent" for nat in nats(site))


class Internet(Lab):
    """Machines by name, behind the routers of their sites. Site N, counted from 1, has the address 45.N.0.2;
    its LAN is 192.168.1.0/24, as on every site, and 2a0f:N:1::/64."""

    def put(self, sites: Sequence[Site]) -> None:
        """Build them all."""
        self.sites = {site.name: site for site in sites}
        self._numbers = {site.name: number for number, site in enumerate(sites, start=1)}
        lines = _namespace_lines("core")
        for site in sites:
            lines += self._site_lines(site)
        self.run("\n".join(lines))

    def public(self, site: str, family: int = 4) -> str:
        """Return the address at which the internet sees a site's machines; for IPv6, the address of the
        site's router."""
        return f"45.{self._numbers[site]}.0.2" if family == 4 else f"2a0f:{self._numbers[site]:x}::2"

    def router(self, site: str) -> str:
        """Return the name of the router of a site."""
        return f"nat-{site}"

    def in_router(self, site: str, script: str) -> str:
        """Run lines of `sh` on a site's router; return what they print."""
        return self.run(f"ip netns exec {self.router(site)} sh -ec '{script}'")

    def start_router(self, site: str, protocol: str) -> "subprocess.Popen[bytes]":
        """Let a site's router answer requests for port mappings: see `tests.lab.router` and `upnp_router`."""
        module = ["tests.lab.upnp_router"] if protocol == "upnp" else ["tests.lab.router", protocol]
        program = [python(), "-m", *module, self._routers(self.sites[site])[-1][2]]
        return subprocess.Popen([*self.enter, "ip", "netns", "exec", self.router(site), *program])

    def reboot(self, site: str, *, is_strict: bool = False) -> None:
        """Let the routers of a site forget every mapping, and hand out different ports from now on. A
        connection that existed gets a new mapping, which the other side rejects. If the router `is_strict`,
        it drops the packets of such a connection instead."""
        for name, nat, wan in self._routers(self.sites[site]):
            self.run("\n".join(_rule_lines(name, nat, wan, PORT_BASE_REBOOTED)))
            loose = "/proc/sys/net/netfilter/nf_conntrack_tcp_loose"
            self.run(f"ip netns exec {name} sh -c 'echo {int(not is_strict)} > {loose}'")
        self.forget(site)

    def forget(self, *sites: str) -> None:
        """Let the routers of these sites forget every mapping."""
        names = [name for site in sites for name, _, _ in self._routers(self.sites[site])]
        self.run(f"{python()} -m tests.lab.prober forget {' '.join(names)}")

    def _routers(self, site: Site) -> list[tuple[str, Nat, str]]:
        """Return each router's name, with its translation and its outer address."""
        outer = self.public(site.name)
        found = [(f"carrier-{site.name}", site.carrier, outer)] if site.carrier is not None else []
        if site.nat is not None:
            found.append((self.router(site.name), site.nat, "100.64.0.2" if found else outer))
        return [(name, nat, wan) for name, nat, wan in found if nat is not None]

    def _site_lines(self, site: Site) -> list[str]:
        number, wire = self._numbers[site.name], f"s{self._numbers[site.name]}"
        first = next((name for name, _, _ in self._routers(site)), site.names[0])
        lines = []
        for name in (*(name for name, _, _ in self._routers(site)), *site.names):
            lines += _namespace_lines(name, has_ipv6=site.has_ipv6)
        wan = "eth0" if site.nat is None else "wan"
        if site.delay_seconds:
            lines += self._long_line("core", wire, first, wan, site.delay_seconds)
        else:
            lines += _cable_lines("core", wire, first, wan)
        lines += _address_lines("core", wire, f"45.{number}.0.1/24", f"2a0f:{number:x}::1/64")
        lines += _address_lines(first, wan, f"45.{number}.0.2/24", site.has_ipv6 and f"2a0f:{number:x}::2/64")
        lines.append(f"ip -n {first} route add default via 45.{number}.0.1")
        if site.has_ipv6:
            lines.append(f"ip -6 -n {first} route add default via 2a0f:{number:x}::1")
        if site.rate:
            shape = f"root tbf rate {site.rate} burst 64kb latency 50ms"
            lines += [
                f"tc -n core qdisc add dev {wire} {shape}",
                f"tc -n {first} qdisc add dev {wan} {shape}",
            ]
        if site.nat is None:
            machine = self._machine(first)
            machine.hosts = {4: f"45.{number}.0.2"}
            if site.has_ipv6:
                machine.hosts[6] = f"2a0f:{number:x}::2"
            return lines
        if site.carrier is not None:
            lines += _cable_lines(first, "lan", self.router(site.name), "wan")
            lines += _address_lines(first, "lan", "100.64.0.1/10")
            lines += _address_lines(self.router(site.name), "wan", "100.64.0.2/10")
            lines.append(f"ip -n {self.router(site.name)} route add default via 100.64.0.1")
        lines += self._lan_lines(site)
        for name, nat, outer in self._routers(site):
            lines += _rule_lines(name, nat, outer, PORT_BASE)
        return lines

    def _long_line(self, one: str, interface: str, other: str, end: str, seconds: float) -> list[str]:
        program = f"{python()} -m tests.lab.long_line {self._holder.pid} {seconds}"
        return [
            f"setsid {program} {one} {interface} {other} {end} > /dev/null 2>&1 < /dev/null &",
            f"until ip -n {other} link show {end} > /dev/null 2>&1; do sleep 0.05; done",
        ]

    def _lan_lines(self, site: Site) -> list[str]:
        """Return the commands that create the router's switch, and the machines on it."""
        router, number = self.router(site.name), self._numbers[site.name]
        prefix = f"2a0f:{number:x}:1::"
        lines = [f"ip -n {router} link add lan type bridge"]
        lines += _address_lines(router, "lan", "192.168.1.1/24", site.has_ipv6 and f"{prefix}1/64")
        if site.has_ipv6:
            lines.append(f"ip -6 -n core route add 2a0f:{number:x}:1::/64 via 2a0f:{number:x}::2")
        for place, name in enumerate(site.names, start=10):
            machine = self._machine(name)
            machine.hosts = {4: f"192.168.1.{place}"}
            lines += _cable_lines(router, f"lan{place}", name, "eth0")
            lines += [f"ip -n {router} link set lan{place} master lan up"]
            if site.has_ipv6:
                machine.hosts[6] = f"{prefix}{place}"
            inner = site.has_ipv6 and f"{prefix}{place}/64"
            lines += _address_lines(name, "eth0", f"192.168.1.{place}/24", inner)
            lines.append(f"ip -n {name} route add default via 192.168.1.1")
            if site.has_ipv6:
                lines.append(f"ip -6 -n {name} route add default via {prefix}1")
        return lines

    def _machine(self, name: str) -> Machine:
        machine = Machine(self, Host(name), len(self.machines) + 1)
        self.machines[name] = machine
        return machine


def _namespace_lines(name: str, *, has_ipv6: bool = True) -> list[str]:
    settings = ["ipv4/ip_forward 1"]
    settings += ["ipv6/conf/all/forwarding 1"] if has_ipv6 else ["ipv6/conf/all/disable_ipv6 1"]
    lines = [f"ip netns add {name}", f"ip -n {name} link set lo up"]
    for setting in settings:
        path, value = setting.split()
        lines.append(f"ip netns exec {name} sh -c 'echo {value} > /proc/sys/net/{path}'")
    return lines


def _cable_lines(one: str, interface: str, other: str, end: str) -> list[str]:
    return [f"ip link add {interface} netns {one} type veth peer name {end} netns {other}"]


def _address_lines(name: str, interface: str, *addresses: "str | bool") -> list[str]:
    lines = []
    for address in addresses:
        if isinstance(address, str):
            nodad = " nodad" if ":" in address else ""
            lines.append(f"ip -n {name} address add {address}{nodad} dev {interface}")
    return [*lines, f"ip -n {name} link set {interface} up"]


def _rule_lines(router: str, nat: Nat, outer: str, port_base: int) -> list[str]:
    """Return the nftables rules that translate and filter. They drop unsolicited packets before conntrack
    confirms them. Otherwise such a packet could occupy the mapping that the machine inside is about to
    make."""
    source = f"snat to {outer}:jhash ip saddr . th sport mod {PORTS} seed 0x5eed offset {port_base}"
    cone, learn, into = "", "", ""
    if nat.mapping == "dependent":
        source = "masquerade random,fully-random"
    elif nat.filtering == "independent":
        # Ports are preserved, and a packet to a port reaches the machine that has used the port last.
        source = "masquerade"
        cone = f"""map cone {{ typeof meta l4proto . th dport : ip daddr . th dport
            flags dynamic,timeout; timeout {nat.seconds}s; size 1000; }}"""
        learn = "update @cone { meta l4proto . th sport : ip saddr . th sport }"
        into = f"ip daddr {outer} meta l4proto {{ tcp, udp }} dnat ip to meta l4proto . th dport map @cone"
    hairpin = 'iifname "lan" oifname "lan" ct status dnat masquerade' if nat.has_hairpin else ""
    from_outside = "" if nat.has_hairpin else 'iifname "wan" '
    blocked = "" if nat.has_udp else "meta l4proto udp drop"
    rules = f"""
        table ip nat {{
          {cone}
          map forwarded {{ type inet_proto . inet_service : ipv4_addr . inet_service; }}
          chain into {{ type nat hook prerouting priority dstnat;
            {from_outside}ip daddr {outer} dnat ip to meta l4proto . th dport map @forwarded
            {from_outside + into if into else ""}
          }}
          chain out {{ type nat hook postrouting priority srcnat;
            {hairpin}
            oifname "wan" meta l4proto {{ tcp, udp }} {learn} {source}
            oifname "wan" masquerade
          }}
        }}
        table inet firewall {{
          chain through {{ type filter hook forward priority 0; policy drop;
            {blocked}
            ct state established,related accept
            ct status dnat accept
            iifname "lan" accept
          }}
          chain here {{ type filter hook input priority 0; policy drop;
            ct state established,related accept
            iifname {{ "lan", "lo" }} accept
            meta l4proto {{ icmp, icmpv6 }} accept
          }}
        }}"""
    times = {"udp_timeout": nat.seconds, "udp_timeout_stream": nat.seconds}
    if nat.seconds < HOME_SECONDS:
        times["tcp_timeout_established"] = nat.seconds
    lines = [f"ip netns exec {router} nft -f - <<'RULES'\nflush ruleset{rules}\nRULES"]
    for name, seconds in times.items():
        path = f"/proc/sys/net/netfilter/nf_conntrack_{name}"
        lines.append(f"ip netns exec {router} sh -c 'echo {seconds} > {path}'")
    return lines


@contextmanager
def internet(sites: Iterable[Site]) -> Iterator[Internet]:
    """Build these sites. Skip the test, with the reason, if the system does not allow it."""
    if shutil.which("nft") is None:
        refuse("a laboratory of NATs needs nft (nftables)")
    with held() as holder:
        lab = Internet(holder)
        lab.put(tuple(sites))
        yield lab


class Prober:
    """Sockets on a machine: see `tests.lab.prober`. Addresses are pairs (host, port)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        program = ["ip", "netns", "exec", machine.name, python(), "-m", "tests.lab.prober"]
        self._process = subprocess.Popen(
            [*machine.lab.enter, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        self._process.communicate(timeout=COMMAND_SECONDS)

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a request; `result` waits for its result."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def result(self) -> Any:
        assert self._process.stdout is not None
        found = json.loads(self._process.stdout.readline())
        return tuple(found) if isinstance(found, list) else found

    def __call__(self, do: str, **arguments: Any) -> Any:
        self.begin(do, **arguments)
        return self.result()


@contextmanager
def probers(lab: Internet, *names: str) -> "Iterator[dict[str, Prober]]":
    """Start a prober on each of these machines, or on all if none is named."""
    with ExitStack() as stack:
        made = {name: Prober(lab.machines[name]) for name in names or lab.machines}
        for prober in made.values():
            stack.callback(prober.close)
        yield made
