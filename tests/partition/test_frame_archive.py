"""The frames of committed steps are kept within limits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.facts import Fact
from partition.codecs.codec import Payload
from partition.steps.frame_archive import KEPT_SECONDS, STEPS_KEPT, FrameArchive, FrameKey
from partition.steps.frames import FrameHeader

RUN, AUTHOR = bytes(32), b"a" * 32


def note(archive: FrameArchive, step: int, microbatch: int = 0, now: float = 0.0, size: int = 10) -> FrameKey:
    header = FrameHeader(bytes(32), step, 0, microbatch, 1, "input", True, (), (), "raw", bytes(32))
    payload = Payload((), (), "raw", bytes(32), memoryview(bytes(size)))
    archive.note(now, RUN, header, Fact(AUTHOR, b"", b""), payload)
    return FrameKey(RUN, step, 1, "input", microbatch, AUTHOR)


def test_frames_are_available_once_their_step_is_committed() -> None:
    archive = FrameArchive()
    key = note(archive, 3)
    assert archive.get(key) is None
    archive.committed(0.0, RUN, 3)
    assert archive.get(key) is not None
    assert list(archive.of_step(RUN, 3)) == [key]
    archive.expire(KEPT_SECONDS)
    assert archive.get(key) is None
    assert (len(archive), archive.held_bytes) == (0, 0)


def test_the_step_after_a_checkpoint_is_kept_longer_than_newer_steps() -> None:
    archive = FrameArchive()
    archive.marked(RUN, 2)
    keys = []
    for step in range(3 * STEPS_KEPT):
        keys.append(note(archive, step))
        archive.committed(0.0, RUN, step)
    kept = [key.step for key in keys if archive.get(key) is not None]
    assert kept == [2, *range(2 * STEPS_KEPT, 3 * STEPS_KEPT)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 60)), max_size=60))
@settings(max_examples=100, deadline=None)
def test_archived_frames_and_bytes_stay_within_their_bounds(rows: list[tuple[int, int, int]]) -> None:
    archive = FrameArchive(facts_max=12, bytes_max=100)
    for now, (step, microbatch, size) in enumerate(rows):
        note(archive, step, microbatch, float(now), size)
        if microbatch == 0:
            archive.committed(float(now), RUN, step)
        if microbatch == 1:
            archive.marked(RUN, step)
        assert len(archive) <= 12
        assert archive.held_bytes <= 100
        assert archive.held_bytes == sum(
            len(frame.payload.data) for frame in archive._frames.values() if frame.payload is not None
        )
