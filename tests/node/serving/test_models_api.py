"""The HTTP API of models over whole nodes in virtual time: stages soon forget abandoned answers."""

import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio

from node.runtime import Node
from node.web.answers import ServiceAnswers
from node.web.door import HttpRequest, Response, Streaming
from node.web.model_api import ModelApi
from tests.node.serving.scene import serving, until
from tests.partition.serve.world import CONTEXT, VOCABULARY
from tests.stack import simulate

FREE_SECONDS_MAX = 0.1
PROMPT = [number % VOCABULARY for number in range(CONTEXT - 40)]


async def ask(node: Node, body: dict[str, Any], seen: list[bytes] | None = None, key: str = "") -> str:
    """Handle one request like the HTTP server, with this API key or with a new one. The request's resources
    are released when the context ends.
    """
    api = ModelApi(node.seams, ServiceAnswers(node.serving))
    if not key:
        made: Any = await api.keys.handlers["keys.new"]({}, keep)
        key = made["key"]
    headers = {"x-api-key": key}
    async with AsyncExitStack() as held:
        request = HttpRequest("POST", "/v1/completions", {}, headers, json.dumps(body).encode(), "1", held)
        answer = await api.answer(request)

        async def send(data: bytes) -> None:
            await trio.lowlevel.checkpoint()
            if seen is not None:
                seen.append(data)

        if isinstance(answer, Streaming):
            await answer.write(send)
        else:
            assert isinstance(answer, Response)
            await send(answer.body)
    return key


async def keep(_event: object) -> None:
    return


@pytest.mark.parametrize(
    ("prompt", "is_streamed"), [([1, 2], True), ([1, 2], False), (PROMPT, True), (PROMPT, False)]
)
def test_every_stage_forgets_an_abandoned_answer(prompt: list[int], is_streamed: bool) -> None:
    async def main() -> None:
        async with serving("abc") as (group, _), trio.open_nursery() as nursery:
            door = group.nodes["c"]
            body = {"model": "tokens", "prompt": prompt, "max_tokens": 39, "stream": is_streamed}
            nursery.start_soon(ask, door, body)
            stages = [node.serving.provider for node in group.nodes.values()]
            await until(lambda: sum(stage.sessions for stage in stages) == 2)
            await trio.sleep(0.12)  # while the prompt is computed, if it is long
            began = trio.current_time()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await until(lambda: not any(stage.sessions for stage in stages))
                assert trio.current_time() - began <= FREE_SECONDS_MAX

    simulate(main)


def test_a_service_of_tokens_refuses_text() -> None:
    async def main() -> None:
        async with serving("ab") as (group, _):
            seen: list[bytes] = []
            for prompt in ("text", [1, VOCABULARY]):
                await ask(group.nodes["a"], {"model": "tokens", "prompt": prompt}, seen)
            messages = [json.loads(data)["error"]["message"] for data in seen]
            assert messages == [
                "tokens takes only tokens, no text",
                f"prompt: contains a token that tokens does not have; it has {VOCABULARY}",
            ]

    simulate(main)


def test_two_choices_for_a_long_prompt_share_its_prefill() -> None:
    async def main() -> None:
        async with serving("abc") as (group, _):
            seen: list[bytes] = []
            body = {"model": "tokens", "prompt": PROMPT, "max_tokens": 5, "n": 2, "temperature": 0}
            key = await ask(group.nodes["c"], body, seen)
            answer = json.loads(seen[0])
            assert len(answer["choices"]) == 2, answer
            assert answer["usage"]["completion_tokens"] == 10
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            await ask(group.nodes["c"], body, seen, key)
            await ask(group.nodes["c"], body, seen)
            again, stranger = (json.loads(data)["usage"] for data in seen[1:])
            assert again["prompt_tokens"] == stranger["prompt_tokens"] == len(PROMPT)
            assert again["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 1
            assert stranger["prompt_tokens_details"]["cached_tokens"] == 0

    simulate(main)
