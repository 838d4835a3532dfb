"""Parts of an answer's text, as parsers return them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without the tags around it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call; its arguments follow."""

    index: int
    """Index of the call within its answer, from 0."""
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """Next part of a call's arguments, which are the text of a JSON object."""

    index: int
    text: str


ParsedEvent = Content | Reasoning | CallStart | Arguments
