"""Chat templates in the style of model families, and conversations to render with them."""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "which"},
                    "count": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["word"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
ARGUMENTS: dict[str, Any] = {"word": 'Grüße, "you" {a} <b>', "count": 3, "tags": ["x", "y, z"]}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "look_up", "arguments": ARGUMENTS}}
OTHER = {"type": "function", "id": "123456789", "function": {"name": "now", "arguments": {}}}
SYSTEM = {"role": "system", "content": "Be short.  "}
USER = {"role": "user", "content": "  Hello,\n<you> & 世界 "}
ASSISTANT = {"role": "assistant", "content": "Hi 'there'. "}
CHATS: list[list[dict[str, Any]]] = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [SYSTEM, USER, ASSISTANT, USER, ASSISTANT],
    [SYSTEM, USER, {**ASSISTANT, "content": "<think>\nhm\n</think>\n\nyes"}, USER],
    [USER, USER],
]
CALLED: list[list[dict[str, Any]]] = [
    [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    [
        SYSTEM,
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL, OTHER]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "a greeting"},
        {"role": "tool", "tool_call_id": "123456789", "content": "noon"},
    ],
    [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": '{"found": true}'},
        ASSISTANT,
        USER,
    ],
]
