"""The formats of tool calls and reasoning of each model family, detected by marks in the chat template.

If a template does not support tools, they are described in a system message, in the format of Hermes
(NousResearch/Hermes-Function-Calling), which most open models have seen.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from blake3 import blake3

CallFormat = Literal["", "hermes", "llama", "mistral", "deepseek", "granite", "gemma", "harmony", "json"]
"""The name of a format; empty if it is unknown. `json` is only an object, or a list of objects, with name and
arguments. A model without a format of its own must use it if it has to call."""

DEEPSEEK = {
    name: f"<\uff5ctool▁{name}\uff5c>"
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
}
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
GEMMA = (
    ("<start_function_call>", "<end_function_call>", "<escape>"),
    ("<|tool_call>", "<tool_call|>", '<|"|>'),
)
"""The marks around a call, and around texts in it: first FunctionGemma's, then Gemma 4's."""
REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""The marks around the reasoning before an answer."""

_MARKS: tuple[tuple[str, CallFormat], ...] = (
    ("<|message|>", "harmony"),
    *((begin, "gemma") for begin, _, _ in GEMMA),
    (DEEPSEEK["calls▁begin"], "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama"),
)
KEPT = frozenset(
    [mark for mark, _ in _MARKS]
    + [*DEEPSEEK.values(), *HARMONY, *(mark for row in (*GEMMA, *REASONING) for mark in row)]
    + ["</tool_call>", "[ARGS]", "[CALL_ID]"]
)
"""Special tokens that are part of these formats. All other special tokens are removed from a text."""
_MISTRAL_ID_LENGTH = 9
"""Length of call ids. Mistral's templates refuse calls with ids of other lengths."""
_HERMES_TOOLS = """You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def detect_calls(template: str, has_token: Callable[[str], bool]) -> CallFormat:
    """Return the format of calls that a chat template asks for. `has_token` returns whether the tokenizer
    knows a token, because Llama's templates do not contain the token that begins a call."""
    for mark, found in _MARKS:
        if mark in template:
            return found
    if "ipython" in template and has_token("<|python_tag|>"):
        return "llama"
    return "" if "tools" in template else "hermes"


def detect_reasoning(template: str, has_token: Callable[[str], bool]) -> int:
    """Return the row of `REASONING` that a model writes, or -1."""
    for number, (begin, end) in enumerate(REASONING):
        if end in template or (has_token(begin) and has_token(end)):
            return number
    return -1


def adapt_turns(turns: Sequence[Mapping[str, Any]], calls: CallFormat) -> list[dict[str, Any]]:
    """Return turns adapted to the templates of a family."""
    found = []
    for turn in turns:
        turn = dict(turn)
        if calls == "mistral":
            if "tool_call_id" in turn:
                turn["tool_call_id"] = _mistral_id(turn["tool_call_id"])
            if "tool_calls" in turn:
                turn["tool_calls"] = [call | {"id": _mistral_id(call["id"])} for call in turn["tool_calls"]]
        if "reasoning_content" in turn:  # the key that GPT-OSS's templates use
            turn["thinking"] = turn["reasoning_content"]
        found.append(turn)
    return found


def describe_tools(
    turns: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return turns for a template that does not support tools: the available tools, calls and results become
    text."""
    found: list[dict[str, Any]] = []
    for turn in turns:
        content = str(turn.get("content") or "")
        if turn["role"] == "tool":
            said = {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
            if found and found[-1]["content"].endswith("</tool_response>") and found[-1]["role"] == "user":
                said["content"] = f"{found.pop()['content']}\n{said['content']}"
            found.append(said)
        elif turn.get("tool_calls"):
            rows = [content] if content else []
            for call in turn["tool_calls"]:
                written = json.dumps(call["function"], ensure_ascii=False)
                rows.append(f"<tool_call>\n{written}\n</tool_call>")
            found.append({"role": turn["role"], "content": "\n".join(rows)})
        else:
            found.append(dict(turn))
    if tools:
        rows = [json.dumps(tool, ensure_ascii=False) for tool in tools]
        told = _HERMES_TOOLS.format(tools="\n".join(rows))
        if found and found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{found[0].get('content') or ''}\n\n{told}"}
        else:
            found.insert(0, {"role": "system", "content": told})
    return found


def _mistral_id(given: object) -> object:
    if not isinstance(given, str) or (len(given) == _MISTRAL_ID_LENGTH and given.isalnum()):
        return given
    return blake3(given.encode("utf-8", "replace")).hexdigest()[:_MISTRAL_ID_LENGTH]
