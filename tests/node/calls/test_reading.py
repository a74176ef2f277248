"""Tool calls and reasoning are parsed from answers, no matter how an answer is split into parts."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.content.calls.answer_parts import CallArguments, CallBegun, CallOver, Part, ReasoningPart, TextPart
from node.content.calls.formats import DEEPSEEK, adapt_turns, detect_calls, detect_reasoning
from node.content.calls.gemma import gemma_arguments
from node.content.calls.reading import AnswerReader
from node.content.chat import ChatTemplate
from tests.node.calls.families import ARGUMENTS, CALL, OTHER, SPECIAL, TEMPLATES, TOOLS, USER
from tests.node.calls.test_templates import FORMATS

SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
ENDS = ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<turn|>", "<|end_of_text|>", "<|call|>")
SINGLE = ("llama31",)
"""Templates that allow one call per turn."""


def joined(parts: list[Part]) -> list[Part]:
    """Merge consecutive parts of the same type."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, TextPart | ReasoningPart | CallArguments) and type(last) is type(part):
            assert isinstance(last, TextPart | ReasoningPart | CallArguments)
            found[-1] = replace(last, text=last.text + part.text)
        else:
            found.append(part)
    return found


def read(calls: Any, text: str, cuts: list[int], **options: Any) -> list[Part]:
    reader = AnswerReader(calls, **{"tools": SCHEMAS, **options})
    parts: list[Part] = []
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in pairwise(places):
        parts += reader.push(text[begin:end])
    return joined(parts + reader.finish())


def calls_of(parts: list[Part]) -> list[tuple[str, Any]]:
    names = {part.number: part.name for part in parts if isinstance(part, CallBegun)}
    texts = {part.number: part.text for part in parts if isinstance(part, CallArguments)}
    over = {part.number for part in parts if isinstance(part, CallOver)}
    assert over == set(names)
    return [(name, json.loads(texts[number])) for number, name in names.items()]


def answer_by(name: str, turn: dict[str, Any]) -> str:
    """Return the text that a family's model would write for a turn, cut from its rendered template."""
    template = ChatTemplate(TEMPLATES[name], Path("folder"), SPECIAL)
    [turn] = adapt_turns([turn], FORMATS[name])
    before = template.render([USER], prompts=True, tools=TOOLS)
    before = before.removesuffix("<think>\n").removesuffix("</think>")
    whole = template.render([USER, turn], tools=TOOLS)
    at = next(size for size in range(len(before), 0, -1) if whole.startswith(before[:size]))
    text = whole[at:]
    for end in ("<｜end▁of▁sentence｜>", *ENDS):  # noqa: RUF001 - DeepSeek's
        text = text.removesuffix("\n").removesuffix(end)
    return text


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_parsed_as_the_familys_template_writes_them(name: str) -> None:
    has = lambda token: token == "<|python_tag|>"  # noqa: E731
    form, reasoning = detect_calls(TEMPLATES[name], has), detect_reasoning(TEMPLATES[name], has)
    calls = [CALL] if name in SINGLE else [CALL, OTHER]
    text = answer_by(name, {"role": "assistant", "content": "", "tool_calls": calls})
    wanted = [("look_up", ARGUMENTS), ("now", {})][: len(calls)]
    whole = read(form, text, [], reasoning=reasoning)
    assert calls_of(whole) == wanted, text
    assert not [part for part in whole if isinstance(part, TextPart)], text
    assert read(form, text, list(range(len(text))), reasoning=reasoning) == whole
    for cut in range(0, len(text), 7):
        assert read(form, text, [cut], reasoning=reasoning) == whole


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "now", "arguments": {}}', ': "a}"}}', "[TOOL_CALLS]", "[", "]",
     '{"name": "look_up", "arguments": {"word"', "now[ARGS]{}", "<|tool_call|>", "<think>", "</think>", " ",
     "\n", "hi", "<|channel|>", "final", "analysis", "commentary to=functions.now", "<|message|>", "<|end|>",
     "<|start|>", "{}", "<function=now>", "<parameter=a>", "1", "</parameter>", "</function>", "call:now{",
     "<start_function_call>", "<end_function_call>", "<escape>", "now\n<arg_key>", "</arg_key>",
     "<arg_value>", "</arg_value>", ";", ",", "<\uff5ctool▁calls▁begin\uff5c>",
     "<\uff5ctool▁call▁begin\uff5c>",
     "function<\uff5ctool▁sep\uff5c>now\n```json\n", "<\uff5ctool▁call▁end\uff5c>", "<|python_tag|>",
     "\\", '"', "e\u0301"]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=14).map("".join)
CALL_FORMATS = st.sampled_from(
    ["", "hermes", "llama", "mistral", "deepseek", "granite", "gemma", "harmony", "json"]
)


@given(CALL_FORMATS, TEXTS, st.lists(st.integers(0, 200), max_size=12), st.integers(-1, 2), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_an_answer_is_parsed_the_same_however_it_is_split(
    calls: Any, text: str, cuts: list[int], reasoning: int, is_open: bool
) -> None:
    options = {"reasoning": reasoning, "is_reasoning": is_open and reasoning >= 0}
    whole = read(calls, text, [], **options)
    assert read(calls, text, cuts, **options) == whole
    assert read(calls, text, list(range(len(text))), **options) == whole
    begun = [part.number for part in whole if isinstance(part, CallBegun)]
    assert begun == list(range(len(begun)))


@given(TEXTS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_text_without_tools_and_reasoning_is_unchanged(text: str) -> None:
    assert read("hermes", text, [5], tools={}) == ([TextPart(text)] if text else [])


@given(
    st.sampled_from(["hermes", "mistral", "granite", "llama", "json"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=6,
    ),
    st.lists(st.integers(0, 80), max_size=6),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_any_call_arguments_survive_a_round_trip(calls: Any, value: Any, cuts: list[int]) -> None:
    key = "parameters" if calls == "llama" else "arguments"
    written = json.dumps({"name": "look_up", key: {"word": value}}, ensure_ascii=False)
    around = {
        "hermes": "<tool_call>\n{}\n</tool_call>",
        "mistral": "[TOOL_CALLS][{}]",
        "granite": "<|tool_call|>[{}]",
    }
    text = around.get(calls, "{}").replace("{}", written, 1)
    assert calls_of(read(calls, text, cuts)) == [("look_up", {"word": value})]


def test_malformed_calls_are_returned_as_text() -> None:
    for text in (
        '<tool_call>{"x": 1}</tool_call> so',
        "see <tool_call>",
        "<tool_call>\nnothing",
        "a <tool_call",
    ):
        assert read("hermes", text, []) == [TextPart(text)], text
    assert read("llama", '{"a": 1} and', []) == [TextPart('{"a": 1} and')]
    assert read("mistral", "[TOOL_CALLS] [] x", [])[-1] == TextPart("[TOOL_CALLS] [] x")


def test_reasoning_is_separated_from_the_answer() -> None:
    text = "<think>\nwell <tool_call>\n</think>\n\nyes"
    assert read("hermes", text, [3, 9], reasoning=0) == [ReasoningPart("well <tool_call>"), TextPart("yes")]
    assert read("hermes", "so</think>yes", [], reasoning=0, is_reasoning=True) == [
        ReasoningPart("so"),
        TextPart("yes"),
    ]
    assert read("hermes", "a <think>", [], reasoning=0) == [TextPart("a <think>")]
    assert read("hermes", text, [], reasoning=-1)[0] == TextPart("<think>\nwell <tool_call>\n</think>\n\nyes")


def test_a_truncated_call_is_never_taken_as_complete() -> None:
    parts = read("hermes", '<tool_call>{"name": "now", "arguments": {"a": ', [])
    assert parts == [CallBegun(0, "now"), CallArguments(0, '{"a": ')]


def test_long_gemma_arguments_are_parsed_in_linear_time() -> None:
    blanks = " " * 20_000
    assert gemma_arguments("{" + blanks + "}", "<q>") == {}
    assert gemma_arguments("{" + blanks, "<q>") is None
    assert gemma_arguments("{" + blanks + ":1}", "<q>") is None
    assert gemma_arguments("{a" + blanks + ":" + blanks + "1" + blanks + "}", "<q>") == {"a": 1}
    many = [{"b": 1}, "x,]"] * 20_000
    written = ",".join("{b:1}" if isinstance(each, dict) else f"<q>{each}<q>" for each in many)
    assert gemma_arguments("{a:[" + written + "]}", "<q>") == {"a": many}


DEEPSEEK_CALL = f"{DEEPSEEK['calls▁begin']}{DEEPSEEK['call▁begin']}now{DEEPSEEK['sep']}"


@pytest.mark.parametrize(
    ("form", "broken", "whole"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "x": 1}', '<tool_call>{"name": "now"}'),
        ("granite", '<|tool_call|>[{"name": "now", "arguments": {}, "x', '<|tool_call|>{"name": "now"}'),
        ("mistral", "[TOOL_CALLS]now[ARGS]x", "[TOOL_CALLS]now[ARGS]{}"),
        ("deepseek", DEEPSEEK_CALL + "x", DEEPSEEK_CALL + "{}" + DEEPSEEK["call▁end"]),
    ],
)
def test_a_call_after_a_malformed_one_is_parsed_separately(form: Any, broken: str, whole: str) -> None:
    text = broken + ' x": ' + whole
    parts = read(form, text, list(range(len(text))))
    assert [part.number for part in parts if isinstance(part, CallBegun)] == [0, 1]
    assert [part.number for part in parts if isinstance(part, CallOver)] == [1]
    assert CallArguments(1, "{}") in parts
