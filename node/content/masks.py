"""Masks of the tokens that an answer under a rule may choose next: `llguidance`, behind the fence.

A mask has one bit per token; the lowest bit of a byte comes first. The cost of a grammar is bounded by the
library's limits on its size and on the work of each step, by the memory of the process, and by the time
allowed for an answer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from node.content.calls.rules import AnswerRule, ModelMarks, grammar_of
from node.errors import UsageError
from node.invocation import install_command

RULES_MAX = 512
"""Maximum number of concurrent answers with a rule in one process: 8 for each of the 64 requests that a node
answers simultaneously."""
STOPS_KEPT_MAX = 4
"""Number of sets of stop ids kept. For each set, llguidance builds tables of the whole vocabulary."""
_GBNF = "::="


class _Vocabulary:
    """A vocabulary in llguidance's form."""

    unk_token_id = bos_token_id = None

    def __init__(self, tokens: list[bytes], special: dict[int, str], end: int, known: Any) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special)
        self.eos_token_id = end
        self._known = known

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if self._known is None:
            return list(data)
        found = self._known.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        return list(found.ids)


class Masks:
    """The rules of one model's current answers. Raises UsageError if llguidance is not installed."""

    def __init__(
        self, tokens: list[bytes], special: dict[int, str], stops: list[int], template: str, known: Any
    ) -> None:
        """`tokens` are the bytes of each token, `special` the names of special tokens by id, and `stops` the
        ids that end an answer."""
        try:
            import llguidance
            import llguidance.gbnf_to_lark
        except ImportError:
            raise UsageError(
                "llguidance, which keeps answers to a schema or a grammar, is not installed on this node",
                install_command("llguidance"),
            ) from None
        self._count = len(tokens)
        rows = [special[number].encode("utf-8", "replace") if number in special else row
                for number, row in enumerate(tokens)]  # fmt: skip
        # If no token ends an answer, use an id that the model does not have.
        self._ends = [stop for stop in stops if stop < len(rows)] or [len(rows)]
        if self._ends == [len(rows)]:
            rows.append(b"<end>")
            special = special | {self._count: "<end>"}
        ids = {name: number for number, name in special.items()}
        self._marks = ModelMarks(lambda mark: ids.get(mark, -1), template)
        vocabulary = _Vocabulary(rows, special, self._ends[0], known)
        self._library = llguidance
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(vocabulary), n_vocab=len(rows), eos_token=self._ends
        )
        self._rules: dict[int, Any] = {}

    @property
    def is_idle(self) -> bool:
        """Return whether no current answer follows a rule."""
        return not self._rules

    def begin(self, number: int, rule: AnswerRule, tokens: list[int]) -> tuple[bytes, bool]:
        """Begin an answer that already has these tokens. Return the next mask, and whether the answer is
        complete. Raises UsageError if the rule cannot be followed."""
        library = self._library
        no_grammar = library.gbnf_to_lark.GbnfToLarkError
        try:
            if rule.kind == "grammar" and _GBNF in rule.text:
                text = library.gbnf_to_lark.gbnf_to_lark(rule.text)
                rule = msgspec.structs.replace(rule, text=text)
            matcher = library.LLMatcher(self._tokenizer, grammar_of(rule, self._marks), log_level=0)
        except (no_grammar, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UsageError(_first_line(str(error))) from None
        self._check(matcher)
        if tokens and not matcher.consume_tokens(tokens):
            raise UsageError("the rule does not allow tokens of the answer so far")
        if len(self._rules) >= RULES_MAX:
            raise UsageError(f"{RULES_MAX} answers already follow a rule here; ask again later")
        self._rules[number] = matcher
        return self._mask(matcher)

    def advance(self, number: int, token: int) -> tuple[bytes, bool]:
        """Add the chosen token. Return the next mask, and whether the answer is complete. Raises UsageError
        if the answer has not begun, or the token is not allowed."""
        matcher = self._rules.get(number)
        if matcher is None:
            raise UsageError("no answer with this number follows a rule")
        matcher.consume_token(token)
        return self._mask(matcher)

    def end(self, number: int) -> None:
        """Forget an answer."""
        self._rules.pop(number, None)

    def _mask(self, matcher: Any) -> tuple[bytes, bool]:
        if matcher.is_stopped():
            self._check(matcher)
            return b"", True
        mask = bytearray(matcher.compute_bitmask()[: (self._count + 7) // 8])
        self._check(matcher)
        if self._count % 8:
            mask[-1] &= (1 << self._count % 8) - 1
        is_over = matcher.is_stopped() or not any(mask)  # only the invented stop id is left
        return bytes(mask), is_over

    @staticmethod
    def _check(matcher: Any) -> None:
        if matcher.is_error():
            raise UsageError(_first_line(matcher.get_error()))


class ServiceMasks:
    """The masks of services that share a tokenizer, or that work on bytes. They differ in the ids that end
    answers."""

    def __init__(self, make: Callable[[list[int]], Masks]) -> None:
        """`make` returns the masks for a set of ids that end an answer."""
        self._make = make
        self._kept: dict[tuple[int, ...], Masks] = {}
        self._followed: dict[int, Masks] = {}

    def begin(
        self, number: int, rule: AnswerRule, tokens: list[int], stops: Sequence[int]
    ) -> tuple[bytes, bool]:
        """Begin an answer that may end with `stops`; otherwise like `Masks.begin`."""
        self.end(number)
        key = tuple(stops)
        masks = self._kept.pop(key, None) or self._made(key)
        self._kept[key] = masks
        found = masks.begin(number, rule, tokens)
        self._followed[number] = masks
        return found

    def _made(self, stops: tuple[int, ...]) -> Masks:
        if len(self._kept) >= STOPS_KEPT_MAX:
            idle = [each for each, masks in self._kept.items() if masks.is_idle]
            if not idle:
                raise UsageError(
                    f"{STOPS_KEPT_MAX} services with this tokenizer already follow rules; ask again later"
                )
            del self._kept[idle[0]]
        return self._make(list(stops))

    def advance(self, number: int, token: int) -> tuple[bytes, bool]:
        """Do the same as `Masks.advance`."""
        masks = self._followed.get(number)
        if masks is None:
            raise UsageError("no answer with this number follows a rule")
        return masks.advance(number, token)

    def end(self, number: int) -> None:
        """Forget an answer."""
        masks = self._followed.pop(number, None)
        if masks is not None:
            masks.end(number)


def _first_line(text: str) -> str:
    return (text.splitlines() or ["it cannot be compiled"])[0][:300]
