"""Structured output through the official clients, by a real sandboxed process and a model of bytes that
writes anything that a rule allows.
"""

import json
from typing import Any

import jsonschema
import msgspec
import pytest

from node.content.fenced_text import FencedText, TokenMask
from tests.node.web.models_world import NAME, models
from tests.node.web.test_clients import anthropic, ask, message, openai
from tests.node.web.test_tools import CHAT_TOOLS, MESSAGE_TOOLS, RESPONSE_TOOLS, callers, creating
from tests.node.web.world import Served

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "more": {"type": "array", "items": {"$ref": "#/$defs/word"}, "maxItems": 2},
    },
    "required": ["kind", "count", "more"],
    "additionalProperties": False,
    "$defs": {"word": {"type": "string", "pattern": "^[a-z]{1,3}$"}},
}
USER: list[Any] = [{"role": "user", "content": "hi"}]


def judged(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


async def refuse(page: Served, key: str) -> None:
    """Ask for rules that cannot be followed."""
    for schema, reason in (
        ({"$ref": "http://127.0.0.1:9/x"}, "not present"),
        ({"not": {}}, "Unimplemented"),
        ({"type": "string", "pattern": "("}, "regex|pattern"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            await ask(
                page, key, creating("chat.completions", model=NAME, messages=USER, response_format=form)
            )
        assert refused.value.param == "response_format"
    deep: Any = {}
    for _ in range(90):
        deep = {"items": deep}
    config = {"format": {"type": "json_schema", "schema": deep}}
    with pytest.raises(anthropic.BadRequestError, match="levels"):
        await message(
            page,
            key,
            lambda c: c.messages.create(model=NAME, messages=USER, max_tokens=9, output_config=config),
        )
    for body in ({"regex": "a", "choice": ["b"]}, {}):
        with pytest.raises(openai.BadRequestError, match="give exactly one of"):
            await ask(
                page,
                key,
                creating("completions", model=NAME, prompt="a", extra_body={"structured_outputs": body}),
            )


async def test_every_form_either_constrains_answers_or_refuses_the_rule() -> None:
    async with models() as (page, said, key):
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
        chat: dict[str, Any] = {"model": NAME, "messages": USER, "response_format": form, "n": 2}
        whole = await ask(page, key, lambda c: c.chat.completions.create(**chat, seed=5))
        for choice in whole.choices:
            judged(choice.message.content)
            assert choice.finish_reason == "stop"
        chunks = await ask(page, key, lambda c: list(c.chat.completions.create(**chat, stream=True)))
        for number in range(2):
            told = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == number]
            judged("".join(choice.delta.content or "" for choice in told))

        text = {"format": {"type": "json_schema", "name": "thing", "schema": SCHEMA}}
        response = await ask(page, key, lambda c: c.responses.create(model=NAME, input="hi", text=text))
        judged(response.output_text)
        assert response.text.format.schema_ == SCHEMA
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        asked: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 999}
        answer = await message(page, key, lambda c: c.messages.create(**asked, output_config=config))
        judged(answer.content[0].text)

        outputs: list[tuple[dict[str, Any], Any]] = [
            ({"json": SCHEMA}, judged),
            ({"regex": "[ab]{2}-[0-9]"}, lambda text: text[2] == "-" or pytest.fail(text)),
            ({"choice": ["yes", "no"]}, ["yes", "no"].index),
            (
                {"grammar": 'start: "<" /[a-z]{1,3}/ ">"'},
                lambda text: text.strip("<>").isalpha() or pytest.fail(text),
            ),
            ({"json_object": True}, json.loads),
        ]
        for given, judge in outputs:
            body = {"structured_outputs": given}
            made = await ask(
                page, key, creating("completions", model=NAME, prompt="hi", max_tokens=999, extra_body=body)
            )
            judge(made.choices[0].text)
        await refuse(page, key)
        assert said.going == 0


async def test_a_model_that_must_call_a_tool_calls_it() -> None:
    async with models() as (page, said, key):
        callers(said)
        said.facts = msgspec.structs.replace(said.facts, reasoning=-1)
        single = {"parallel_tool_calls": False}
        chat: dict[str, Any] = {"model": NAME, "messages": USER, "tools": CHAT_TOOLS, **single}
        named = {"type": "function", "function": {"name": "look"}}
        for choice in ("required", named):
            whole = await ask(page, key, creating("chat.completions", **chat, tool_choice=choice))
            calls = whole.choices[0].message.tool_calls
            assert {call.function.name for call in calls} == {"look"}
            assert isinstance(json.loads(calls[0].function.arguments), dict)
            assert whole.choices[0].finish_reason == "tool_calls"
        fields: dict[str, Any] = {
            "model": NAME,
            "input": "hi",
            "tools": RESPONSE_TOOLS,
            "tool_choice": "required",
            **single,
        }
        events = await ask(page, key, lambda c: list(c.responses.create(**fields, stream=True)))
        kinds = {item.type for item in events[-1].response.output}
        assert "function_call" in kinds
        assert "message" not in kinds
        body: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 900, "tools": MESSAGE_TOOLS}
        forced = {"type": "tool", "name": "look"}
        answer = await message(page, key, lambda c: c.messages.create(**body, tool_choice=forced))
        assert [block.name for block in answer.content if block.type == "tool_use"] == ["look"]


async def test_an_answer_under_a_rule_survives_the_death_of_its_process() -> None:
    counts = iter(range(1_000_000))

    class DyingText(FencedText):
        async def advance_rule(self, stream: int, token: int) -> TokenMask:
            if next(counts) == 3:
                await self.aclose()  # as if another answer's grammar had taken too much memory
            return await super().advance_rule(stream, token)

    async with models(text_kind=DyingText) as (page, said, key):
        body = {"structured_outputs": {"json": SCHEMA}}
        fields: dict[str, Any] = {
            "model": NAME,
            "prompt": "hi",
            "max_tokens": 999,
            "seed": 3,
            "extra_body": body,
        }
        broken = await ask(page, key, lambda c: c.completions.create(**fields))
        judged(broken.choices[0].text)
        assert said.rules_opened == 2
        whole = await ask(page, key, lambda c: c.completions.create(**fields))
        assert whole.choices[0].text == broken.choices[0].text
