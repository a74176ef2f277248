"""A node under attack by a hostile client survives, stays small, and serves honest peers, each in its own
process.

`benchmarks/hostile.py` measures the cost.
"""

from collections.abc import Iterator

import pytest

from tests.hostile.client import BY_CONNECTIONS, BY_PACKETS, rates_of
from tests.hostile.scene import Scene, scene

GROWTH_BYTES_MAX = 50 * 2**20
PART = 0.2
"""The share of the attacks' rates that a busy machine can sustain."""
ATTACK_SECONDS = 4.0
"""Longer than an unknown peer may take for a handshake."""
REFUSED = {
    "datagrams_refused_malformed",
    "datagrams_refused_index",
    "datagrams_refused_swarm",
    "datagrams_refused_replay",
    "datagrams_refused_seal",
    "beacons_refused_size",
    "beacons_of_others",
    "handshakes_refused",
    "handshakes_broken",
    "hellos_refused",
    "streams_refused_protocol",
    "streams_broken",
}
"""Counters that some attacks must raise, which shows that each attack reaches its target."""


@pytest.fixture(scope="module")
def played() -> Iterator[Scene]:
    with scene() as made:
        yield made


def test_a_node_under_every_attack_answers_an_honest_peer(played: Scene) -> None:
    before_bytes = played.figures()["rss_bytes"]
    attacks = (*BY_PACKETS, *BY_CONNECTIONS)
    outcome = played.run(rates_of(attacks, PART), seconds=ATTACK_SECONDS)
    assert outcome.unanswered == {}
    assert [attack.__name__ for attack in attacks if not outcome.strikes[attack.__name__]] == []
    assert all(tally["asked"] for tally in outcome.tallies.values())
    assert outcome.highest_bytes - before_bytes <= GROWTH_BYTES_MAX
    assert {name for name in REFUSED if not outcome.refused.get(name)} == set()
    # After the attacks, both earlier honest peers and new ones are served.
    assert played.run({}, seconds=0.5).unanswered == {}
