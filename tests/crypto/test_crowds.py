"""Eviction from a bounded table: it evicts members of the greediest source, and never those of others."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from crypto.crowds import Crowd, Groups, network_of
from crypto.token_buckets import prefix_of


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, b"a", b"b", b"c"]))))
def test_the_largest_group_stays_right_after_any_changes(steps: list[tuple[int, bytes | None]]) -> None:
    groups = Groups[int]()
    model: dict[int, bytes] = {}
    for member, group in steps:
        model.pop(member, None)
        if group is None:
            groups.remove(member)
        else:
            groups.add(member, group)
            model[member] = group
        sizes = Counter(model.values())
        assert len(groups) == len(model)
        assert groups.size_of_largest == max(sizes.values(), default=0)
        assert list(groups.members()) == list(model)
        largest = list(groups.largest())
        assert len(largest) == groups.size_of_largest
        assert largest == [each for each in model if largest and model[each] == model[largest[0]]]
        assert all(groups.size(group) == sizes[group] for group in (b"a", b"b", b"c"))


def test_networks_are_the_prefixes_that_providers_assign() -> None:
    assert network_of(prefix_of("10.1.2.3")) == network_of(prefix_of("10.1.2.200"))
    assert network_of(prefix_of("10.1.2.3")) != network_of(prefix_of("10.1.3.3"))
    assert network_of(prefix_of("2001:db8:1:1::")) == network_of(prefix_of("2001:db8:1:2::"))
    assert network_of(prefix_of("2001:db8:1::")) != network_of(prefix_of("2001:db8:2::"))
    assert network_of(b"") == b""


def crowd(*hosts: str) -> Crowd[int]:
    made = Crowd[int]()
    for number, host in enumerate(hosts):
        made.add(number, prefix_of(host))
    return made


def test_a_greedy_address_is_evicted_before_a_large_network() -> None:
    local = [f"10.0.0.{host}" for host in range(1, 50)]
    made = crowd(*local, *["203.0.113.7"] * 5)
    assert list(made.greedier(prefix_of("192.0.2.1"))) == [49, 50, 51, 52, 53]
    # A newcomer from the greedy address must evict another member from that address.
    assert list(made.greedier(prefix_of("203.0.113.7"))) == []
    assert list(made.equals(prefix_of("203.0.113.7"))) == [49, 50, 51, 52, 53]


def test_the_greedier_network_makes_room_among_equal_addresses() -> None:
    made = crowd("203.0.113.1", "203.0.113.2", "203.0.113.3", "192.0.2.1", "198.51.100.1")
    assert list(made.greedier(prefix_of("10.0.0.1"))) == [0, 1, 2]
    assert list(made.greedier(prefix_of("203.0.113.4"))) == []
    assert list(made.equals(prefix_of("203.0.113.4"))) == [0, 1, 2]


def test_without_a_greedy_source_every_member_may_be_evicted() -> None:
    made = crowd("203.0.113.1", "192.0.2.1")
    assert list(made.greedier(prefix_of("10.0.0.1"))) == []
    assert list(made.equals(prefix_of("10.0.0.1"))) == [0, 1]
