"""What parsers make of an answer's text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model wrote for itself, without the tags around it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool is called; the text of its arguments follows."""

    index: int
    """Of the call within its answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | Arguments
