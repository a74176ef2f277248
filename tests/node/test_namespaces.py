"""Two machines on one link, as network namespaces. They find each other by beacon, and reach each other over
IPv4 and IPv6, even after one has a new address."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.node.namespaces import Machine, two_machines

PROGRAM = "tests.node.namespaced"


@contextmanager
def program(machine: Machine, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with machine.start(PROGRAM, *arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def test_two_machines_meet_by_beacon_over_ipv4_and_ipv6() -> None:
    with two_machines() as (one, other), program(other, "b", "echo"), program(one, "a", "visit") as visitor:
        text, _ = visitor.communicate(timeout=45)
    answers = [json.loads(line) for line in text.splitlines()]
    # A stream and a datagram go to each address in the beacon, and the datagram is answered. The kernel also
    # gives each machine a link-local address; that address is listed only if the first beacon came from it.
    hosts = [answer["host"] for answer in answers]
    assert sorted(host for host in hosts if "%" not in host) == sorted([other.host_4, other.host_6])
    assert all(answer["back"] == [answer["host"]] for answer in answers)


@pytest.mark.parametrize("hosts", [(), ("fe80::2%cable",)])
def test_machines_with_link_local_addresses_meet_by_beacon(
    hosts: tuple[str, ...],
) -> None:
    with (
        two_machines(link_local=True) as (one, other),
        program(other, "b", "echo", *hosts),
        program(one, "a", "visit") as visitor,
    ):
        text, _ = visitor.communicate(timeout=45)
    # The address carries the zone of the interface that received the beacon, whatever name the other machine
    # has for its own.
    there = f"{other.host_6}%cable"
    assert [json.loads(line) for line in text.splitlines()] == [{"host": there, "back": [there]}]


def test_a_machine_that_changes_its_address_loses_no_datagrams() -> None:
    with two_machines() as (one, other), program(other, "b", "echo"), program(one, "a", "move") as mover:
        assert exchanged(mover) == {"back": 100, "hosts": [one.host_4, one.host_6]}
        move(one, "10.87.0.101")
        assert exchanged(mover) == {"back": 100, "hosts": ["10.87.0.101", one.host_6]}


def exchanged(mover: subprocess.Popen[str]) -> object:
    """Return how many of a hundred datagrams came back, and the addresses that the machine reports."""
    assert mover.stdin is not None
    assert mover.stdout is not None
    mover.stdin.write("go\n")
    mover.stdin.flush()
    answer: object = json.loads(mover.stdout.readline())
    return answer


def move(machine: Machine, host: str) -> None:
    machine.ip("address", "delete", f"{machine.host_4}/24", "dev", "cable")
    machine.ip("address", "add", f"{host}/24", "dev", "cable")
