"""Seeded random answer rules, each with a judge that checks answers, and random answers that a rule
allows."""

import ast
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jsonschema

from node.content.calls.rules import AnswerRule
from node.content.masks import Masks

STEPS_MAX = 4_000
CLOSING = re.compile(rb'["}\])]|[0-9]|true|false|null|<\|end')
PATTERNS = ["^[a-z]{2,5}$", "^(ab|cd)+$", r"^[0-9]{3}-[0-9]{2}$", "^[A-Z][a-z]*( [a-z]+){0,2}$"]
REGEXES = [
    r"[a-f]{1,4}(-[0-9]+)?",
    r"(yes|no|maybe)",
    r"[0-9]{1,3}/[0-9]{1,2}",
    r"[^\n\"]{0,8};",
    r"é+[xyz]?",
]


@dataclass(frozen=True)
class RuleCase:
    """A rule, and a judge that raises an error if an answer breaks the rule."""

    rule: AnswerRule
    judge: Callable[[str], object]


def rule_case(seed: int) -> RuleCase:
    """Return the case for a seed: mostly schemas, with some regular expressions, choices and grammars."""
    rng = random.Random(seed)
    match seed % 8:
        case 5:
            text = rng.choice(REGEXES) + rng.choice(["", rng.choice(REGEXES)])
            return RuleCase(AnswerRule("regex", text), lambda answer: _matched(text, answer))
        case 6:
            words = sorted({_word(rng) for _ in range(rng.randint(1, 6))})
            return RuleCase(AnswerRule("choice", json.dumps(words)), words.index)
        case 7:
            return RuleCase(AnswerRule("grammar", _grammar(rng)), ast.literal_eval)
        case _:
            schema = _schema(rng, 3)
            if rng.random() < 0.3:
                schema = _recursive(rng)
            judge = jsonschema.Draft202012Validator(schema)
            return RuleCase(AnswerRule("schema", json.dumps(schema)), lambda answer: _judged(judge, answer))


def _matched(text: str, answer: str) -> None:
    assert re.fullmatch(text, answer), answer


def _judged(judge: Any, answer: str) -> None:
    judge.validate(json.loads(answer))


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcüß世 /\"\\'") for _ in range(rng.randint(1, 6)))


def _grammar(rng: random.Random) -> str:
    """Return a grammar of nested lists and tuples of numbers and words, in Lark's syntax or as GBNF."""
    if rng.random() < 0.5:
        words = " | ".join(f"\"'{word}'\"" for word in ("a", "bc", "dé"))
        return f'root ::= "[" item (", " item)* "]"\nitem ::= root | [0-9] | {words}\n'
    most = rng.randint(1, 4)
    return (
        f'start: list\nlist: "[" [item (", " item){{0,{most}}}] "]"\n'
        "item: list | NUMBER | WORD\nNUMBER: /-?[1-9][0-9]{0,4}/\nWORD: /'[a-zé]{1,6}'/\n"
    )


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "array", "anyOf"]
    match rng.choice(kinds):
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 9)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": rng.randint(1, 9)}
        case "enum":
            return {
                "enum": [_word(rng), rng.randint(0, 9), None, [1, {"a": _word(rng)}]][: rng.randint(1, 4)]
            }
        case "const":
            return {"const": rng.choice([_word(rng), 7, True, {"k": [1]}])}
        case "array":
            low = rng.randint(0, 2)
            bounds = {"minItems": low, "maxItems": low + rng.randint(0, 2)}
            return {"type": "array", "items": _schema(rng, depth - 1), **bounds}
        case "anyOf":
            return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
        case "object":
            names = [f"{_word(rng)}{number}" for number in range(rng.randint(0, 4))]
            required = [name for name in names if rng.random() < 0.6]
            properties = {name: _schema(rng, depth - 1) for name in names}
            table = {"type": "object", "properties": properties, "required": required}
            return table | ({"additionalProperties": False} if rng.random() < 0.8 else {})
        case kind:
            return {"type": kind}


def _recursive(rng: random.Random) -> dict[str, Any]:
    leaf = _schema(rng, 1)
    node = {
        "type": "object",
        "properties": {"value": {"$ref": "#/$defs/leaf"}, "next": {"$ref": "#/$defs/more"}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    more = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
    return {"$ref": "#/$defs/node", "$defs": {"node": node, "leaf": leaf, "more": more}}


def draw_answer(masks: Masks, tokens: list[bytes], rule: AnswerRule, seed: int, replays: int = 0) -> str:
    """Return a random answer that the rule allows, with a preference for tokens that end it. The rule is
    dropped up to `replays` times, and the tokens so far are fed again, as after the death of a process.
    """
    rng = random.Random(seed)
    bits, is_over = masks.begin(1, rule, [])
    made: list[int] = []
    stops = {number for number, token in enumerate(tokens) if not token}
    while not is_over:
        allowed = [number for number in range(len(tokens)) if bits[number // 8] >> number % 8 & 1]
        ends = stops.intersection(allowed)
        if ends and (len(ends) == len(allowed) or rng.random() < 0.5):
            break
        allowed = [number for number in allowed if number not in stops]
        closing = [number for number in allowed if CLOSING.search(tokens[number])]
        made.append(rng.choice(closing if closing and rng.random() < 0.7 else allowed))
        assert len(made) < STEPS_MAX, "the answer did not end in time"
        if replays and rng.random() < 0.2:
            replays -= 1
            masks.end(1)
            bits, is_over = masks.begin(1, rule, made)
        else:
            bits, is_over = masks.advance(1, made[-1])
    masks.end(1)
    return b"".join(tokens[number] for number in made).decode()
