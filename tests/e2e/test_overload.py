"""A server with far more requests than it can serve: each one gets an answer, and admitted ones are served."""

import asyncio
from collections import Counter

import httpx

from tests.e2e.server import SIM, serving

LAYOUT = (*SIM, "--max-num-seqs", "2", "--max-queue-seconds", "1")
"""A request of 10 tokens takes 0.2 s, so that 10 of them end each second: far fewer than a busy machine can send."""


async def test_every_request_of_an_overload_is_served_or_refused_with_an_answer() -> None:
    """200 requests within 2 s on kept connections; then the server serves all that comes."""
    with serving(*LAYOUT) as server:
        with server.client() as openai:
            model = openai.models.list().data[0].id
        body = {"model": model, "prompt": "Hello", "max_tokens": 10, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(delay: float) -> httpx.Response:
                await asyncio.sleep(delay)
                return await client.post("/v1/completions", json=body)

            answers = await asyncio.gather(*(ask(i / 100) for i in range(200)))
            counts = Counter(answer.status_code for answer in answers)
            assert set(counts) == {200, 429}
            assert counts[200] >= 10, "it serves while it refuses"
            assert counts[429] >= 50, "it does not queue everything"
            refused = next(answer for answer in answers if answer.status_code == 429)
            assert refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            texts = {answer.json()["error"]["message"] for answer in answers if answer.status_code == 429}
            assert any("a new request would wait about" in text for text in texts)
            rejected, shed = server.metric("admission_rejections_total"), server.metric("requests_shed_total")
            assert rejected + shed == counts[429]
            assert shed > 0, "some are refused before they are read"
            for answer in await asyncio.gather(*(ask(0.0) for _ in range(4))):
                assert answer.status_code == 200
                assert answer.json()["usage"]["completion_tokens"] == 10
