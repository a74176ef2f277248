"""What several answers ask of one fenced process: none gets in another's way."""

from collections.abc import Sequence
from typing import Any, cast

import trio
import trio.testing

from node.web.answers import SPELLED_MAX, ServiceText


class SlowText:
    """Spells tokens as bytes, once it may."""

    def __init__(self) -> None:
        self.may = trio.Event()
        self.may.set()

    async def spell(self, tokens: Sequence[int]) -> list[bytes]:
        await self.may.wait()
        return [b"%d" % token for token in tokens]


async def test_choices_that_spell_at_once_keep_their_tokens() -> None:
    fenced = SlowText()
    text = ServiceText(cast(Any, fenced))
    await text.spell(range(SPELLED_MAX))
    fenced.may = slow = trio.Event()
    told: dict[int, bytes] = {}

    async def choose() -> None:
        told.update(await text.spell([1, 5_000]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(choose)
        await trio.testing.wait_all_tasks_blocked()
        fenced.may = trio.Event()
        fenced.may.set()
        await text.spell([6_000])
        await text.spell([7_000])  # more than are kept by now: all are forgotten
        slow.set()
    assert {token: told[token] for token in (1, 5_000)} == {1: b"1", 5_000: b"5000"}
