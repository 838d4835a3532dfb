"""Requests that take down a worker or the scheduler: the guilty one gets a typed error, and the others finish equal.

`serve` with the simulator. A prompt is poisoned if it contains the token POISON.
"""

import asyncio
import os
from pathlib import Path

import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.e2e.server import SIM, ServeProcess, serving
from tests.examples.install import register

POISON = 7
LAYOUT = (*SIM, "--max-num-seqs", "16")
POLICY = f'''
import os
from services.scheduler.policies import ChunkedPolicy

class PoisonedPolicy(ChunkedPolicy):
    """Let the scheduler die when a poisoned request is about to run."""

    def admit(self, view, request, hit, count):
        if {POISON} in request.token_ids[: request.num_prompt_tokens].tolist():
            os._exit(9)
        return super().admit(view, request, hit, count)
'''


async def answer(
    client: AsyncOpenAI, prompt: list[int], begun: asyncio.Barrier | None = None
) -> tuple[str, str | None]:
    """Stream an answer of 60 tokens. Return its text and its finish reason. `begun`: passed at the first part."""
    model, text, reason = (await client.models.list()).data[0].id, "", None
    stream = await client.completions.create(
        model=model, prompt=prompt, max_tokens=60, seed=1, stream=True, extra_body={"ignore_eos": True}
    )
    async for chunk in stream:
        if begun is not None:
            await begun.wait()
            begun = None
        for choice in chunk.choices:
            text, reason = text + choice.text, choice.finish_reason or reason
    return text, reason


async def poisoned(server: ServeProcess, says: str) -> None:
    """Send a poisoned request among others that have begun."""
    prompts = [[100 + i, 200, 300 + i] for i in range(8)]
    async with server.async_client() as client:
        undisturbed = await asyncio.gather(*(answer(client, prompt) for prompt in prompts))
        begun = asyncio.Barrier(len(prompts) + 1)

        async def poison() -> APIStatusError:
            await begun.wait()
            with pytest.raises(APIStatusError) as refused:
                await answer(client, [100, POISON, 300])
            return refused.value

        *texts, error = await asyncio.gather(*(answer(client, prompt, begun) for prompt in prompts), poison())
        assert texts == undisturbed
        assert isinstance(error, APIStatusError)
        assert error.status_code == 500
        assert says in error.message
        assert await answer(client, prompts[0]) == undisturbed[0], "the server goes on"


@pytest.mark.parametrize("fault", ["error", pytest.param("exit", marks=pytest.mark.soak)])
async def test_a_request_that_makes_its_step_fail_is_refused_and_the_others_finish(fault: str) -> None:
    with serving(*LAYOUT, "--sim-fault-token", str(POISON), "--sim-fault", fault) as server:
        await poisoned(server, "the model workers were lost 3 times while they computed this request")
        assert server.metric("epochs_lost_total") == 3


async def test_a_request_that_kills_the_scheduler_is_refused_and_the_others_finish(tmp_path: Path) -> None:
    (tmp_path / "poisoned_policy.py").write_text(POLICY)
    register(tmp_path, "poisoned", {"runahead.policies": {"poisoned": "poisoned_policy:PoisonedPolicy"}})
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(*LAYOUT, "--batching-policy", "poisoned", PYTHONPATH=path) as server:
        await poisoned(server, "the scheduler or its workers died 3 times while they had this request")
        log = server.log.read_text()
        assert log.count("scheduler exited with status 9") == 3, log
        assert "2 schedulers have died while they had it" in log


async def test_a_step_without_memory_is_retried_with_smaller_steps() -> None:
    """A prompt of 900 tokens does not fit one step of at most 2,048. The worker stays, and no request is blamed."""
    prompt = [100 + i % 900 for i in range(900)]
    with serving(*LAYOUT, "--max-num-batched-tokens", "2048") as server:
        async with server.async_client() as client:
            undisturbed = await answer(client, prompt)
    with serving(*LAYOUT, "--max-num-batched-tokens", "2048", "--sim-max-step-tokens", "600") as server:
        worker = server.services["worker"]
        async with server.async_client() as client:
            assert await answer(client, prompt) == undisturbed
        assert server.metric("epochs_lost_total") == 1
        assert worker.is_running()
        assert "steps have at most 448 tokens from now on, as one ran out of memory" in server.log.read_text()
