"""A trainer's frames and their receivers, as the committer opens them."""

import pytest
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from partition.plan.assignment import feeder_of
from partition.steps.feeder import Feeder, FeedReady, FramesDone
from partition.steps.messages import StageRoutes
from tests.partition.small_plan import FIRST, LAST, PLAN, SECOND, START, TRAINER, opening
from tests.partition.test_replica import NEXT

ALONE = replace(PLAN, trainers=(TRAINER,))


def feeder() -> Feeder:
    return Feeder(TRAINER, ALONE)


def opened(core: Feeder, **changes: object) -> list[object]:
    """Return the feeder's events for an Open."""
    message = replace(opening(**changes), plan=core.plan_hash)  # type: ignore[arg-type]  # as `opening` takes them
    assert core.receive(0.0, TRAINER, message) == []
    events: list[object] = [*core.events]
    core.events.clear()
    return events


def test_inputs_go_to_the_first_stage_and_labels_to_the_last() -> None:
    assert opened(feeder()) == [FeedReady(0, START, number, True, FIRST, LAST) for number in (0, 1)]


def test_replicas_that_counted_or_received_an_input_get_none() -> None:
    core = feeder()
    assert opened(core, counted=((0, 1), (), (1,))) == [FeedReady(0, START, 0, True, None, LAST)]
    assert opened(core, counted=((0, 1), (), (1,))) == []
    assert opened(core, attempt=1) == [
        FeedReady(0, START + 1, 0, True, FIRST, None),
        FeedReady(0, START + 1, 1, True, FIRST, LAST),
    ]


def test_a_broken_stream_repeats_only_the_frames_it_carried() -> None:
    core = feeder()
    opened(core)
    core.reconnected(LAST)
    assert core.events == [FeedReady(0, START, number, True, None, LAST) for number in (0, 1)]


def test_the_frames_of_a_step_are_done_when_the_next_opens() -> None:
    core = feeder()
    opened(core)
    assert opened(core, step=1) == [
        FramesDone(0),
        FeedReady(1, START, 2, True, FIRST, LAST),
        FeedReady(1, START, 3, True, FIRST, LAST),
    ]
    assert opened(core, step=0, attempt=5) == []  # late


def test_held_out_micro_batches_are_fed_once_each() -> None:
    core = feeder()
    opened(core)
    first = opened(core, middles=(0,) * 4, step=1, train=False, first=0)
    assert first[0] == FramesDone(0)
    assert [event.microbatch for event in first if isinstance(event, FeedReady)] == [0, 1, 2, 3]
    later = opened(core, middles=(0,) * 4, step=1, train=False, first=2, attempt=1)
    assert [event.microbatch for event in later if isinstance(event, FeedReady)] == [4, 5]


def test_every_micro_batch_is_fed_by_one_trainer() -> None:
    plan = replace(PLAN, microbatches=40)
    message = replace(opening(), stages=tuple(StageRoutes(bytes(40)) for _ in range(3)))
    fed: list[int] = []
    for me in (TRAINER, SECOND):
        core = Feeder(me, plan)
        core.receive(0.0, TRAINER, replace(message, plan=core.plan_hash))
        mine = [event.microbatch for event in core.events if isinstance(event, FeedReady)]
        assert all(feeder_of(plan, True, number) == me for number in mine)
        fed += mine
    assert sorted(fed) == list(range(40))


def test_an_open_of_a_different_plan_or_sender_feeds_nothing() -> None:
    core = Feeder(SECOND, PLAN)
    with pytest.raises(RemoteProtocolError, match="not the committer"):
        core.receive(0.0, SECOND, opening())
    core.receive(0.0, TRAINER, replace(opening(), plan=Feeder(TRAINER, NEXT).plan_hash))
    assert core.events == []
