"""Large requests for embeddings are limited first, and then tokenized outside the event loop."""

import threading
from contextlib import AsyncExitStack
from typing import Any, cast

import msgspec
import pytest

from node.executor import RealExecutor
from node.web.embeddings import ServiceVectors
from node.web.forms.asking import FormProblem
from node.web.forms.embeddings import EmbeddingsRequest
from tests.node.web.models_world import NAME, SaidServing, models
from tests.node.web.test_clients import ask, openai


async def test_long_inputs_are_tokenized_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    convert, threads = msgspec.convert, list[threading.Thread]()

    def noting(given: Any, *rest: Any, **options: Any) -> Any:
        if given == texts:
            threads.append(threading.current_thread())
        return convert(given, *rest, **options)

    texts = ["word " * 100] * 200
    async with models() as (page, _said, key):
        monkeypatch.setattr(page.page.models._seams, "executor", RealExecutor(1))
        monkeypatch.setattr(msgspec, "convert", noting)
        with pytest.raises(openai.BadRequestError, match="has no embeddings"):
            await ask(page, key, lambda c: c.embeddings.create(model=NAME, input=texts))
    assert threads
    assert threading.main_thread() not in threads


async def test_the_length_of_an_input_is_checked_before_tokenizing() -> None:
    said = SaidServing()
    said.service.manifest.vector = 8
    request = EmbeddingsRequest(model=NAME, input="")
    for tokens, reason in (((1 << 20,) * 5_000, "5,000 tokens"), ((1 << 20,), "does not have")):
        async with AsyncExitStack() as held:
            with pytest.raises(FormProblem, match=reason):
                await ServiceVectors(cast(Any, said)).embed(request, (tokens,), held)
