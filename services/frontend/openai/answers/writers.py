"""The receivers of chunks. `events` has the writers of streams; answers that are sent as a whole are collected here."""

from abc import ABC, abstractmethod
from typing import Protocol

from services.frontend.openai.answers.chunk import Chunk


class ChoiceWriter(ABC):
    """Takes the chunks of one choice; returns the bytes to write for each."""

    __slots__ = ()

    def text(self, text: str) -> bytes:
        """Take a chunk that is only text; not empty."""
        return self.chunk(Chunk(text))

    @abstractmethod
    def chunk(self, chunk: Chunk) -> bytes: ...


class AnswerWriter(Protocol):
    """The writers of all choices of one HTTP response."""

    def next_choice(self) -> ChoiceWriter:
        """Return the writer of the next choice."""
        ...


class ChunkCollector(ChoiceWriter):
    """Keeps the chunks of a choice whose answer is sent as a whole."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def chunk(self, chunk: Chunk) -> bytes:
        self.chunks.append(chunk)
        return b""


class AnswerCollector:
    """Keeps the chunks of all choices of a response that is not streamed."""

    def __init__(self) -> None:
        self._choices: list[ChunkCollector] = []

    def next_choice(self) -> ChunkCollector:
        self._choices.append(ChunkCollector())
        return self._choices[-1]

    def answers(self) -> list[Chunk]:
        return [Chunk.joined(choice.chunks) for choice in self._choices]
