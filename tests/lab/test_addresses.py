"""Machines with many interfaces: whichever machine dies, all live nodes find each other.

Each plan has these parts. All nodes join through the first. All are killed and come back. The first is
killed. A different one is killed and comes back. Nobody sends beacons, and after the first start no node is
given an address.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.lab.network import DOCKER, FULL, LAPTOP, STORAGE, Host, laboratory
from tests.lab.nodes import PORT, LabNode, LabSwarm, swarm

FOUND_SECONDS_MAX = 15.0
"""Seconds from the last start until all agree again."""
DEATH_SECONDS_MAX = 40.0
"""Seconds of SWIM's longest suspicion in a swarm of this size, plus a margin for a busy machine."""
STEADY_SECONDS = 4.0


@dataclass(frozen=True)
class Plan:
    """The machines of a laboratory; `has_router` is whether a router joins their segments."""

    hosts: tuple[Host, ...]
    mtu: int = 1_500
    has_router: bool = False


SAMPLE = Plan(
    (
        Host("a", "eth0", extras=DOCKER),
        Host("b", "wlan0", extras=LAPTOP),
        Host("c", "zz0", extras=DOCKER),
        Host("d", "aa9", extras=STORAGE, families=(4, 6)),
        Host("e", "eth0", extras=DOCKER, families=(4, 6)),
        Host("f", "enp3s0"),
    )
)
PLANS = {
    "docker on all of three": Plan(tuple(Host(name, "eth0", extras=DOCKER) for name in "abc")),
    "laptops on Wi-Fi": Plan(tuple(Host(name, "wlan0", extras=LAPTOP) for name in "abc")),
    "every order of names": Plan(
        tuple(
            Host(name, interface, extras=(*DOCKER[:2], *STORAGE[:2]))
            for name, interface in (("a", "aa00"), ("b", "brz"), ("c", "eth0"), ("d", "zz0"))
        )
    ),
    "more networks than a contact holds": Plan(
        tuple(Host(name, "zz0", extras=(*STORAGE, *DOCKER, *LAPTOP[1:])) for name in "abc")
    ),
    "IPv6 alone": Plan(tuple(Host(name, "eth0", families=(6,)) for name in "abc")),
    "both families": Plan(tuple(Host(name, "eth0", extras=DOCKER, families=(4, 6)) for name in "abc")),
    "two subnets and a router": Plan(
        (
            *(Host(name, "eth0", 0, extras=DOCKER) for name in "ab"),
            *(Host(name, "eth0", 1, extras=DOCKER) for name in "cd"),
        ),
        has_router=True,
    ),
    "three subnets of both families": Plan(
        tuple(Host(name, "eth0", segment, families=(4, 6)) for segment, name in enumerate("abc")),
        has_router=True,
    ),
    "an MTU of 700": Plan(tuple(Host(name, "eth0", extras=DOCKER) for name in "abc"), mtu=700),
}


@pytest.mark.slow
def test_live_nodes_find_each_other_on_six_different_kinds_of_machines(tmp_path: Path) -> None:
    play(SAMPLE, tmp_path)


def test_a_machine_without_usable_addresses_prints_the_reason(tmp_path: Path) -> None:
    with laboratory([Host("a", "eth0", extras=DOCKER)]) as lab, swarm(lab, tmp_path) as nodes:
        lab.machines["a"].run("ip link set eth0 down")
        nodes.start(["a"])
        assert "On another machine:  none: this machine is on no network" in nodes["a"].said
        nodes.kill()
        lab.machines["a"].run("ip link set eth0 up")
        nodes.start(["a"], LISTEN=f"127.0.0.1:{PORT}")
        assert "On another machine:  none: this node listens only on this machine" in nodes["a"].said


def test_machines_with_only_ipv6_find_each_other(tmp_path: Path) -> None:
    hosts = [Host(name, "eth0", extras=DOCKER[:1], families=(6,)) for name in "ab"]
    with laboratory(hosts) as lab, swarm(lab, tmp_path) as nodes:
        join(nodes)
        assert f"--join {typed(nodes['a'])}\n" in nodes["a"].said


@pytest.mark.parametrize("name", list(PLANS))
@pytest.mark.skipif(not FULL, reason="PEERLOOM_LAB=full plays every plan")
def test_live_nodes_find_each_other_in_every_network(name: str, tmp_path: Path) -> None:
    print(name, {what: round(seconds, 1) for what, seconds in play(PLANS[name], tmp_path).items()})  # noqa: T201


@pytest.mark.skipif(not FULL, reason="PEERLOOM_LAB=full plays every plan")
def test_a_changed_address_is_found_after_the_first_node_died(tmp_path: Path) -> None:
    plan = Plan(tuple(Host(name, "eth0", extras=DOCKER) for name in "abc"))
    with laboratory(plan.hosts) as lab, swarm(lab, tmp_path) as nodes:
        join(nodes)
        lab.machines["b"].run(
            "ip address delete 10.77.0.2/24 dev eth0; ip address add 10.77.0.102/24 dev eth0"
        )
        nodes.stay(STEADY_SECONDS)
        nodes["a"].kill()
        nodes.converge(DEATH_SECONDS_MAX)
        nodes["c"].kill()
        nodes.start(["c"])
        nodes.converge(FOUND_SECONDS_MAX)
        # After this restart nobody has seen the others start, so only saved addresses can lead to them.
        nodes.kill()
        nodes.start(["b", "c"])
        nodes.converge(FOUND_SECONDS_MAX)


def play(plan: Plan, folder: Path) -> dict[str, float]:
    """Return how many seconds it took to agree after each step."""
    with laboratory(plan.hosts, mtu=plan.mtu, has_router=plan.has_router) as lab, swarm(lab, folder) as nodes:
        names = list(nodes.nodes)
        took = {"joined": join(nodes)}
        for node in nodes.nodes.values():
            assert f"--join {typed(node)}\n" in node.said
        # All lose power as soon as they have found each other.
        nodes.kill()
        nodes.start(names)
        took["all back"] = nodes.converge(FOUND_SECONDS_MAX)
        nodes[names[0]].kill()
        took["the first dead"] = nodes.converge(DEATH_SECONDS_MAX)
        nodes.stay(STEADY_SECONDS)
        nodes[names[-1]].kill()
        nodes.start(names[-1:])
        took["one back"] = nodes.converge(FOUND_SECONDS_MAX)
        # Every machine has 172.17.0.1 itself. So to a node that address is its own machine, or a different
        # node.
        assert all("wrong key" not in node.said for node in nodes.nodes.values())
        return took


def join(nodes: LabSwarm) -> float:
    """Join all nodes through the first; return how long they took to agree."""
    first, *others = nodes.nodes
    nodes.start([first])
    nodes.start(others, JOIN=typed(nodes[first]))
    return nodes.converge(FOUND_SECONDS_MAX)


def typed(node: LabNode) -> str:
    """Return the address that a person types to join through a node: the node's first address on the
    switch."""
    here = next(iter(node.machine.hosts.values()))
    return f"[{here}]:{PORT}" if ":" in here else f"{here}:{PORT}"
