"""Two machines on one link, as namespaces: found by beacon, reached by both families."""

import json
from contextlib import suppress
from subprocess import TimeoutExpired

from tests.node.namespaces import two_machines


def test_two_machines_find_each_other_by_beacon_and_speak_by_both_families() -> None:
    with two_machines() as (one, other):
        host = other.start("tests.node.namespaced", "b")
        try:
            visitor = one.start("tests.node.namespaced", "a", "visit")
            try:
                text, _ = visitor.communicate(timeout=45)
            finally:
                visitor.kill()
        finally:
            host.kill()
            with suppress(TimeoutExpired):
                host.communicate(timeout=10)
        answers = [json.loads(line) for line in text.splitlines()]
        # By each address that the beacon told, a stream and a datagram, and the datagram's answer.
        assert sorted(answer["host"] for answer in answers) == sorted([other.host_4, other.host_6])
        assert all(answer["back"] == [answer["host"]] for answer in answers)
