"""Limited slots for connections that are not yet authenticated: admission and eviction."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from crypto.token_buckets import prefix_of
from node.transport.half_open import HalfOpenQueue

HOSTS = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "::ffff:10.0.0.1", "fe80::1%eth0"]


@given(st.lists(st.tuples(st.sampled_from(HOSTS), st.integers(0, 5))))
def test_the_source_with_most_slots_loses_its_oldest_connection(steps: list[tuple[str, int]]) -> None:
    doorway = HalfOpenQueue[int](places_max=4)
    standing: list[tuple[int, bytes]] = []
    for number, (host, leaving) in enumerate(steps):
        source = prefix_of(host)
        crowds = Counter(source for _, source in standing)
        gone = doorway.enter(number, source)
        assert (gone is not None) == (len(standing) == 4)
        if gone is not None:
            entry = next(entry for entry in standing if entry[0] == gone)
            assert crowds[entry[1]] == max(crowds.values())
            assert entry == next(other for other in standing if other[1] == entry[1])
            standing.remove(entry)
            # the evicted connection learns of it later and releases its slot a second time
            doorway.leave(*entry)
        standing.append((number, source))
        if leaving < len(standing):
            doorway.leave(*standing.pop(leaving))
        assert len(doorway) == len(standing) <= 4


def test_addresses_of_one_home_network_count_as_one_source() -> None:
    sources = [prefix_of(host) for host in HOSTS]
    assert [sources.index(source) for source in sources] == [0, 1, 2, 2, 0, 5]
