"""Concurrent answers share one sandboxed process and do not disturb each other."""

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from node.content.calls.rules import AnswerRule
from node.content.fenced_text import TextLost, TokenMask
from node.web.answers import SPELLED_MAX, ServiceText
from node.web.constraints import BEGINNINGS_MAX, Constraint
from node.web.forms.asking import FormProblem


class SlowText:
    """A process that spells tokens as bytes once it is released."""

    def __init__(self) -> None:
        self.may = trio.Event()
        self.may.set()

    async def spell(self, tokens: Sequence[int]) -> list[bytes]:
        await self.may.wait()
        return [b"%d" % token for token in tokens]


async def test_concurrent_choices_keep_their_own_tokens() -> None:
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
        await text.spell([7_000])  # more rules than are cached, so all are forgotten
        slow.set()
    assert {token: told[token] for token in (1, 5_000)} == {1: b"1", 5_000: b"5000"}


class DyingProcesses:
    """Processes for rules, of which the first few end. `ends` says for each request whether it was to
    blame."""

    def __init__(self, *ends: bool | None) -> None:
        self.ends = list(ends)
        self.begun = 0

    @asynccontextmanager
    async def reading(self, service: Any, purpose: str) -> AsyncIterator[Any]:
        yield self

    def _asked(self) -> TokenMask:
        is_own = self.ends.pop(0) if self.ends else None
        if is_own is not None:
            raise TextLost("it has ended", is_own=is_own)
        return TokenMask(b"\x02", False)

    async def begin_rule(self, *question: Any) -> TokenMask:
        self.begun += 1
        return self._asked()

    async def advance_rule(self, *question: Any) -> TokenMask:
        return self._asked()

    async def end_rule(self, number: int) -> None:
        pass

    def constraint(self) -> aclosing[Constraint]:
        service: Any = SimpleNamespace(manifest=SimpleNamespace(stops=(), vocabulary=8))
        return aclosing(Constraint(cast(Any, self), service, AnswerRule("regex", "a"), 1, "rule"))


@pytest.mark.parametrize("others", range(BEGINNINGS_MAX))
async def test_a_grammar_that_kills_the_process_costs_no_other_answer(others: int) -> None:
    processes = DyingProcesses(*[False] * others, None, *[False] * (others + 1), None)
    async with processes.constraint() as constraint:
        assert (await constraint.begin()).tolist() == [False, True] + [False] * 6
        assert processes.begun == others + 1
        assert (await constraint.advance(1))[1]
        assert processes.begun == 2 * others + 2


@pytest.mark.parametrize("is_begun", [False, True])
async def test_a_grammar_that_kills_the_process_ends_its_own_answer(is_begun: bool) -> None:
    processes = DyingProcesses(*[None] * is_begun, True)
    async with processes.constraint() as constraint:
        if is_begun:
            await constraint.begin()
        with pytest.raises(FormProblem, match="it has ended"):
            await (constraint.advance(1) if is_begun else constraint.begin())
    assert processes.begun == 1


async def test_an_answer_fails_if_each_new_process_ends() -> None:
    processes = DyingProcesses(*[False] * 9)
    async with processes.constraint() as constraint:
        with pytest.raises(FormProblem, match="it has ended") as problem:
            await constraint.begin()
    assert (processes.begun, problem.value.kind) == (BEGINNINGS_MAX, "failed")
