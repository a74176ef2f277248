"""The parts that an answer is read as: text, reasoning, and calls of tools (`node.content.calls.reading`)."""

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
    """A call, numbered from 0, of this tool begins."""

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
