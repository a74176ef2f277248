"""The samples on which each member trains."""

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from node.local.shard import Shard

RUN = bytes(32)


def peers(count: int) -> list[PeerId]:
    return [PeerId(bytes([number + 1]) * 32) for number in range(count)]


@given(count=st.integers(1, 9), samples=st.integers(20, 3_000), seed=st.integers(0, 99))
def test_members_with_the_same_view_divide_the_data(count: int, samples: int, seed: int) -> None:
    shards = [Shard(RUN, seed, samples, each) for each in peers(count)]
    for shard in shards:
        shard.set_members(peers(count))
    if samples >= 200:  # with few samples a member may own none; it then draws from all
        rows = sorted(row for shard in shards for row in shard.rows)
        assert rows == list(range(samples))


def test_a_death_moves_only_the_samples_of_the_dead_member() -> None:
    members = peers(5)
    shards = {each: Shard(RUN, 1, 5_000, each) for each in members}
    for shard in shards.values():
        shard.set_members(members)
    before = {each: set(shard.rows) for each, shard in shards.items()}
    sizes = [len(rows) for rows in before.values()]
    assert max(sizes) < 1.5 * min(sizes)
    dead = members.pop()
    for each in members:
        shards[each].set_members(members)
        assert before[each] <= set(shards[each].rows)
    assert set().union(*(shards[each].rows for each in members)) >= before[dead]


def test_a_pass_draws_every_sample_of_the_shard_once() -> None:
    shard = Shard(RUN, 1, 100, peers(1)[0])
    assert sorted(shard.take(100)) == list(range(100))
    assert shard.take(100) != shard.take(100)
