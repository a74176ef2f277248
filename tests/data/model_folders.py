"""Small Hugging Face folders: configuration, tokenizer and chat template, written without transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<pad>")


def write_tokenizer(path: Path, **more: Any) -> None:
    """Return a tokenizer whose tokens are the ASCII characters and the special ones."""
    tokenizers = pytest.importorskip("tokenizers")
    letters = {
        token: number for number, token in enumerate([*SPECIAL, *map(chr, range(32, 127)), "\n", "?!"])
    }
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters | more.pop("ids", {}), unk_token="?!"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    known.decoder = tokenizers.decoders.Fuse()
    known.add_special_tokens([*SPECIAL])
    if more:
        known.enable_truncation(**more)
    known.save(str(path))


def write_folder(
    folder: Path, kind: str = "Qwen2ForCausalLM", *, template: str = TEMPLATE, **config: Any
) -> Path:
    """Write a folder of a model of this class, without weights."""
    folder.mkdir(exist_ok=True)
    usual = {"architectures": [kind], "vocab_size": 128, "max_position_embeddings": 64, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(usual | config))
    special = {"eos_token": "<|end|>", "pad_token": {"content": "<pad>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    write_tokenizer(folder / "tokenizer.json")
    return folder


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    """Records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path
