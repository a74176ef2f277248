"""The sandboxed process that loads a served model's tokenizer and chat template."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from crypto.errors import RemoteProtocolError
from node.content.fenced_text import MESSAGES_MAX, FencedText, TextLost
from node.content.text_files import (
    CHUNK_BYTES,
    FILES_BYTES_MAX,
    TextChunks,
    collect,
    keep,
    read_files,
    read_list,
)
from node.content.text_process import read_facts
from node.content.text_questions import TextFacts
from node.errors import UsageError
from node.storage.blobs import hash_of

TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"?": 0, "hello": 1, "user": 2}, "unk_token": "?"},
    "pre_tokenizer": {"type": "Whitespace"},
}
TEMPLATE = (
    "{% if messages[0]['content'] == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0]['content'] == 'grow' %}{{ ('x' * 1000000000) ~ ('y' * 1000000000) }}"
    "{% else %}{{ messages[0]['role'] }} {{ messages[0]['content'] }}{% endif %}"
)


def write_folder(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, "x", -1]}))
    return folder


def test_an_untrusted_template_is_limited_in_memory_and_time(tmp_path: Path) -> None:
    data = collect(write_folder(tmp_path / "model"))

    async def main() -> None:
        text = await FencedText.open(data, allow_unfenced=False)
        try:
            assert text.facts == TextFacts((0, 2), 3, True, calls="hermes")
            assert await text.encode("hello there") == [1, 0]
            assert await text.render([{"role": "user", "content": "hello"}]) == [2, 1]
            with pytest.raises(UsageError, match="memory"):
                await text.render([{"role": "user", "content": "grow"}])
        finally:
            await text.aclose()
        text = await FencedText.open(data, allow_unfenced=False, answer_seconds=0.5)
        try:
            with pytest.raises(TextLost, match="longer than") as lost:
                await text.render([{"role": "user", "content": "loop"}])
            assert lost.value.is_own
            with pytest.raises(TextLost) as lost:
                await text.encode("hello")
            assert not lost.value.is_own
        finally:
            await text.aclose()

    trio.run(main)


async def test_a_chat_with_too_many_messages_is_refused_not_truncated(tmp_path: Path) -> None:
    text = await FencedText.open(collect(write_folder(tmp_path / "model")), allow_unfenced=True)
    try:
        with pytest.raises(UsageError, match="4,097 messages"):
            await text.render([{"role": "user", "content": "a"}] * (MESSAGES_MAX + 1))
    finally:
        await text.aclose()


async def test_tools_with_too_deep_nesting_are_refused(tmp_path: Path) -> None:
    template = "{{ tools | tojson }}{{ messages[0]['content'] }}"
    text = await FencedText.open(collect(write_folder(tmp_path / "model", template)), allow_unfenced=True)
    deep: dict[str, Any] = {}
    try:
        for _ in range(20_000):
            deep = {"items": deep}
        with pytest.raises(UsageError, match="nested too deeply"):
            await text.render([{"role": "user", "content": "hello"}], [deep])
        assert await text.encode("hello") == [1]
    finally:
        await text.aclose()


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "tokenizer.json").write_text('{"model": 7}')
    data = collect(folder)

    async def main() -> None:
        with pytest.raises(UsageError, match=r"is not a readable tokenizer\.json"):
            await FencedText.open(data, allow_unfenced=False)

    trio.run(main)


def test_text_files_are_sent_as_chunks_that_a_list_names(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", "x" * (CHUNK_BYTES + 7))
    (folder / "model.safetensors").write_bytes(b"weights are no part of it")
    data = collect(folder)
    blobs: dict[bytes, bytes] = {}

    def put(part: memoryview) -> bytes:
        blobs[hash_of(part)] = bytes(part)
        return hash_of(part)

    name, sizes = keep(data, put)
    assert {each: len(blobs[each]) for each in blobs} == sizes
    listed = read_list(blobs[name])
    assert b"".join(blobs[each] for each in listed.sizes) == data
    files = read_files(data)
    assert sorted(files) == ["chat_template.jinja", "generation_config.json", "tokenizer.json"]


def test_a_folder_without_a_tokenizer_has_no_text_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert collect(tmp_path) == b""


def test_malformed_lists_and_files_are_refused() -> None:
    with pytest.raises(ValueError, match="number of chunks"):
        TextChunks(bytes(64), 5)
    with pytest.raises(RemoteProtocolError):
        read_list(b"\x92\xc4\x01a\x05")
    with pytest.raises(RemoteProtocolError):
        read_files(b"\x81\xa8weights!\xc4\x01a")


def test_files_that_are_too_large_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    os.truncate(folder / "tokenizer.json", FILES_BYTES_MAX + 1)
    with pytest.raises(UsageError, match="of tokenizer and configuration"):
        collect(folder)


def test_a_model_folder_gives_the_default_sampling(tmp_path: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 7, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(asked))
    facts = read_facts(tmp_path, 9, has_template=False)
    assert (facts.temperature, facts.top_k, facts.top_p, facts.stops) == (0.6, 20, 1.0, (5,))
    (tmp_path / "generation_config.json").write_text(json.dumps(asked | {"do_sample": False}))
    assert read_facts(tmp_path, 9, has_template=False).temperature == 0.0
