"""Requests in the form of two coding agents: long lists of tools, the whole input each time, and fields that
only other servers know.
"""

from typing import Any

from tests.node.web.models_world import NAME

LONG = "You are a coding agent running in a terminal on a user's computer. " * 40
NAMES = (
    "shell",
    "read_file",
    "edit_file",
    "write_file",
    "glob",
    "grep",
    "list_dir",
    "update_plan",
    "fetch",
    "task",
)


def schema(number: int) -> dict[str, Any]:
    """Return the parameters of a tool as such agents write them."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "command": {
                "type": "array",
                "items": {"type": "string"},
                "description": "What to run. " * number,
            },
            "timeout": {"type": ["integer", "null"], "exclusiveMinimum": 0},
            "mode": {"type": "string", "enum": ["files", "content", "count"], "default": "files"},
            "edits": {
                "type": "array",
                "items": {"type": "object", "properties": {"old": {"type": "string"}}, "required": ["old"]},
            },
        },
        "required": ["command"],
        "additionalProperties": False,
    }


def responses_tools() -> list[dict[str, Any]]:
    """Return functions, and kinds of tools that only other servers know."""
    tools: list[dict[str, Any]] = [
        {"type": "function", "name": name, "description": LONG, "strict": False, "parameters": schema(number)}
        for number, name in enumerate(NAMES * 6)
    ]
    tools = [{**tool, "name": f"{tool['name']}_{number}"} for number, tool in enumerate(tools)]
    tools += [
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Edit files.",
            "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
        },
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {
            "type": "mcp",
            "server_label": "docs",
            "server_url": "https://example.org",
            "require_approval": "never",
        },
    ]
    return tools


def responses_input() -> list[dict[str, Any]]:
    """Return the conversation so far, with the results of tools."""
    return [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": LONG}]},
        {
            "type": "message",
            "role": "user",
            "content": [
                {
                    "type": "input_text",
                    "text": "<environment_context>\n  <cwd>/home/me</cwd>\n</environment_context>",
                }
            ],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the test."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "**Looking**"}],
            "content": None,
            "encrypted_content": "gAAAA",
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "name": "shell_0",
            "arguments": '{"command":["bash","-lc","ls"],"workdir":"/home/me"}',
            "call_id": "call_1",
            "status": "completed",
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": '{"output":"a.py","metadata":{"exit_code":0}}',
        },
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": "*** Begin Patch\n*** End Patch",
        },
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "done"}],
        },
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ]


def responses_request() -> dict[str, Any]:
    """Return a `/v1/responses` request, a few turns into a task."""
    return {
        "model": NAME,
        "instructions": LONG,
        "input": responses_input(),
        "tools": responses_tools(),
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0198-cafe",
        "text": {"verbosity": "low"},
        "service_tier": "auto",
        "client_metadata": {"installation": "x"},
        "truncation": "disabled",
    }


def messages_request() -> dict[str, Any]:
    """Return a `/v1/messages` request, a few turns into a task."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools: list[dict[str, Any]] = [
        {"name": f"{name}_{number}", "description": LONG, "input_schema": schema(number)}
        for number, name in enumerate(NAMES * 5)
    ]
    tools[-1] |= cached
    tools += [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    turns: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nBe careful.\n</system-reminder>"},
                {"type": "text", "text": "Fix the test.", **cached},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Which test?", "signature": "ErUB"},
                {"type": "redacted_thinking", "data": "Em8"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_01", "name": "glob_4", "input": {"command": ["*"]}},
                {"type": "tool_use", "id": "toolu_02", "name": "grep_5", "input": {"command": ["x"]}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": "a.py", "is_error": False},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_02",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no such file"}],
                    **cached,
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    return {
        "model": NAME,
        "max_tokens": 32_000,
        "messages": turns,
        "system": [{"type": "text", "text": "You are an agent.", **cached}, {"type": "text", "text": LONG}],
        "tools": tools,
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "enabled", "budget_tokens": 31_999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    }
