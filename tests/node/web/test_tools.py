"""Tool calls and reasoning through the official clients, in all three forms, streamed and not."""

import json
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import msgspec
import pytest

from tests.node.web.models_world import NAME, SaidServing, SaidText, models
from tests.node.web.test_clients import anthropic, ask, message, openai

FUNCTION = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", **FUNCTION}, {"type": "web_search"}]
MESSAGE_TOOLS: list[Any] = [{"name": "look", "description": "Look.", "input_schema": {"type": "object"}}]
SAYS = (
    "<think>\nwhich?\n</think>\n\nI look, grüß.\n"
    '<tool_call>\n{"name": "look", "arguments": {"at": "ü}"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
TEXT, REASONING, INPUTS = "I look, grüß.", "which?", [{"at": "ü}"}, {}]
USER: list[Any] = [{"role": "user", "content": "hi"}]


def callers(said: SaidServing, says: str = SAYS) -> None:
    """Have the model write calls and reasoning."""
    said.says = says.encode()
    said.facts = msgspec.structs.replace(SaidText.facts, calls="hermes", reasoning=0)


def creating(form: str, **fields: Any) -> Callable[[Any], Any]:
    """A function that requests one answer from a client."""
    return lambda client: attrgetter(form)(client).create(**fields)


async def test_chat_completions_contain_calls_and_reasoning() -> None:
    async with models() as (page, said, key):
        callers(said)
        fields: dict[str, Any] = {"model": NAME, "messages": USER, "tools": CHAT_TOOLS, "n": 2}
        whole = await ask(page, key, lambda c: c.chat.completions.create(**fields))
        first, second = whole.choices
        assert (first.message.content, first.finish_reason) == (TEXT, "tool_calls")
        assert first.message.reasoning_content == REASONING
        calls = first.message.tool_calls
        assert [json.loads(call.function.arguments) for call in calls] == INPUTS
        ids = {call.id for choice in (first, second) for call in choice.message.tool_calls}
        assert len(ids) >= 2
        assert whole.usage.completion_tokens_details.reasoning_tokens > 0

        chunks = await ask(page, key, lambda c: list(c.chat.completions.create(**fields, stream=True)))
        texts, reasons, arguments = "", "", {0: "", 1: ""}
        heads: list[Any] = []
        for chunk in chunks:
            [choice] = chunk.choices
            if choice.index:
                continue
            delta = choice.delta
            texts += delta.content or ""
            reasons += getattr(delta, "reasoning_content", None) or ""
            assert delta.tool_calls != []
            for call in delta.tool_calls or ():
                arguments[call.index] += call.function.arguments
                heads += [(call.index, call.id, call.function.name)] if call.id else []
        assert (texts, reasons) == (TEXT, REASONING)
        assert [json.loads(arguments[number]) for number in (0, 1)] == INPUTS
        assert [(number, name) for number, _, name in heads] == [(0, "look"), (1, "look")]
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == ["tool_calls"] * 2
        # while the pieces arrive
        assert len([chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]) > 6


async def test_the_streams_of_the_clients_collect_calls() -> None:
    async with models() as (page, said, key):
        callers(said)

        def chat(client: Any) -> Any:
            with client.chat.completions.stream(model=NAME, messages=USER, tools=CHAT_TOOLS) as stream:
                for _ in stream:
                    pass
                return stream.get_final_completion().choices[0]

        choice = await ask(page, key, chat)
        assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == INPUTS

        def respond(client: Any) -> Any:
            fields: Any = {"model": NAME, "input": "hi", "tools": RESPONSE_TOOLS[:1], "store": False}
            with client.responses.stream(**fields) as stream:
                for _ in stream:
                    pass
                return stream.get_final_response()

        response = await ask(page, key, respond)
        assert [item.type for item in response.output][-2:] == ["function_call"] * 2


async def test_responses_have_items_for_calls_and_reasoning() -> None:
    async with models() as (page, said, key):
        callers(said)
        fields: dict[str, Any] = {"model": NAME, "input": "hi", "tools": RESPONSE_TOOLS, "store": False}
        whole = await ask(page, key, lambda c: c.responses.create(**fields))
        kinds = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in whole.output] == kinds
        assert (whole.output[0].content[0].text, whole.output_text) == (REASONING, TEXT)
        assert [json.loads(item.arguments) for item in whole.output[2:]] == INPUTS
        assert len({item.id for item in whole.output}) == 4
        assert whole.usage.output_tokens_details.reasoning_tokens > 0

        events = await ask(page, key, lambda c: list(c.responses.create(**fields, stream=True)))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        added = [event for event in events if event.type == "response.output_item.added"]
        done = [event for event in events if event.type == "response.output_item.done"]
        assert (
            [event.output_index for event in added] == [event.output_index for event in done] == [0, 1, 2, 3]
        )
        assert [event.item.type for event in done] == kinds
        told = [event for event in events if event.type == "response.function_call_arguments.delta"]
        by_item = {event.item.id: "" for event in added[2:]}
        for event in told:
            by_item[event.item_id] += event.delta
        assert [json.loads(text) for text in by_item.values()] == INPUTS
        assert events[-1].response.output == whole.output or len(events[-1].response.output) == 4

        # The next turn: the client sends the whole conversation back, with the results of the tools.
        items = [item.model_dump(exclude_none=True) for item in whole.output]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"found {number}"}
            for number, item in enumerate(whole.output[2:])
        ]
        fields["input"] = [{"role": "user", "content": "hi"}, *items, *results]
        await ask(page, key, lambda c: c.responses.create(**fields))
        prompt = bytes(said.wishes[-1].prompt).decode()
        lines = [line.partition(":")[0] for line in prompt.split("\n")]
        assert lines[:4] == ["user", "assistant", "tool", "tool"]
        assert REASONING in prompt


async def test_messages_have_blocks_for_calls_and_thinking() -> None:
    async with models() as (page, said, key):
        callers(said)
        fields: dict[str, Any] = {"model": NAME, "messages": USER, "max_tokens": 900, "tools": MESSAGE_TOOLS}
        whole = await message(page, key, lambda c: c.messages.create(**fields))
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert (whole.content[0].thinking, whole.content[1].text) == (REASONING, TEXT)
        assert [block.input for block in whole.content[2:]] == INPUTS
        assert whole.stop_reason == "tool_use"

        def streamed(client: Any) -> Any:
            with client.messages.stream(**fields) as stream:
                partial = [event.partial_json for event in stream if event.type == "input_json"]
                return partial, stream.get_final_message()

        partial, final = await message(page, key, streamed)
        assert len(partial) > 2
        assert [block.type for block in final.content] == [block.type for block in whole.content]
        assert [block.input for block in final.content[2:]] == INPUTS
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "found"}
            for block in whole.content[2:]
        ]
        content = [block.model_dump() for block in whole.content]
        fields["messages"] = [
            *USER,
            {"role": "assistant", "content": content},
            {"role": "user", "content": results},
        ]
        await message(page, key, lambda c: c.messages.create(**fields))
        prompt = bytes(said.wishes[-1].prompt).decode()
        assert [line.partition(":")[0] for line in prompt.split("\n")][:4] == [
            "user",
            "assistant",
            "tool",
            "tool",
        ]


async def test_the_requested_choice_of_tools_is_followed() -> None:
    async with models() as (page, said, key):
        callers(said)
        fields: dict[str, Any] = {"model": NAME, "messages": USER, "tools": CHAT_TOOLS}
        one = await ask(page, key, lambda c: c.chat.completions.create(**fields, parallel_tool_calls=False))
        assert len(one.choices[0].message.tool_calls) == 1
        assert one.choices[0].finish_reason == "tool_calls"
        none = await ask(page, key, lambda c: c.chat.completions.create(**fields, tool_choice="none"))
        assert none.choices[0].message.tool_calls is None
        assert "<tool_call>" in none.choices[0].message.content
        assert "look" not in bytes(said.wishes[-1].prompt).decode()
        for choice in ({"type": "function", "function": {"name": "other"}}, "perhaps", {"type": "custom"}):
            with pytest.raises(openai.BadRequestError, match="tool_choice"):
                await ask(page, key, creating("chat.completions", **fields, tool_choice=choice))
        with pytest.raises(openai.BadRequestError, match="needs tools"):
            await ask(
                page,
                key,
                lambda c: c.chat.completions.create(model=NAME, messages=USER, tool_choice="required"),
            )
        named = {"type": "tool", "name": "other"}
        body: Any = {"model": NAME, "messages": USER, "max_tokens": 9, "tools": MESSAGE_TOOLS}
        with pytest.raises(anthropic.BadRequestError, match="no tool has the name"):
            await message(page, key, lambda c: c.messages.create(**body, tool_choice=named))


async def test_a_prompt_that_ends_inside_reasoning_is_continued() -> None:
    async with models() as (page, said, key):
        callers(said, "so</think>\n\nyes")
        said.tail = "<|im_start|>assistant\n<think>\n"
        options = {
            "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort": "low",
        }
        whole = await ask(
            page, key, lambda c: c.chat.completions.create(model=NAME, messages=USER, **options)
        )
        answer = whole.choices[0].message
        assert (answer.reasoning_content, answer.content) == ("so", "yes")
        prompt = bytes(said.wishes[-1].prompt).decode()
        assert "'enable_thinking': True" in prompt
        assert "'reasoning_effort': 'low'" in prompt
