"""The parts into which an answer is separated: text, reasoning, and tool calls
(`node.content.calls.reading`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextPart:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call of this tool begins. Calls are numbered from 0."""

    number: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON of a call's arguments."""

    number: int
    text: str


@dataclass(frozen=True)
class CallOver:
    """The call is complete."""

    number: int


Part = TextPart | ReasoningPart | CallBegun | CallArguments | CallOver


class AnswerParts:
    """The parts of one answer that were read but not taken yet. Calls are numbered in the order in which they
    begin."""

    def __init__(self) -> None:
        self.calls = 0
        """Number of complete calls."""
        self.number = 0
        """The number of the call that is being read, or else of the next call."""
        self._is_in_call = False
        self._parts: list[Part] = []

    def take(self) -> list[Part]:
        """Return and remove the parts; neighbouring parts of the same kind are joined."""
        parts, self._parts = self._parts, []
        joined: list[Part] = []
        for part in parts:
            last = joined[-1] if joined else None
            if isinstance(part, TextPart | ReasoningPart) and type(last) is type(part):
                assert isinstance(last, TextPart | ReasoningPart)
                joined[-1] = type(part)(last.text + part.text)
            else:
                joined.append(part)
        return joined

    def say(self, text: str) -> None:
        """Add text of the answer."""
        if text:
            self._parts.append(TextPart(text))

    def reason(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._parts.append(ReasoningPart(text))

    def begin(self, name: str) -> None:
        """Begin a call of this tool."""
        self.leave()
        self._is_in_call = True
        self._parts.append(CallBegun(self.number, name))

    def argue(self, text: str) -> None:
        """Add to the arguments of the call."""
        if text:
            self._parts.append(CallArguments(self.number, text))

    def end(self) -> None:
        """End the call: it is complete."""
        self._parts.append(CallOver(self.number))
        self.leave()
        self.calls += 1

    def leave(self) -> None:
        """Count a call that has begun even if it is malformed, so that the next call has a different
        number."""
        self.number += self._is_in_call
        self._is_in_call = False
