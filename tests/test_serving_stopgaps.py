"""Two real nodes serve a model in two stages. One of them dies, returns, and leaves. Meanwhile the other
holds both stages, answers continue there, and every token is the same.
"""

import time
from pathlib import Path

import pytest

from tests.serving_swarm import Ground, Streams, until

TOKENS = 80
STREAMS = 4


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_answers_continue_on_the_remaining_node_of_two(tmp_path: Path, slots: int) -> None:
    ground = Ground(tmp_path, dict.fromkeys("ab", (slots, 1)))
    pauses: dict[str, float] = {}
    try:
        ground.start()
        ground.serve("words", "a")
        until(lambda: sorted(ground.holders("words")) == [["a"], ["b"]])
        first = ground.holders("words")
        streams = Streams(ground.door, ("words",), STREAMS, TOKENS)
        streams.begin()

        def pause_of(what: str, since: float) -> None:
            streams.flow()
            pauses[what] = max(streams.pauses(since))

        since = time.monotonic()
        ground.kill_node("b")
        pause_of("killed", since)
        assert ground.holders("words") == [["a"], ["a"]]

        since = time.monotonic()
        ground.restart("b")
        until(lambda: ground.holders("words") == first, what="the returned node takes no stage")
        pause_of("back", since)

        since = time.monotonic()
        ground.leave_node("b")
        pause_of("left", since)
        assert ground.holders("words") == [["a"], ["a"]]
        streams.stop()
        assert streams.moves >= 3 * STREAMS
        print(f"\n{slots} slots, longest pause:", pauses)  # noqa: T201 - what the soak is run for
    finally:
        ground.close()
