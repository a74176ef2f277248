"""Strict tools, tools with plain text, and cached tokens, through the official clients."""

import json
from typing import Any

import pytest

from node.web.forms.custom_tools import TextArgument
from tests.node.web.models_world import NAME, SaidServing, models
from tests.node.web.test_clients import ask, message, openai
from tests.node.web.test_tools import USER, callers, creating

SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["at"],
    "additionalProperties": False,
}
WRONG = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"ut": "x"}}\n</tool_call>'
PLAIN = "Nothing <tool to look at."
PATCH = '*** Begin Patch\n+a "ü" \\ \U0001f600\n*** End Patch'


def saying(said: SaidServing, text: str) -> None:
    callers(said, text)


async def test_strict_calls_follow_their_schema_in_auto_mode() -> None:
    async with models() as (page, said, key):
        function = {"name": "look", "parameters": SCHEMA}
        chat: dict[str, Any] = {"model": NAME, "messages": USER, "parallel_tool_calls": False}
        responses: dict[str, Any] = {"model": NAME, "input": "hi", "parallel_tool_calls": False}
        messages: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 999}
        messages["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}

        async def arguments(strict: bool) -> list[Any]:
            tools: list[Any] = [{"type": "function", "function": {**function, "strict": strict}}]
            first = await ask(page, key, creating("chat.completions", **chat, tools=tools))
            [choice] = first.choices
            assert choice.message.content == "I look."
            tools = [{"type": "function", **function, "strict": strict}]
            second = await ask(page, key, creating("responses", **responses, tools=tools))
            tools = [{"name": "look", "input_schema": SCHEMA, "strict": strict}]
            third = await message(page, key, lambda c: c.messages.create(**messages, tools=tools))
            return [
                json.loads(choice.message.tool_calls[0].function.arguments),
                json.loads(second.output[-1].arguments),
                third.content[-1].input,
            ]

        saying(said, WRONG)
        assert await arguments(strict=False) == 3 * [{"ut": "x"}]
        for found in await arguments(strict=True):
            assert list(found) == ["at"]
            assert 0 <= found["at"] <= 9
        saying(said, PLAIN)
        tools: list[Any] = [{"type": "function", "function": {**function, "strict": True}}]
        whole = await ask(page, key, creating("chat.completions", **chat, tools=tools))
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (PLAIN, "stop")


async def test_a_tool_that_takes_plain_text_is_called_with_it() -> None:
    async with models() as (page, said, key):
        written = json.dumps({"name": "patch", "arguments": {"input": PATCH}})
        saying(said, f"<tool_call>\n{written}\n</tool_call>")
        tool: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Edit."}
        grammar = {"type": "grammar", "syntax": "lark", "definition": "start: LINE"}
        fields: dict[str, Any] = {"model": NAME, "input": "hi", "tools": [{**tool, "format": grammar}]}
        whole = await ask(page, key, creating("responses", **fields))
        [item] = whole.output
        assert (item.type, item.name, item.input) == ("custom_tool_call", "patch", PATCH)
        assert "start: LINE" in bytes(said.wishes[-1].prompt).decode()
        events = await ask(page, key, lambda c: list(c.responses.create(**fields, stream=True)))
        deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == PATCH
        assert len(deltas) > 9, "the text was not streamed"
        done = [each for each in events if each.type == "response.custom_tool_call_input.done"]
        assert [each.input for each in done] == [PATCH]
        assert events[-1].response.output[0].input == PATCH

        result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "done"}
        turns = [{"role": "user", "content": "hi"}, item.model_dump(exclude_none=True), result]
        await ask(page, key, creating("responses", **{**fields, "input": turns}))
        assert "tool: done" in bytes(said.wishes[-1].prompt).decode()

        regex = {"type": "grammar", "syntax": "regex", "definition": "[ab]{2}|c"}
        fields["tools"] = [{**tool, "format": regex}]
        fields |= {"parallel_tool_calls": False, "tool_choice": "auto"}
        whole = await ask(page, key, creating("responses", **fields))
        assert whole.output[-1].input in {"aa", "ab", "ba", "bb", "c"}
        fields["tools"] = [{**tool, "format": {"type": "grammar", "syntax": "x"}}]
        with pytest.raises(openai.BadRequestError, match="lark or regex"):
            await ask(page, key, creating("responses", **fields))


@pytest.mark.parametrize("size", [1, 2, 7, 1_000])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        ('{ "input" :\n"a\\ud83d\\ude00\\n"}', "a\U0001f600\n"),
        ('{"input": "\\udc00x"}', "?x"),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": 3}', '{"input": 3}'),
        ('{"type": 1, "input": "late"}', "late"),
        ('{"input": "cut', "cut"),
        ("no JSON", "no JSON"),
    ],
)
def test_a_text_is_parsed_from_arguments_while_they_stream(written: str, text: str, size: int) -> None:
    reader = TextArgument()
    told = [reader.push(written[at : at + size]) for at in range(0, len(written), size)]
    assert "".join(told) + reader.finish() == text


async def test_cached_prompt_tokens_are_counted() -> None:
    async with models() as (page, said, key):
        said.shared = 5
        fields: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 3}
        whole = await ask(page, key, creating("chat.completions", **fields, n=2))
        read = len("user: hi")
        assert whole.usage.prompt_tokens == read
        assert whole.usage.prompt_tokens_details.cached_tokens == 5
        response = await ask(page, key, creating("responses", model=NAME, input="hi", max_output_tokens=3))
        assert response.usage.input_tokens == read
        assert response.usage.input_tokens_details.cached_tokens == 5
        answer = await message(page, key, lambda c: c.messages.create(**fields))
        assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (read - 5, 5)
        prompts = ["one", "two"]
        made = await ask(page, key, creating("completions", model=NAME, prompt=prompts, max_tokens=2))
        assert made.usage.prompt_tokens_details.cached_tokens == 10
