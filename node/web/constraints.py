"""Answers that follow a rule. For each token, a sandboxed process decides which tokens may come next.

It is a different process from the one that makes texts, so a grammar that is too expensive ends only rules.
Other answers with rules in that process continue in a new process, which gets their tokens so far.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress

import numpy as np
import trio

from node.content.calls.rules import AnswerRule
from node.content.fenced_text import FencedText, TextLost, TokenMask
from node.errors import PeerloomError, UsageError
from node.protocols.services import Service
from node.serving.asking import Asking
from node.web.forms.asking import FormProblem
from partition.codecs.base import Array

PURPOSE = "rules"
BEGINNINGS_MAX = 3
"""Maximum number of processes tried for one token of an answer. Each costs a second, while the client
waits."""


class Constraint:
    """The rule of one answer. Call `aclose` in the end."""

    def __init__(
        self, asking: Asking, service: Service, rule: AnswerRule, number: int, field: str = ""
    ) -> None:
        self._asking = asking
        self._service = service
        self._rule = rule
        self._number = number
        self._field = field
        self._tokens: list[int] = []
        self._held = AsyncExitStack()
        self._fenced: FencedText | None = None

    async def begin(self) -> Array:
        """Return for each token whether it may come first. Raises FormProblem."""
        field = self._field
        try:
            return self._allowed(await self._begin())
        except UsageError as error:
            raise FormProblem(f"{field}: {error.what}", field=field, code="invalid_grammar") from None
        except TextLost as error:
            if not error.is_own:
                raise self._ended(error) from None
            reason = f"{field}: the grammar takes more resources than allowed: {error}"
            raise FormProblem(reason, field=field, code="invalid_grammar") from None
        except PeerloomError as error:
            raise FormProblem(str(error), kind="failed") from None

    async def advance(self, token: int) -> Array:
        """Return for each token whether it may come after this one; none may if the answer is over. Raises
        FormProblem."""
        self._tokens.append(token)
        assert self._fenced is not None
        try:
            try:
                return self._allowed(await self._fenced.advance_rule(self._number, token))
            except TextLost as error:
                if error.is_own:  # in a new process it would take the same
                    raise
                return self._allowed(await self._begin())
        except (PeerloomError, TextLost) as error:
            raise self._ended(error) from None

    def _ended(self, error: Exception) -> FormProblem:
        return FormProblem(f"{self._field}: {error}", kind="failed")

    async def _begin(self) -> TokenMask:
        """Begin in a running process, and again if a different answer's grammar ends that process first."""
        for tries in range(BEGINNINGS_MAX):
            try:
                return await self._begin_once()
            except TextLost as error:
                if error.is_own or tries == BEGINNINGS_MAX - 1:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _begin_once(self) -> TokenMask:
        await self._held.aclose()
        self._fenced = await self._held.enter_async_context(self._asking.reading(self._service, PURPOSE))
        stops = self._service.manifest.stops
        return await self._fenced.begin_rule(self._number, self._rule, self._tokens, stops)

    def _allowed(self, mask: TokenMask) -> Array:
        return allowed_of(mask, self._service.manifest.vocabulary)

    async def aclose(self) -> None:
        """Make the process forget this rule."""
        with trio.CancelScope(shield=True):
            if self._fenced is not None:
                with suppress(TextLost, UsageError):
                    await self._fenced.end_rule(self._number)
            await self._held.aclose()


def allowed_of(mask: TokenMask, vocabulary: int) -> Array:
    """Return a mask as one boolean for each token of a vocabulary."""
    found = np.zeros(vocabulary, np.bool_)
    if not mask.is_over:
        bits: Sequence[int] | Array = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
        count = min(len(bits), vocabulary)
        found[:count] = bits[:count]
    return found
