"""Serving with real processes: two services of two stages on three nodes. Stages and a node are killed one
after another during eight answers.

`tests.test_serving_kills` plays more kills, and nodes with replicas.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from node.cli.client import ask, request
from tests.serving_swarm import PROMPT, SECONDS_MAX, Ground, Streams, until

TOKENS = 40
STREAMS = 8
NODES = dict.fromkeys("abc", (2, 1))
"""Slots and cores of each node."""
SERVICES = {"words": "a", "pairs": "b"}


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """Yield three nodes that know each other, and two services."""
    found = Ground(tmp_path_factory.mktemp("serving"), NODES)
    try:
        found.start()
        for service, at in SERVICES.items():
            found.serve(service, at)
        yield found
    finally:
        found.close()


def question(**more: Any) -> dict[str, Any]:
    return {"prompt": list(PROMPT.encode()), "tokens_max": TOKENS, "seed": 7, **more}


def answer(
    folder: Path, *, at: int = -1, disturb: Callable[[], object] = bool, **more: Any
) -> tuple[list[int], dict[str, Any]]:
    """Return the tokens of an answer, and its outcome; `disturb` is called after `at` of them."""
    tokens: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if "piece" in event:
            tokens.append(event["piece"])
            if len(tokens) == at:
                disturb()

    asked = {"service": "words", "question": question(**more)}
    found = ask(folder, "generate", asked, on_event, seconds=SECONDS_MAX)
    return tokens, found


def test_an_abandoned_answer_is_forgotten_and_none_is_stored(ground: Ground) -> None:
    said, went = answer(ground.door, temperature=1.0)
    assert len(said) == TOKENS
    assert went["moves"] == 0
    # A client that disconnects frees its session in every stage.
    asked = {"service": "words", "question": question()}
    replies = request(ground.door, "generate", asked, seconds=SECONDS_MAX)
    for _ in range(3):
        next(replies)
    replies.close()  # type: ignore[attr-defined]  # a generator
    until(lambda: not any(row["sessions"] for rows in ground.stages("words") for row in rows))
    # A text is parsed as one message.
    pieces, _ = answer(ground.door, prompt=PROMPT, stops=["\ufffd"])
    assert all(isinstance(piece, str) for piece in pieces)
    # No node has a file that contains the questions or answers.
    for path in ground.folder.rglob("*"):
        if path.is_file() and path.suffix != ".peerloom":
            data = path.read_bytes()
            assert PROMPT.encode() not in data
            assert bytes(said)[:12] not in data


def test_eight_answers_survive_the_kill_of_stages_and_of_a_node(ground: Ground) -> None:
    """Greedy and seeded: every token is the same, and no client sees an error."""
    streams = Streams(ground.door, tuple(SERVICES), STREAMS, TOKENS)
    streams.begin()
    kills: tuple[Callable[[], None], ...] = (
        lambda: ground.kill_stage("a"),
        lambda: ground.kill_node("b"),
        lambda: ground.kill_stage("c"),
    )
    for kill in kills:
        kill()
        streams.flow()
    streams.stop()
    assert streams.moves >= STREAMS // 2
