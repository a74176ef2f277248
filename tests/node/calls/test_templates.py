"""Chat templates of known families, rendered by this project and by transformers."""

from pathlib import Path
from typing import Any

import pytest

from node.content.calls.formats import CallFormat, adapt_turns, describe_tools, detect_calls, detect_reasoning
from node.content.chat import ChatTemplate
from tests.node.calls.families import CALLED, CHATS, SPECIAL, TEMPLATES, TOOLS, USER

OPTIONS: list[dict[str, Any]] = [{}, {"enable_thinking": False, "reasoning_effort": "low"}]


def by_transformers(
    template: str, turns: list[dict[str, Any]], tools: Any, prompts: bool, options: dict[str, Any]
) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        [turns], tools=tools, chat_template=template, add_generation_prompt=prompts, **SPECIAL, **options
    )
    return str(rendered[0])


def test_thirty_templates_render_as_transformers_does() -> None:
    assert len(TEMPLATES) >= 30
    compared = 0
    for name, text in TEMPLATES.items():
        template = ChatTemplate(text, Path("folder"), SPECIAL)
        takes_tools = "tools" in text
        for chat in CHATS + (CALLED if takes_tools else []):
            turns = adapt_turns(chat, "")
            for tools in (None, TOOLS) if takes_tools else (None,):
                for prompts, options in ((True, OPTIONS[0]), (False, OPTIONS[1]), (True, OPTIONS[1])):
                    try:
                        wanted = by_transformers(text, turns, tools, prompts, options)
                    except Exception:  # exceptions of jinja and of the templates
                        with pytest.raises(ValueError, match="template refuses"):
                            template.render(turns, prompts=prompts, tools=tools or (), options=options)
                        continue
                    found = template.render(turns, prompts=prompts, tools=tools or (), options=options)
                    assert found == wanted, (name, turns)
                    compared += 1
    assert compared > 500


FORMATS: dict[str, CallFormat] = {
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_coder": "hermes",
    "hermes2": "hermes",
    "smollm3": "hermes",
    "glm45": "hermes",
    "llama31": "llama",
    "mistral_nemo": "mistral",
    "mistral_small": "mistral",
    "functiongemma": "gemma",
    "gemma4": "gemma",
    "deepseek_v3": "deepseek",
    "deepseek_r1": "deepseek",
    "deepseek_v31": "deepseek",
    "granite3": "granite",
    "gpt_oss": "harmony",
}
"""The call format of each template that supports tools. For all other templates, tools are described in the
format of Hermes."""


def test_the_call_format_is_detected_from_the_template() -> None:
    for name, text in TEMPLATES.items():
        found = detect_calls(text, lambda token: token == "<|python_tag|>")
        assert found == FORMATS.get(name, "hermes"), name
    assert detect_calls("{{ tools }}", lambda _: False) == ""
    thinking = {name for name, text in TEMPLATES.items() if detect_reasoning(text, lambda _: False) == 0}
    assert thinking >= {"qwen3", "qwq", "deepseek_r1"}
    assert not thinking & {"qwen25", "llama31", "mistral_nemo"}
    assert detect_reasoning("", lambda token: token in ("[THINK]", "[/THINK]")) == 1


def test_tools_are_described_in_text_if_the_template_has_none() -> None:
    turns = describe_tools(CALLED[1], TOOLS)
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0]["content"].startswith("Be short.")
    assert '"name": "look_up"' in turns[0]["content"]
    assert turns[2]["content"].count("<tool_call>") == 2
    assert turns[3]["content"].count("<tool_response>") == 2
    assert describe_tools([USER], TOOLS)[0]["role"] == "system"
    text = ChatTemplate(TEMPLATES["chatml"], Path("folder"), SPECIAL).render(turns, prompts=True)
    assert "look_up" in text


def test_call_ids_of_other_formats_fit_mistrals_templates() -> None:
    turns = [
        {**turn, "tool_calls": [{**call, "id": "call_" + call["id"]} for call in turn["tool_calls"]]}
        if "tool_calls" in turn
        else {**turn, "tool_call_id": "call_" + turn["tool_call_id"]}
        if "tool_call_id" in turn
        else turn
        for turn in CALLED[1]
    ]
    template = ChatTemplate(TEMPLATES["mistral_nemo"], Path("folder"), SPECIAL)
    with pytest.raises(ValueError, match="length 9"):
        template.render(turns, tools=TOOLS)
    adapted = adapt_turns(turns, "mistral")
    assert template.render(adapted, tools=TOOLS)
    called, result = adapted[2]["tool_calls"][0]["id"], adapted[3]["tool_call_id"]
    assert called == result
