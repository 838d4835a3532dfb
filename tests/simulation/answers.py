"""Answers of requests, collected from what a scheduler core in the same process publishes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from protocol.requests import Finish, RequestOutputs
from protocol.rows import LogprobRows, OutputRows


class PositionScore(NamedTuple):
    """Log-probabilities at one position."""

    token_rank: int
    ids: list[int]
    """The token itself, then the most likely ones."""
    values: list[float]


@dataclass(kw_only=True)
class CollectedAnswer:
    tokens: list[int] = field(default_factory=list)
    scores: dict[int, PositionScore] = field(default_factory=dict)
    """By position, as first received."""
    finish: Finish | None = None


def receive(outputs: RequestOutputs, answers: Mapping[int, CollectedAnswer], exact: bool = True) -> None:
    """Add a message to the answers, given by the numbers of their requests. `exact`: repeated scores are the same."""
    for number, index, token in zip(*map(np.ndarray.tolist, OutputRows.from_message(outputs)), strict=True):
        assert index == len(answers[number].tokens)
        answers[number].tokens.append(token)
    if outputs.logprobs is not None:
        at, rows = 0, LogprobRows.from_message(outputs.logprobs)
        for number, position, count, rank in zip(*(column.tolist() for column in rows[:4]), strict=True):
            part = slice(at, at := at + count)
            score = PositionScore(rank, rows.token_ids[part].tolist(), rows.values[part].tolist())
            first = answers[number].scores.setdefault(position, score)
            assert first == score or not exact, "a repeated entry differs from the first one"
    for finish in outputs.finished:
        answers[finish.number].finish = finish
