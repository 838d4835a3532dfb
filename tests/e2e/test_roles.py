"""An engine that computes prompts beside one that decodes: answers are those of one engine, whichever dies."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest

from tests.e2e.server import NATIVE, ServeProcess, serving, wait_until
from tests.e2e.streams import answers_of, assert_nothing_is_kept, engines_of, kill_engine
from tests.metrics import total

ROLES = ("--data-parallel-size", "2", "--prefill-engines", "1", "--enable-admin-routes")
PREFILL, DECODE = "0", "1"
LONG = [f"{name} " + "word " * 600 for name in ("undisturbed", PREFILL, DECODE)]
"""Prefixes of prompts. Each is new to the engines when its turn comes."""
LENGTH = 600
PATIENT = """
from services.scheduler.core import block_loads
from services.worker.tiers import peers
block_loads.LEAST_TIMEOUT = peers.PATIENCE = 10.0
"""
"""A fetch is not given up because the machine is busy. One from an engine that was killed waits as long."""


def counted(server: ServeProcess, name: str, **labels: str) -> int:
    """Return the sum of a counter that may not exist yet."""
    return round(total(server.get("/metrics")[1], f"runahead:{name}", **labels))


def moved(server: ServeProcess) -> int:
    """Return how many streams have moved because their prompt was computed."""
    return counted(server, "stream_moves_total", reason="prefilled")


async def kill_at_first_move(server: ServeProcess, victim: str, count: int) -> None:
    """One prompt is computed, and others are not. `count`: moves of before."""
    await asyncio.to_thread(wait_until, lambda: moved(server) > count, "a stream has moved")
    await kill_engine(server, victim)


@pytest.mark.parametrize("depth", [2, *(pytest.param(depth, marks=pytest.mark.soak) for depth in (1, 3))])
async def test_long_prompts_are_computed_by_one_engine_and_decoded_by_another(depth: int) -> None:
    """The answers to compare with are those of depth two."""
    with serving(*NATIVE) as single:
        expected = await asyncio.gather(*(answers_of(single, prefix=prefix) for prefix in ("", *LONG)))
    with serving(*NATIVE, *ROLES, "--batch-queue-depth", str(depth), patch=PATIENT) as server:
        server.wait_engines(2)
        assert [engine["role"] for engine in engines_of(server).values()] == ["prefill", "decode"]
        assert await answers_of(server) == expected[0]
        assert moved(server) == 0, "short prompts stay with the engine that decodes"
        assert await answers_of(server, prefix=LONG[0]) == expected[1]
        count = moved(server)
        assert count > 0
        asked, loaded = (server.metric(f"external_prefix_cache_{name}_total") for name in ("queries", "hits"))
        assert loaded == asked >= LENGTH // 16 * 16, "all blocks are there when they are asked for"

        for victim, prefix, answers in ((PREFILL, LONG[1], expected[2]), (DECODE, LONG[2], expected[3])):
            count = moved(server)
            found, _ = await asyncio.gather(
                answers_of(server, prefix=prefix), kill_at_first_move(server, victim, count)
            )
            assert found == answers
            server.wait_engines(2)
        assert_nothing_is_kept(server)


def test_blocks_are_there_while_the_next_prompt_is_computed() -> None:
    """Each prompt is a step of its own, which takes much longer than a fetch."""
    device = ("--backend", "sim", "--sim-prefill-token-us", "600", "--max-num-batched-tokens", str(LENGTH))
    with serving(*device, *ROLES, patch=PATIENT) as server, ThreadPoolExecutor() as pool:
        server.wait_engines(2)
        bodies = [{"prompt": [number] * LENGTH, "max_tokens": 2, "ignore_eos": True} for number in range(2)]
        answers = pool.map(lambda body: httpx.post(f"{server.url}/v1/completions", json=body), bodies)
        details = [answer.json()["usage"]["prompt_tokens_details"] for answer in answers]
        assert details == [{"cached_tokens": 0}] * 2, "blocks that the other engine has computed are not counted"
        for name in ("queries", "hits"):
            assert server.metric(f"external_prefix_cache_{name}_total") == 2 * (LENGTH // 16 * 16)


HITS = "external_prefix_cache_hits_total"
PROMPT = 1008
"""Tokens, of several seconds."""


async def text_of(server: ServeProcess, token: int) -> str:
    body = {"prompt": [token] * PROMPT, "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(timeout=300) as client:
        answer = await client.post(f"{server.url}/v1/completions", json=body)
    return str(answer.json()["choices"][0]["text"])


async def test_blocks_are_fetched_while_the_prompt_is_computed() -> None:
    """An engine may die when the other one has fetched some of its blocks."""
    cases = {7: "", 8: PREFILL, 9: DECODE}
    with serving("--backend", "sim") as single:
        expected = {token: await text_of(single, token) for token in cases}
    device = ("--backend", "sim", "--sim-prefill-token-us", "3000", "--max-num-batched-tokens", "128")
    with serving(*device, *ROLES, patch=PATIENT) as server:
        for token, victim in cases.items():
            server.wait_engines(2)
            before, count = counted(server, HITS), moved(server)
            answer = asyncio.create_task(text_of(server, token))
            fetched = partial(lambda before: counted(server, HITS) > before, before)
            await asyncio.to_thread(wait_until, fetched, "blocks are fetched")
            assert moved(server) == count, "they are fetched before the stream moves"
            if victim:
                await kill_engine(server, victim)
            assert await answer == expected[token]
            if not victim:
                found = [server.metric(f"external_prefix_cache_{name}_total") for name in ("queries", "hits")]
                assert found == [PROMPT, PROMPT], "each block is fetched once"
        server.wait_engines(2)
        assert_nothing_is_kept(server)
