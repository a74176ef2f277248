"""Requests of coding agents, and similar requests with an error in them."""

import json
import random
from typing import Any

import pytest

from tests.node.web.agents import messages_request, responses_request
from tests.node.web.models_world import CONTEXT, NAME, models
from tests.node.web.test_structured import SCHEMA
from tests.node.web.test_tools import CHAT_TOOLS, callers
from tests.node.web.world import Served

CALL = 'I run it.\n<tool_call>\n{"name": "shell_0", "arguments": {"command": ["ls"]}}\n</tool_call>'
ROOM = 1 << 22
"""Number of tokens that the invented model accepts: such a request has some hundred thousand characters."""
JUNK: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e308,
    0.5,
    "",
    "x",
    "\ud83d\ude00",
    [],
    {},
    [[]],
    {"type": "x"},
    "none",
    [None],
]


async def send(page: Served, key: str, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    return await page.ask(path, method="POST", body=body, authorization=f"Bearer {key}")


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]


async def test_requests_of_coding_agents_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with models() as (page, said, key):
        callers(said, CALL)
        said.service.manifest.context = ROOM
        status, _, data = await send(page, key, "/v1/responses", json.dumps(responses_request()).encode())
        assert status == 200, data
        last = events(data)[-1]
        assert last["type"] == "response.completed"
        assert [item["type"] for item in last["response"]["output"]] == ["message", "function_call"]
        prompt = bytes(said.wishes[-1].prompt).decode()
        roles = [line.partition(":")[0] for line in prompt.split("\n")]
        assert [role for role in roles if role in ("system", "user", "assistant", "tool")] == [
            "system", "system", "user", "user", "assistant", "tool", "assistant", "tool", "assistant", "user",
        ]  # fmt: skip
        assert "*** Begin Patch" in prompt
        assert "'reasoning_effort': 'medium'" in prompt

        status, _, data = await send(
            page, key, "/v1/messages?beta=true", json.dumps(messages_request()).encode()
        )
        assert status == 200, data
        told = events(data)
        assert [
            event["content_block"]["type"] for event in told if event["type"] == "content_block_start"
        ] == [
            "text",
            "tool_use",
        ]
        assert (
            next(event for event in told if event["type"] == "message_delta")["delta"]["stop_reason"]
            == "tool_use"
        )
        prompt = bytes(said.wishes[-1].prompt).decode()
        assert "Which test?" in prompt
        assert "'enable_thinking': True" in prompt
        counted = messages_request()
        del counted["max_tokens"]
        status, _, data = await send(
            page, key, "/v1/messages/count_tokens?beta=true", json.dumps(counted).encode()
        )
        assert (status, json.loads(data)) == (200, {"input_tokens": len(prompt.encode())})
        assert said.service.manifest.context != CONTEXT


def small(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request with only a few of its tools, because an error in many tools is also an error in
    few."""
    return {**body, "tools": body["tools"][:2] + body["tools"][-2:]}


def bases() -> list[tuple[str, dict[str, Any]]]:
    """Valid requests in each form."""
    turns = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ]
    chat = {
        "model": NAME, "messages": turns, "tools": CHAT_TOOLS, "tool_choice": "auto", "max_tokens": 9, "n": 2,
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "stop": ["x"],
        "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1.5}, "frequency_penalty": 0.5,
        "presence_penalty": 0.1, "repetition_penalty": 1.1, "stream_options": {"include_usage": True},
        "parallel_tool_calls": True, "chat_template_kwargs": {"a": [1]}, "reasoning_effort": "low",
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return [
        ("/v1/responses", small(responses_request())),
        ("/v1/messages", small(messages_request())),
        ("/v1/messages/count_tokens", small(messages_request())),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "response_format": form, "n": 1}),
        (
            "/v1/completions",
            {"model": NAME, "prompt": ["hi", "ho"], "max_tokens": 5, "logprobs": 1, "stream": True},
        ),
        ("/v1/completions", {"model": NAME, "prompt": [1, 2], "structured_outputs": {"choice": ["a", "b"]}}),
    ]


def places(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Yield the path to every value in a document."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(*here, key) for key in keys] + [way for key in keys for way in places(value[key], (*here, key))]


def mutated(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Return a request with one invalid value."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice(places(body) or [("model",)])
        inner: Any = body
        for key in way:
            inner = inner[key]
        match rng.randint(0, 5):
            case 0:
                del inner[last]
            case 1:
                inner[last] = [inner[last]] * rng.randint(1, 4)
            case 2:
                inner[last] = {"type": inner[last]}
            case 3:
                inner[last] = [json.loads("[" * 40 + "]" * 40)]
            case _:
                inner[last] = rng.choice(JUNK)
    data = json.dumps(body).encode()
    if rng.random() < 0.15:
        at = rng.randrange(len(data))
        data = (
            data[:at] + rng.choice([b"", b"\xff", b"\0", b'"', b"}", b"NaN"]) + data[at + rng.randint(0, 3) :]
        )
    return data


@pytest.mark.parametrize("count", [70, pytest.param(1_000, marks=pytest.mark.slow)])
async def test_requests_with_an_error_get_a_clear_error_message(count: int) -> None:
    rng = random.Random(count)
    refused = 0
    async with models() as (page, said, key):
        callers(said, CALL[:40])
        said.service.manifest.context = ROOM
        for number in range(count):
            path, body = bases()[number % len(bases())]
            data = mutated(rng, body)
            status, headers, answer = await send(page, key, path, data)
            assert headers["x-request-id"]
            if status != 200:
                refused += 1
                assert status in (400, 404), (path, data, answer)
                document = json.loads(answer)
                assert document["error"]["message"], (path, data)
                assert "Traceback" not in document["error"]["message"]
                if path.startswith("/v1/messages"):
                    assert document["type"] == "error"
                else:
                    assert document["error"].keys() == {"message", "type", "param", "code"}
        assert said.going == 0
        path, body = bases()[5]
        assert (await send(page, key, path, json.dumps(body).encode()))[0] == 200
    assert count / 4 < refused < count
