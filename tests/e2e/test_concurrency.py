"""Same tokens (docs/invariants.md): requests at the same time get the outputs that each gets alone, in float32."""

import asyncio
import random
from typing import Any

from openai import AsyncOpenAI

from tests.e2e.server import ServeProcess

TEXT = (
    "Return a new array of bytes. The bytearray class is a mutable sequence of integers in the range 0 <= x < 256. "
    "It has most of the usual methods of mutable sequences, as well as most methods that the bytes type has. "
)


def mixed_requests(model: str, count: int) -> list[dict[str, Any]]:
    """Return greedy and sampled requests of different lengths, with shared prefixes, stop strings and streams."""
    rng = random.Random(0)
    requests = []
    for number in range(count):
        request: dict[str, Any] = {
            "model": model,
            "prompt": TEXT[: rng.choice([20, 80, 200])] + f"Number {number % 7}:",
            "max_tokens": rng.randrange(4, 40),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_p": rng.choice([1.0, 0.9]),
            "seed": number,
            "stream": bool(number % 2),
            "extra_body": {"top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.05])},
        }
        if number % 3 == 0:
            request["stop"] = ["\n", "the "]
        requests.append(request)
    return requests


async def answer(client: AsyncOpenAI, request: dict[str, Any]) -> tuple[str, str | None]:
    """Return text and finish reason."""
    result = await client.completions.create(**request)
    if not request["stream"]:
        return result.choices[0].text, result.choices[0].finish_reason
    choices = [chunk.choices[0] async for chunk in result]
    return "".join(choice.text for choice in choices), choices[-1].finish_reason


async def test_64_concurrent_requests_equal_their_single_runs(server: ServeProcess, model: str) -> None:
    requests = mixed_requests(model, 64)
    async with server.async_client() as client:
        alone = [await answer(client, request) for request in requests]
        together = await asyncio.gather(*(answer(client, request) for request in requests))
    assert together == alone
    assert {reason for _, reason in alone} == {"stop", "length"}
    assert len(set(alone)) > 32
