"""Requests that take down a worker or the scheduler: the guilty one gets a typed error, and the others finish equal.

`serve` with the simulator. A prompt is poisoned if it contains the token POISON.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError

from tests.e2e.server import SIM, ServeProcess, serving
from tests.e2e.streams import answers, text_and_error
from tests.examples.install import register

POISON = 7
LAYOUT = (*SIM, "--max-num-seqs", "8")
"""Fewer than the answers of `streams.bodies`."""
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


async def poisoned(server: ServeProcess, expected: list[Any], says: str) -> None:
    """Send a poisoned request among others that have begun."""
    async with server.async_client() as client:
        model = (await client.models.list()).data[0].id

        async def poison() -> None:
            with pytest.raises(APIStatusError, match=says) as refused:
                await client.completions.create(model=model, prompt=[100, POISON, 300])
            assert refused.value.status_code == 500

        assert await answers(client, poison) == expected
        assert (await text_and_error(client, "Still", 5))[1] == "", "the server goes on"


@pytest.mark.parametrize("fault", ["error", pytest.param("exit", marks=pytest.mark.soak)])
async def test_a_request_that_makes_its_step_fail_is_refused_and_the_others_finish(
    undisturbed_sim: list[Any], fault: str
) -> None:
    with serving(*LAYOUT, "--sim-fault-token", str(POISON), "--sim-fault", fault) as server:
        await poisoned(server, undisturbed_sim, "the model workers were lost 3 times while they computed this request")
        assert server.metric("epochs_lost_total") == 3


async def test_a_request_that_kills_the_scheduler_is_refused_and_the_others_finish(
    undisturbed_sim: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "poisoned_policy.py").write_text(POLICY)
    register(tmp_path, "poisoned", {"runahead.policies": {"poisoned": "poisoned_policy:PoisonedPolicy"}})
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with serving(*LAYOUT, "--batching-policy", "poisoned", PYTHONPATH=path) as server:
        await poisoned(server, undisturbed_sim, "the scheduler or its workers died 3 times while they had this request")
        log = server.log.read_text()
        assert log.count("scheduler exited with status 9") == 3, log
        assert "2 schedulers have died while they had it" in log


async def test_a_step_without_memory_is_retried_with_smaller_steps() -> None:
    """A prompt of 900 tokens does not fit one step of at most 2,048. The worker stays, and no request is blamed."""
    prompt = [100 + i % 900 for i in range(900)]
    with serving(*LAYOUT, "--max-num-batched-tokens", "2048") as server:
        async with server.async_client() as client:
            undisturbed = await text_and_error(client, prompt, 60)
    with serving(*LAYOUT, "--max-num-batched-tokens", "2048", "--sim-max-step-tokens", "600") as server:
        worker = server.services["worker"]
        async with server.async_client() as client:
            assert await text_and_error(client, prompt, 60) == undisturbed
        assert server.metric("epochs_lost_total") == 1
        assert worker.is_running()
        assert "steps have at most 448 tokens from now on, as one ran out of memory" in server.log.read_text()
