"""The official clients of OpenAI and Anthropic use the HTTP API, on real sockets."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import trio

from tests.node.web.models_world import ANSWER, CONTEXT, NAME, models
from tests.node.web.world import Served

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

T = TypeVar("T")
TOLD = ANSWER[:5]
BYTES = len(TOLD.encode())
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}},
    {"type": "computer_use", "of": "another server"},
]


async def ask(page: Served, key: str, work: Callable[[Any], T]) -> T:
    """Return the result of `work` with an OpenAI client, in its own thread."""

    def run() -> T:
        with openai.OpenAI(api_key=key, base_url=f"http://{page.host}/v1", max_retries=0) as client:
            return work(client)

    with trio.fail_after(20):
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


async def message(page: Served, key: str, work: Callable[[Any], T]) -> T:
    """Return the result of `work` with an Anthropic client, in its own thread."""

    def run() -> T:
        with anthropic.Anthropic(api_key=key, base_url=f"http://{page.host}", max_retries=0) as client:
            return work(client)

    with trio.fail_after(20):
        return await trio.to_thread.run_sync(run, abandon_on_cancel=True)


async def test_completions_arrive_whole_and_streamed() -> None:
    async with models(text="bytes") as (page, said, key):
        fields = {"model": NAME, "prompt": "hi", "max_tokens": BYTES, "seed": 3, "temperature": 0.5, "n": 2}
        whole = await ask(page, key, lambda client: client.completions.create(**fields, logprobs=2))
        assert [choice.text for choice in whole.choices] == [TOLD, TOLD]
        assert {choice.finish_reason for choice in whole.choices} == {"length"}
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (2, 2 * BYTES)
        assert whole.choices[0].logprobs.token_logprobs == [-0.5] * BYTES
        assert len({wish.sampling.seed for wish in said.wishes}) == 2
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await ask(page, key, lambda client: list(client.completions.create(**fields, **options)))
        assert all(chunk.choices for chunk in chunks[:-1])
        assert not chunks[-1].choices
        assert chunks[-1].usage.completion_tokens == 2 * BYTES
        texts = dict.fromkeys(range(2), "")
        for chunk in chunks[:-1]:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == {0: TOLD, 1: TOLD}
        ends = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
        assert [(end.text, end.finish_reason) for end in ends] == [("", "length")] * 2


async def test_chat_answers_arrive_whole_and_streamed() -> None:
    async with models() as (page, said, key):
        turns = [{"role": "developer", "content": "short"}, {"role": "user", "content": "hi"}]
        fields = {"model": NAME, "messages": turns, "max_tokens": BYTES, "tools": TOOLS}
        whole = await ask(page, key, lambda c: c.chat.completions.create(**fields))
        (choice,) = whole.choices
        assert (choice.message.role, choice.message.content) == ("assistant", TOLD)
        assert choice.message.tool_calls is None
        prompt = bytes(said.wishes[-1].prompt).decode()
        assert prompt.startswith("system: short\nuser: hi\n")
        assert "look" in prompt
        assert "computer_use" not in prompt
        chunks = await ask(page, key, lambda c: list(c.chat.completions.create(**fields, stream=True)))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TOLD
        assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "length"]
        assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)
        # No piece splits a character: all bytes of a character arrive together.
        assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in chunks)


async def test_responses_arrive_whole_and_streamed() -> None:
    async with models() as (page, said, key):
        items = [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        ]
        fields: dict[str, Any] = {
            "model": NAME,
            "input": items,
            "instructions": "short",
            "max_output_tokens": BYTES,
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "tools": [{"type": "function", "name": "look", "parameters": {}}, {"type": "web_search"}],
            "extra_body": {"prompt_cache_key": "x", "client_metadata": {"a": "b"}},
        }
        whole = await ask(page, key, lambda client: client.responses.create(**fields))
        assert (whole.output_text, whole.status) == (TOLD, "incomplete")
        assert whole.incomplete_details.reason == "max_output_tokens"
        assert whole.usage.output_tokens == BYTES
        prompt = bytes(said.wishes[-1].prompt).decode()
        assert [line.partition(":")[0] for line in prompt.split("\n")[:4]] == [
            "system",
            "user",
            "assistant",
            "tool",
        ]
        events = await ask(page, key, lambda client: list(client.responses.create(**fields, stream=True)))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == TOLD


async def test_messages_arrive_whole_and_streamed() -> None:
    async with models() as (page, _, key):
        turns: list[Any] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "no"}]},
        ]
        fields = {"model": NAME, "messages": turns, "max_tokens": BYTES, "system": "short"}
        whole = await message(page, key, lambda client: client.messages.create(**fields))
        assert (whole.content[0].text, whole.stop_reason) == (TOLD, "max_tokens")
        assert whole.usage.output_tokens == BYTES
        stopped = await message(
            page, key, lambda client: client.messages.create(**fields, stop_sequences=["ü"])
        )
        assert (stopped.content[0].text, stopped.stop_reason) == ("Gr", "stop_sequence")
        assert stopped.stop_sequence == "ü"

        def streamed(client: Any) -> tuple[str, Any]:
            with client.messages.stream(**fields) as stream:
                return "".join(stream.text_stream), stream.get_final_message()

        text, final = await message(page, key, streamed)
        assert (text, final.stop_reason, final.usage.output_tokens) == (TOLD, "max_tokens", BYTES)
        counted = await message(
            page, key, lambda c: c.messages.count_tokens(model=NAME, messages=turns[:1], system="short")
        )
        assert counted.input_tokens == len("system: short\nuser: hi")


async def test_clients_receive_errors_in_their_own_form() -> None:
    async with models(text="bytes") as (page, said, key):
        turns = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
            await ask(page, key, lambda c: c.chat.completions.create(model=NAME, messages=turns))
        assert refused.value.code == "no_chat_template"
        assert refused.value.request_id
        with pytest.raises(openai.NotFoundError, match="no service is called 'other'"):
            await ask(page, key, lambda c: c.completions.create(model="other", prompt="hi"))
        with pytest.raises(openai.AuthenticationError, match="keys new"):
            await ask(page, "pl-wrong", lambda c: c.models.list())
        with pytest.raises(openai.BadRequestError, match="temperature: Expected `float` <= 2") as wrong:
            await ask(page, key, lambda c: c.completions.create(model=NAME, prompt="a", temperature=9))
        assert wrong.value.param == "temperature"
        with pytest.raises(openai.BadRequestError, match="4,096 tokens"):
            await ask(page, key, lambda c: c.completions.create(model=NAME, prompt="a" * CONTEXT))
        with pytest.raises(anthropic.BadRequestError) as told:
            await message(page, key, lambda c: c.messages.create(model=NAME, messages=turns, max_tokens=4))
        assert told.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.AuthenticationError):
            await message(page, "no", lambda c: c.models.list())
        said.answers = False
        with pytest.raises(openai.InternalServerError) as missing:
            await ask(page, key, lambda c: c.completions.create(model=NAME, prompt="hi"))
        assert missing.value.response.headers["retry-after"] == "2"


async def test_an_interrupted_answer_is_reported_in_its_stream() -> None:
    async with models(breaks_after=4) as (page, said, key):
        fields = {"model": NAME, "prompt": "hi", "max_tokens": 99}
        got: list[str] = []

        def read(client: Any) -> None:
            for chunk in client.completions.create(**fields, stream=True):
                got.append(chunk.choices[0].text)

        with pytest.raises(openai.APIError, match="broke off"):
            await ask(page, key, read)
        assert "".join(got) == "Grü"
        with pytest.raises(openai.InternalServerError) as whole:
            await ask(page, key, lambda c: c.completions.create(**fields))
        assert whole.value.response.headers["x-should-retry"] == "false"
        assert said.going == 0


async def test_models_are_listed_in_both_forms() -> None:
    async with models() as (page, _, key):
        assert [row.id for row in await ask(page, key, lambda c: list(c.models.list()))] == [NAME]
        assert (await ask(page, key, lambda c: c.models.retrieve(NAME))).created == 1_700_000_000
        rows = await message(page, key, lambda c: list(c.models.list()))
        assert [row.display_name for row in rows] == [NAME]
        document = json.loads((await page.ask("/openapi.json"))[2])
        assert set(document["paths"]) >= {"/v1/completions", "/v1/messages", "/v1/responses"}
