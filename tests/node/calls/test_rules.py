"""Answers constrained to schemas, regular expressions, grammars and tool calls: every answer parses and is
valid."""

import json
import pydoc_data.topics
from typing import Any

import pytest
import tokenizers

from node.content.calls.formats import HARMONY, REASONING, CallFormat
from node.content.calls.reading import AnswerReader
from node.content.calls.rules import (
    AnswerRule,
    ModelMarks,
    RuleTool,
    grammar_of,
    held_calls,
    written_calls,
)
from node.content.fenced_text import FencedText
from node.content.masks import STOPS_KEPT_MAX, Masks
from node.content.token_bytes import special_ids, token_bytes
from node.errors import UsageError
from tests.node.calls.rule_cases import draw_answer, rule_case
from tests.node.calls.test_reading import calls_of, joined

BYTES = [bytes([each]) for each in range(256)] + [b""]
MARKS = ["<end>", "[TOOL_CALLS]", "<tool_call>", "</tool_call>", *HARMONY]


def of_bytes(template: str = "") -> Masks:
    """Return the masks of a model of bytes whose token 256 ends an answer."""
    return Masks(list(BYTES), {256: "<end>"}, [256], template, None)


def trained() -> tuple[Any, list[bytes]]:
    """Return a tokenizer with special tokens, and the bytes of its tokens."""
    known = tokenizers.Tokenizer(tokenizers.models.BPE())
    known.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    known.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=MARKS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = '{"name": "look", "arguments": {}} true false null [1, 2] äöü'
    known.train_from_iterator([*list(pydoc_data.topics.topics.values())[:4], words * 9], trainer)
    return known, token_bytes(known, known.get_vocab_size())


@pytest.mark.parametrize("count", [24, pytest.param(200, marks=pytest.mark.slow)])
def test_every_answer_under_a_rule_is_valid(count: int) -> None:
    known, tokens = trained()
    vocabularies = [
        (of_bytes(), BYTES),
        (Masks(list(tokens), special_ids(known), [0], "", known), tokens),
    ]
    for seed in range(count):
        case = rule_case(seed)
        for masks, table in vocabularies:
            for answer in {draw_answer(masks, table, case.rule, seed, replays) for replays in (0, 3)}:
                try:
                    case.judge(answer)
                except Exception as error:
                    raise AssertionError(f"seed {seed}: {answer!r}: {case.rule.text}") from error


TOOLS = (
    RuleTool(
        "look",
        '{"type":"object","properties":{"at":{"type":"integer"}},"required":["at"],'
        '"additionalProperties":false}',
    ),
    RuleTool(
        'say "x"',
        '{"$ref":"#/$defs/a","$defs":{"a":{"type":"object","properties":{},"additionalProperties":false}}}',
    ),
)
SCHEMAS = {tool.name: json.loads(tool.schema) for tool in TOOLS}


@pytest.mark.parametrize(
    "calls", ["hermes", "llama", "mistral", "deepseek", "granite", "harmony", "gemma", ""]
)
def test_forced_calls_parse_under_the_constraint_that_produced_them(calls: CallFormat) -> None:
    known, tokens = trained()
    special = special_ids(known)
    masks = Masks(list(tokens), special, [0], "```", known)
    table = [special.get(number, "").encode() if number else b"" for number in range(len(tokens))]
    table = [own or text for own, text in zip(tokens, table, strict=True)]
    written = written_calls(calls)
    for seed, is_single in ((1, True), (2, False), (3, False)):
        rule = AnswerRule("calls", "", TOOLS, written, is_single=is_single)
        text = draw_answer(masks, table, rule, seed)
        reader = AnswerReader(written, tools=SCHEMAS)
        found = calls_of(joined(reader.push(text) + reader.finish()))
        assert found, text
        assert len(found) == 1 or not is_single
        for name, arguments in found:
            assert set(arguments) == ({"at"} if name == "look" else set()), text


@pytest.mark.parametrize(
    ("calls", "has_marks"),
    [(each, True) for each in ("hermes", "llama", "mistral", "deepseek", "granite", "harmony")]
    + [(each, False) for each in ("hermes", "llama", "mistral", "deepseek", "granite")],
)
def test_calls_after_any_leading_text_follow_their_schema(calls: CallFormat, has_marks: bool) -> None:
    known, tokens = trained()
    masks, table = of_bytes(), BYTES
    if has_marks:
        special = special_ids(known)
        masks, table = Masks(list(tokens), special, [0], "", known), list(tokens)
        table = [
            own or special.get(number, "").encode() if number else b"" for number, own in enumerate(table)
        ]

    def allows(text: str) -> bool:
        written = known.encode(text, add_special_tokens=False).ids if has_marks else list(text.encode())
        try:
            bits, is_over = masks.begin(1, AnswerRule("text", "", TOOLS[:1], calls), list(written))
        except UsageError:
            return False
        return is_over or bool(bits[0] & 1 if has_marks else masks._rules[1].is_accepting())

    lead = {"harmony": "", "llama": "I {look}. <|python_tag|>"}.get(calls, "I look [1] <tool {. ")
    said = "<|channel|>final<|message|>" if calls == "harmony" else ""
    assert allows(f"{said}No <tool_cal {{call.")
    for seed in (1, 3):
        call = draw_answer(masks, table, AnswerRule("calls", "", TOOLS[:1], calls), seed)
        assert allows(call)
        assert allows(lead + call)
        assert not allows(call.replace('"at"', '"ut"'))
        assert not allows(lead + call.replace('"at"', '"ut"'))
        assert not allows(lead + call[: call.index('"at"')]), "an answer may end inside a call"
        reader = AnswerReader(calls, tools=SCHEMAS)
        assert calls_of(joined(reader.push(lead + call) + reader.finish()))


def test_call_formats_without_json_do_not_constrain_strict_calls() -> None:
    rule = AnswerRule("text", "", TOOLS)
    assert [held_calls(rule, calls) for calls in ("gemma", "", "hermes")] == [None, None, "hermes"]
    assert held_calls(AnswerRule("calls", "", TOOLS), "gemma") == "json"
    assert held_calls(AnswerRule("schema"), "gemma") == "gemma"


def test_reasoning_precedes_constrained_text() -> None:
    rule = AnswerRule("choice", '["yes","no"]', reasoning=0, is_reasoning=True)
    masks = of_bytes()
    begin, end = REASONING[0]
    _, is_over = masks.begin(1, rule, list(f"any {{thing}}{end}\n\nye".encode()))
    assert not is_over
    with pytest.raises(UsageError, match="does not allow"):
        masks.begin(2, rule, list(f"any{end}\nmaybe".encode()))
    free = AnswerRule("choice", '["yes","no"]', reasoning=0)
    for said in ("yes", f"{begin}so{end}no"):
        masks.begin(3, free, list(said.encode()))
    with pytest.raises(UsageError):
        masks.begin(3, free, list(b"<tool"))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (AnswerRule("schema", '{"$ref":"http://127.0.0.1:1/x"}'), "not present in a registry"),
        (AnswerRule("schema", '{"$ref":"file:///etc/passwd"}'), "not present in a registry|retriev"),
        (AnswerRule("schema", '{"not":{"type":"string"}}'), "Unimplemented keys"),
        (AnswerRule("schema", "[]"), "no object"),
        (AnswerRule("schema", '{"type":"object","properties":3}'), "."),
        (AnswerRule("regex", "(a"), "invalid regex"),
        (AnswerRule("grammar", 'start: "a" missing'), "missing"),
        (AnswerRule("grammar", "root ::= ("), "."),
        (AnswerRule("grammar", "start: " + "(" * 3_000 + '"a"' + ")" * 3_000), "nested"),
        (AnswerRule("schema", json.dumps({"enum": ["x" * 1_000 + str(n) for n in range(200)]}) + " "), None),
    ],
)  # fmt: skip
def test_impossible_rules_are_refused(rule: AnswerRule, reason: str | None) -> None:
    if reason is None:
        of_bytes().begin(1, rule, [])
        return
    with pytest.raises(UsageError, match=reason):
        of_bytes().begin(1, rule, [])


def test_tokens_are_spelled_as_llguidance_spells_them() -> None:
    import llguidance

    known, tokens = trained()
    oracle = llguidance.LLTokenizer(known.to_str())
    special = special_ids(known)
    for number, token in enumerate(tokens):
        # llguidance reads 0xff as the start of a special token.
        if number not in special and token != b"\xff":
            assert oracle.decode_bytes([number]) == token
    pieces = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {"<unk>": 0, "<0x0A>": 1, "\u2581": 2, "a": 3, "\u2581a": 4},
            [("\u2581", "a")],
            byte_fallback=True,
        )
    )
    pieces.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("\u2581", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    assert token_bytes(pieces, 5) == [b"<unk>", b"\n", b" ", b"a", b" a"]


def test_a_grammar_names_special_tokens_by_their_ids() -> None:
    marks = ModelMarks(lambda name: 7 if name == "[TOOL_CALLS]" else -1)
    text = grammar_of(AnswerRule("calls", "", TOOLS, "mistral"), marks)
    assert "<[7]>" in text
    assert "[TOOL_CALLS]" not in text


async def test_each_service_of_a_process_ends_answers_by_its_own_ids() -> None:
    rule, more = AnswerRule("regex", "a+"), 1 << ord("a")
    text = await FencedText.open(b"", allow_unfenced=True)
    try:
        for number in range(STOPS_KEPT_MAX):
            mask = await text.begin_rule(number, rule, [ord("a")], [number])
            assert int.from_bytes(mask.bits, "little") == more | 1 << number
        with pytest.raises(UsageError, match="ask again"):
            await text.begin_rule(50, rule, [], [50])
        await text.end_rule(1)
        mask = await text.begin_rule(50, rule, [ord("a")], [50])
        assert int.from_bytes(mask.bits, "little") == more | 1 << 50
        assert (await text.advance_rule(0, 0)).is_over
        with pytest.raises(UsageError, match="follows a rule"):
            await text.advance_rule(1, 1)
    finally:
        await text.aclose()
