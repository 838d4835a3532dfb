"""Streams against a server whose answers are known, for as long as a soak runs."""

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from openai import APIError, AsyncOpenAI

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
Answer = dict[int, tuple[str, str | None]]
"""Choice -> text and finish reason."""


def bodies(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests: plain and sampled ones, grammars, penalties, log-probabilities, n = 3."""
    found: list[dict[str, Any]] = []
    for i in range(count):
        body: dict[str, Any] = {
            "prompt": f"Number {i} is", "max_tokens": max_tokens, "seed": i, "temperature": float(i % 2),
            "extra_body": {"ignore_eos": True},
        }  # fmt: skip
        match i % 6:
            case 1:
                body |= {"n": 3, "max_tokens": max_tokens // 2, "temperature": 1.0}
            case 2:
                body["extra_body"] = {"structured_outputs": {"json": SCHEMA}}
            case 3:
                body |= {"frequency_penalty": 0.5, "logprobs": 2}
        found.append(body)
    return found


@dataclass
class Load:
    """Endless streams. An answer that differs from that of the first, undisturbed run is a failure."""

    client: AsyncOpenAI
    bodies: list[dict[str, Any]]
    expected: dict[int, Answer] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    last_token: float = 0.0
    """When the last token of any stream arrived: monotonic seconds."""
    num_characters: int = 0
    """Characters of all streams so far."""
    model: str = ""

    async def learn(self) -> None:
        """Take the answers of a server without faults as the right ones."""
        answers = await asyncio.gather(*map(self.ask, range(len(self.bodies))))
        self.expected = dict(enumerate(answers))

    async def ask(self, index: int) -> Answer:
        """Return the answer to one request. Raises: openai.APIError"""
        answer: Answer = {}
        self.model = self.model or (await self.client.models.list()).data[0].id
        stream = await self.client.completions.create(model=self.model, stream=True, **self.bodies[index])
        async for chunk in stream:
            self.last_token = time.monotonic()
            for choice in chunk.choices:
                self.num_characters += len(choice.text)
                text, reason = answer.get(choice.index, ("", None))
                answer[choice.index] = text + choice.text, choice.finish_reason or reason
        return answer

    async def stream(self, index: int, until: float) -> None:
        """Ask one request again and again, until a monotonic time."""
        rng = random.Random(index)
        while time.monotonic() < until:
            try:
                answer = await self.ask(index)
            except APIError as error:
                self.failures.append(f"request {index}: {error}")
            else:
                self.counts["requests"] += 1
                if answer != self.expected[index]:
                    self.failures.append(f"request {index}: {answer}, not {self.expected[index]}")
            await asyncio.sleep(rng.random())
