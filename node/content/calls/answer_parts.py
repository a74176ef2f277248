"""The parts that an answer is read as: text, reasoning, and calls of tools (`node.content.calls.reading`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TextPart:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """More of the reasoning before it."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """The call with this number, from 0, is of this tool."""

    number: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON of its arguments."""

    number: int
    text: str


@dataclass(frozen=True)
class CallOver:
    """The call is complete."""

    number: int


Part = TextPart | ReasoningPart | CallBegun | CallArguments | CallOver
