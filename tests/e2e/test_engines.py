"""Several engines behind one frontend: streams move when an engine is lost or drains, and no token differs."""

import asyncio
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from services.checkpoint import DEMO_MODEL
from tests.e2e.server import NATIVE, SIM, ServeProcess, serving, wait_until
from tests.e2e.streams import (
    TOOL,
    answers,
    answers_of,
    assert_nothing_is_kept,
    bodies,
    engines_of,
    kill_engine,
    moves,
    requests_total,
    run_command,
    text_and_error,
)

TWO = ("--data-parallel-size", "2")
ADMIN = "--enable-admin-routes"


@pytest.fixture(scope="module")
def pair() -> Iterator[ServeProcess]:
    """Two native engines."""
    with serving(*NATIVE, *TWO, ADMIN) as server:
        server.wait_engines(2)
        yield server


@pytest.fixture(scope="module")
def undisturbed(pair: ServeProcess) -> list[Any]:
    """Streams of a run without a fault."""
    return asyncio.run(answers_of(pair))


def completed(server: ServeProcess) -> float:
    """Return the requests that have ended; each was completed."""
    totals = requests_total(server)
    assert totals.keys() == {"completed"}
    return totals["completed"]


def services_of(server: ServeProcess) -> list[str]:
    """Return the services that run now."""
    server.services.clear()
    server.find_services()
    return [*server.services]


OTHER_KINDS = 20


async def other_answers(client: AsyncOpenAI, count: int = OTHER_KINDS) -> list[Any]:
    """Return answers that are no streams of completions: tool calls, responses, embeddings, prompts' log-probabilities
    and stop strings."""
    model = (await client.models.list()).data[0].id

    async def call(i: int) -> Any:
        messages: Any = [{"role": "user", "content": f"Where is {i}?"}]
        done = await client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], tool_choice="required", temperature=0.0, max_tokens=80
        )
        return [call.function.arguments for call in done.choices[0].message.tool_calls or []]  # type: ignore[union-attr]

    async def respond(i: int) -> Any:
        first = await client.responses.create(model=model, input=f"Number {i}", temperature=0.0, max_output_tokens=40)
        more = await client.responses.create(
            model=model, input="And?", previous_response_id=first.id, temperature=0.0, max_output_tokens=40
        )
        return first.output_text, more.output_text

    async def embed(i: int) -> Any:
        found = (await client.embeddings.create(model=model, input=[f"Text {i}", f"Text {i + 1}"])).data
        return [round(value, 4) for entry in found for value in entry.embedding]

    async def score(i: int) -> Any:
        done = await client.completions.create(
            model=model, prompt=f"Number {i} is", max_tokens=60, temperature=1.0, seed=i, stop=["qq"],
            extra_body={"prompt_logprobs": 1},
        )  # fmt: skip
        return done.choices[0].text, done.choices[0].model_extra

    kinds = (call, respond, embed, score)
    return await asyncio.gather(*(kinds[i % len(kinds)](i) for i in range(count)))


async def test_streams_move_when_an_engine_is_killed(pair: ServeProcess, undisturbed: list[Any]) -> None:
    """Kill each of two engines, under streams of every kind."""
    before, moved = completed(pair), moves(pair)
    async with pair.async_client() as client:
        others = await other_answers(client)
        for name in ("0", "1"):
            disturbed = answers(client, lambda name=name: kill_engine(pair, name))
            assert await asyncio.gather(disturbed, other_answers(client)) == [undisturbed, others]
    assert moves(pair) - moved >= 10
    assert completed(pair) - before == 2 * len(bodies()) + 3 * (OTHER_KINDS + OTHER_KINDS // 4)
    assert_nothing_is_kept(pair)


ALL_KINDS = 48
"""With those of `answers`, 64 requests."""


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
async def test_streams_move_when_engines_are_killed_at_random_moments(seed: int) -> None:
    """64 requests of every kind, and two deaths of either engine while they run."""
    rng = random.Random(seed)
    with serving(*(SIM if seed % 2 else NATIVE), *TWO) as server:
        server.wait_engines(2)
        async with server.async_client() as client:
            began = time.monotonic()
            undisturbed = await asyncio.gather(answers(client), other_answers(client, ALL_KINDS))
            took = time.monotonic() - began
            for _ in range(2):

                async def kill() -> None:
                    await asyncio.sleep(took * rng.uniform(0.1, 0.7))
                    await kill_engine(server, rng.choice("01"))

                *disturbed, _ = await asyncio.gather(answers(client), other_answers(client, ALL_KINDS), kill())
                assert disturbed == undisturbed
                server.wait_engines(2)
        print(f"seed {seed}: {moves(server):g} streams have moved, {took:.1f} s undisturbed")
        assert moves(server) > 0
        assert completed(server) == 3 * (len(bodies()) + ALL_KINDS + ALL_KINDS // 4)
        assert_nothing_is_kept(server)


def test_a_change_that_fails_leaves_the_engines_as_they_were(pair: ServeProcess, tmp_path: Path) -> None:
    """The tokenizer of the new engine is not that of the frontend, which is found when it is connected."""
    shutil.copytree(DEMO_MODEL, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    config = tmp_path / "serve.yaml"
    same = f"port: {pair.url.rpartition(':')[2]}\nuds: null\nallowed-origins: []\n"
    config.write_text(f"{same}pipeline-parallel-size: 999\n")
    pair.wait_engines(2)  # one was killed before
    before = engines_of(pair)
    for flags, why in (
        (("--tokenizer", str(tmp_path / "other")), "tokenizer mismatch"),
        ((str(DEMO_MODEL), "--config", str(config)), "pipeline"),
        (("--port", "1"), "--port is no setting of an engine"),
        (("--frobnicate", "1"), "No such option: --frobnicate"),
    ):
        assert why in run_command("replan", pair.url, *flags, fails=True)
    wait_until(lambda: list(engines_of(pair)) == ["0", "1"], "the other engine is forgotten")
    assert [engine["pids"] for engine in engines_of(pair).values()] == [e["pids"] for e in before.values()]
    with pair.client() as client:
        model = client.models.list().data[0].id
        assert client.completions.create(model=model, prompt="Still", max_tokens=3).usage


async def test_streams_move_when_settings_change(pair: ServeProcess, undisturbed: list[Any]) -> None:
    """From two engines to one of two ranks, of two stages, and back, with another policy and another depth, and nothing
    of the changes that failed. The old processes end; this is the last test of these engines."""
    before, rounds, last = completed(pair), 0, ""
    between: list[asyncio.Task[tuple[str, str]]] = []
    async with pair.async_client() as client:

        async def run_between() -> None:
            """Open a stream that ends in the next round, so that one runs at any moment."""
            if between:
                assert (await between.pop())[1] == ""
            between.append(asyncio.create_task(text_and_error(client, "Between", 200)))

        for flags in (
            "--tensor-parallel-size 2 --max-num-seqs 3",  # so that streams last until the next change
            "--tensor-parallel-size 1 --pipeline-parallel-size 2 --drain-timeout 0",  # ends only what cannot move
            "--pipeline-parallel-size 1 --batching-policy balanced --batch-queue-depth 3",
        ):
            had, moved = list(engines_of(pair)), moves(pair)
            change = asyncio.create_task(asyncio.to_thread(run_command, "replan", pair.url, *flags.split()))
            while not change.done():  # streams run at the moment of the change
                assert await answers(client, run_between) == undisturbed
                rounds += 1
            await change
            await asyncio.to_thread(wait_until, lambda: len(engines_of(pair)) == 1, "the old engines are forgotten")
            (last,) = engines_of(pair)
            assert len(had) > 1 or moves(pair) > moved
        assert (await between.pop())[1] == ""
    info = json.loads(pair.get("/server_info")[1])["features"]
    assert (info["batching_policy"], info["batch_queue_depth"]) == ("balanced", "3")
    assert completed(pair) - before == rounds * (len(bodies()) + 1)
    left = ["frontend", f"scheduler-{last}", f"worker-{last}"]
    wait_until(lambda: sorted(services_of(pair)) == left, "the old processes have ended")
    pair.stop()


async def test_streams_end_with_an_error_when_the_weights_change() -> None:
    """Within --drain-timeout. Each one has tokens of the former weights alone. One rank takes the place of two."""
    prompts = [f"Number {i} is" for i in range(6)]
    with serving(*SIM, "--tensor-parallel-size", "2", ADMIN) as server:
        async with server.async_client() as client:

            async def ask(tokens: int) -> list[tuple[str, str]]:
                return await asyncio.gather(*(text_and_error(client, prompt, tokens) for prompt in prompts))

            expected = await ask(50)
            running = asyncio.create_task(ask(1900))
            in_use = lambda: engines_of(server)["0"]["streams"] == len(prompts)  # noqa: E731
            await asyncio.to_thread(wait_until, in_use, "all run")
            flags = ("--sim-vocab-size", "8192", "--drain-timeout", "0.5", "--tensor-parallel-size", "1")
            await asyncio.to_thread(run_command, "replan", server.url, *flags)
            for (before, _), (found, error) in zip(expected, await running, strict=True):
                assert "its successor has other weights" in error
                assert found.startswith(before) or before.startswith(found)
            after = await ask(20)
            assert not all(before.startswith(found) for (before, _), (found, _) in zip(expected, after, strict=True))
        wait_until(lambda: list(engines_of(server)) == ["1"], "the first engine has ended")
