"""The calendar of events keeps the order of a heap, whenever entries are added."""

from heapq import heappop, heappush

from hypothesis import given
from hypothesis import strategies as st

from crypto.identity import PeerId
from sim.event_queue import SLOTS_PER_SECOND, Calendar, Entry

NOBODY = PeerId(b"")
TIMES = st.one_of(
    st.floats(0, 3),
    st.integers(0, 20).map(lambda slot: slot / SLOTS_PER_SECOND),  # the border between two slots
    st.floats(0, 1e6),
)


@given(st.lists(st.one_of(TIMES.map(lambda after: ("add", after)), TIMES.map(lambda until: ("run", until)))))
def test_entries_are_taken_in_the_same_order_as_from_a_heap(moves: list[tuple[str, float]]) -> None:
    calendar, heap, now = Calendar(), list[Entry](), 0.0
    for number, (move, seconds) in enumerate(moves):
        if move == "add":
            # Some entries have equal times, so the rest of the entry decides their order; the later ones come
            # first here.
            entry = (now + seconds, 0, 0, NOBODY, -number, None)
            calendar.add(entry)
            heappush(heap, entry)
            continue
        until = now + seconds
        while (taken := calendar.take(until)) is not None:
            assert taken == heappop(heap)
            now = taken[0]
        assert not heap or heap[0][0] > until
        now = until
        assert sorted(calendar) == sorted(heap)


def test_additions_to_the_current_instant_keep_their_order() -> None:
    calendar = Calendar()
    first, second, third = ((0.5, place, 0, NOBODY, 0, None) for place in (1, 2, 3))
    calendar.add(third)
    calendar.add(first)
    assert calendar.take(1.0) == first
    calendar.add(second)
    assert [calendar.take(1.0) for _ in range(3)] == [second, third, None]


def test_entries_taken_from_the_queue_free_their_memory() -> None:
    calendar = Calendar()
    for number in range(1_000):
        calendar.add((number / 300, 0, 0, NOBODY, number, None))
    while calendar.take(10.0) is not None:
        pass
    assert list(calendar) == []
    assert not calendar._slots
    assert not calendar._numbers
