"""An engine that computes prompts beside one that decodes: answers are those of one engine, whichever dies."""

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.server import ServeProcess, serving, wait_until
from tests.e2e.streams import answers_of, assert_nothing_is_kept, engines_of, kill_engine

NATIVE = ("--threads", "1", "--kv-cache-memory-bytes", str(64 << 20))
ROLES = ("--data-parallel-size", "2", "--prefill-engines", "1", "--enable-admin-routes")
PREFILL, DECODE = "0", "1"
LONG = [f"{name} " + "word " * 600 for name in ("undisturbed", PREFILL, DECODE)]
"""Prefixes of prompts. Each is new to the engines when its turn comes."""
LENGTH = 600


def moved(server: ServeProcess, reason: str) -> int:
    """Return how many streams have moved for this reason."""
    pattern = rf'^runahead:stream_moves_total{{.*reason="{reason}".*}} (\S+)$'
    found = re.findall(pattern, server.get("/metrics")[1], re.MULTILINE)
    return round(sum(map(float, found)))


async def kill_at_first_move(server: ServeProcess, victim: str, count: int) -> None:
    """One prompt is computed, and others are not. `count`: moves of before."""
    await asyncio.to_thread(wait_until, lambda: moved(server, "prefilled") > count, "a stream has moved")
    await kill_engine(server, victim)


@pytest.mark.parametrize("depth", [2, *(pytest.param(depth, marks=pytest.mark.soak) for depth in (1, 3))])
async def test_long_prompts_are_computed_by_one_engine_and_decoded_by_another(depth: int) -> None:
    """The answers to compare with are those of depth two."""
    with serving(*NATIVE) as single:
        expected = [await answers_of(single, prefix=prefix) for prefix in ("", *LONG)]
    with serving(*NATIVE, *ROLES, "--batch-queue-depth", str(depth)) as server:
        server.wait_engines(2)
        assert [engine["role"] for engine in engines_of(server).values()] == ["prefill", "decode"]
        assert await answers_of(server) == expected[0]
        assert moved(server, "prefilled") == 0, "short prompts stay with the engine that decodes"
        assert await answers_of(server, prefix=LONG[0]) == expected[1]
        count = moved(server, "prefilled")
        assert count > 0
        asked, loaded = (server.metric(f"external_prefix_cache_{name}_total") for name in ("queries", "hits"))
        assert loaded == asked >= LENGTH // 16 * 16, "all blocks are there when they are asked for"

        for victim, prefix, answers in ((PREFILL, LONG[1], expected[2]), (DECODE, LONG[2], expected[3])):
            count = moved(server, "prefilled")
            found, _ = await asyncio.gather(
                answers_of(server, prefix=prefix), kill_at_first_move(server, victim, count)
            )
            assert found == answers
            server.wait_engines(2)
        assert_nothing_is_kept(server)


def test_blocks_are_there_while_the_next_prompt_is_computed() -> None:
    """Each prompt is a step of its own, which takes much longer than a fetch."""
    device = ("--backend", "sim", "--sim-prefill-token-us", "300", "--max-num-batched-tokens", str(LENGTH))
    with serving(*device, *ROLES) as server, ThreadPoolExecutor() as pool:
        server.wait_engines(2)
        bodies = [{"prompt": [number] * LENGTH, "max_tokens": 2, "ignore_eos": True} for number in range(4)]
        answers = pool.map(lambda body: httpx.post(f"{server.url}/v1/completions", json=body), bodies)
        assert [answer.status_code for answer in answers] == [200] * 4
        assert server.metric("external_prefix_cache_queries_total") == 4 * (LENGTH // 16 * 16)
        assert server.metric("external_prefix_cache_hits_total") == 4 * (LENGTH // 16 * 16)


PROMPT = 2000
"""Tokens, of several seconds."""


async def text_of(server: ServeProcess) -> str:
    body = {"prompt": [7] * PROMPT, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(timeout=300) as client:
        answer = await client.post(f"{server.url}/v1/completions", json=body)
    return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def whole_text() -> str:
    """The answer of one engine, which does not depend on its delays."""
    with serving("--backend", "sim") as single:
        return asyncio.run(text_of(single))


@pytest.mark.parametrize("victim", ["", PREFILL, DECODE], ids=["undisturbed", "prefill", "decode"])
async def test_blocks_are_fetched_while_the_prompt_is_computed(whole_text: str, victim: str) -> None:
    """An engine may die when the other one has fetched some of its blocks."""
    device = ("--backend", "sim", "--sim-prefill-token-us", "3000", "--max-num-batched-tokens", "128")

    def fetched(server: ServeProcess) -> bool:
        metrics = server.get("/metrics")[1]
        hits = re.findall(r"^runahead:external_prefix_cache_hits_total(?:{.*})? (\S+)$", metrics, re.MULTILINE)
        return sum(map(float, hits)) > 0 and 'reason="prefilled"' not in metrics

    with serving(*device, *ROLES) as server:
        server.wait_engines(2)
        answer = asyncio.create_task(text_of(server))
        what = "blocks are fetched before the stream moves"
        await asyncio.to_thread(wait_until, lambda: fetched(server), what)
        if victim:
            await kill_engine(server, victim)
        assert await answer == whole_text
        if not victim:
            found = [server.metric(f"external_prefix_cache_{name}_total") for name in ("queries", "hits")]
            assert found == [PROMPT, PROMPT], "each block is fetched once"
        server.wait_engines(2)
        assert_nothing_is_kept(server)
