"""Chats become prompts of tokens. Long chats are truncated, with few renderings of the template."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import trio

from node.content.fenced_text import FencedText
from node.content.text_questions import TextFacts
from node.serving.questions import Question, make_door_wish
from tests.node.serving.scene import manifest

CONTEXT = 100


class CountingText:
    """A text model in which each message takes four tokens; it records each rendering."""

    facts = TextFacts((), 256, has_template=True)

    def __init__(self) -> None:
        self.renderings: list[list[Any]] = []

    async def render(self, messages: Sequence[Any]) -> list[int]:
        await trio.lowlevel.checkpoint()
        self.renderings.append(list(messages))
        return [1, 2, 3, 4] * len(messages)


@pytest.mark.parametrize("turns", [1, 2, 3, 11, 12, 13, 24, 25, 26, 500])
@pytest.mark.parametrize("system", [0, 1])
@pytest.mark.parametrize("is_even", [False, True])
def test_a_long_chat_is_truncated_to_fit_with_few_renderings(turns: int, system: int, is_even: bool) -> None:
    count = 2 * turns if is_even else 2 * turns - 1
    messages = [{"role": "system", "content": "short"}] * system
    messages += [{"role": ("user", "assistant")[n % 2], "content": str(n)} for n in range(count)]
    text = CountingText()
    question = Question(messages=tuple(messages))
    service = manifest(context=CONTEXT, vocabulary=256)
    made = trio.run(make_door_wish, service, question, cast(FencedText, text), bytes)
    expected = 0
    while 4 * (system + count - expected) >= CONTEXT and count - expected > 1:
        expected += 2 if count - expected > 2 else 1
    assert made.forgotten == expected
    assert len(made.wish.prompt) == 4 * (system + count - expected)
    assert len(text.renderings) <= 11
