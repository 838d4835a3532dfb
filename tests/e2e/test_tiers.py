"""`serve` with a directory for KV blocks: what is found there gives the tokens that computing gives."""

import asyncio
from pathlib import Path

import httpx
import pytest

from protocol.block_names import names_of
from protocol.codec import pack
from services.units import size_text
from tests.e2e.server import NATIVE, ServeProcess, serving, wait_until
from tests.e2e.streams import run_command
from tests.soak.tiers import tier_faults

SIM = ("--backend", "sim", "--sim-step-ms", "1", "--sim-prefill-token-us", "1000")
"""Computing a prompt takes much longer than loading it."""
PROMPT, BLOCK_SIZE = 300, 16
PREFIX = PROMPT // BLOCK_SIZE * BLOCK_SIZE
TOKENS = [300 + i % 100 for i in range(PROMPT)]


def answer(server: ServeProcess, salt: str = "") -> tuple[str, int]:
    """Return the text of a request and the number of its cached tokens."""
    with server.client() as client:
        completion = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=TOKENS,
            max_tokens=20,
            temperature=0,
            extra_body={"ignore_eos": True, "cache_salt": salt} if salt else {"ignore_eos": True},
        )
    usage = completion.usage
    return completion.choices[0].text, usage.prompt_tokens_details.cached_tokens or 0


def tiers(server: ServeProcess) -> dict[str, dict[str, int]]:
    """Return bytes and tokens found by tier."""
    [engine] = httpx.get(f"{server.url}/engines").json()["engines"]
    return engine["kv_tiers"]


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SIM, marks=pytest.mark.soak),
        (*SIM, "--tensor-parallel-size", "2"),
        pytest.param((*NATIVE, "--pipeline-parallel-size", "2"), marks=pytest.mark.soak),
        NATIVE,
    ],
    ids=["simulated", "two simulated ranks", "two stages", "demo model"],
)
def test_after_a_restart_the_prefix_is_loaded(layout: tuple[str, ...], tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    layout = (*layout, "--kv-offload-dir", str(directory), "--enable-admin-routes")
    with serving(*layout) as server:
        text, cached = answer(server)
        assert cached == 0
        server.stop()
    ranks = 2 if "2" in layout else 1
    assert len(files(directory)) >= ranks * PREFIX // BLOCK_SIZE
    with serving(*layout) as server:
        assert answer(server) == (text, PREFIX)
        assert answer(server) == (text, PREFIX), "now it is in the cache"
        assert server.metric("external_prefix_cache_hits_total") == PREFIX
        assert tiers(server)["disk"]["hit_tokens"] == PREFIX
        size = sum(path.stat().st_size for path in files(directory))
        wait_until(lambda: tiers(server)["disk"]["bytes"] == size, "its size is reported")
        assert f"disk {size_text(size)} ({PREFIX} tokens found)" in run_command("status", server.url)
        assert answer(server, "another salt")[1] == 0
        if "sim" in layout:
            a_damaged_block_is_computed(server, directory, text)
        server.stop()


def a_damaged_block_is_computed(server: ServeProcess, directory: Path, text: str) -> None:
    """One rank has a wrong block: all compute from there on. Then it is written again."""
    damaged = names_of("", pack(TOKENS), BLOCK_SIZE)[5].hex()
    path = next(directory.glob(f"*/{damaged[:2]}/{damaged[2:]}"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    forget(server)
    assert answer(server) == (text, 5 * BLOCK_SIZE)
    wait_until(lambda: path.exists() and path.read_bytes() == whole, "it is written again")
    forget(server)
    assert answer(server) == (text, PREFIX)


def forget(server: ServeProcess, key: str = "none") -> None:
    """Empty the prefix cache."""
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{server.url}/reset_prefix_cache", headers=headers).raise_for_status()


def test_blocks_that_were_evicted_are_loaded(tmp_path: Path) -> None:
    """From the memory of the worker. Another engine with the same directory finds them, too."""
    num_blocks, block_bytes = 30, 8 * BLOCK_SIZE
    slow = ("--sim-prefill-token-us", "10000")  # a late answer of a busy machine is no reason to ask for no other load
    small = (*SIM, *slow, "--max-model-len", "400", "--kv-cache-memory-bytes", str(num_blocks * block_bytes))
    tiers = ("--kv-offload-bytes", "1M", "--kv-offload-dir", str(tmp_path / "kv"))
    with serving(*small, *tiers) as server:
        text, _ = answer(server)
        wait_until(lambda: len(files(tmp_path)) >= PREFIX // BLOCK_SIZE, "its blocks are written")
        assert answer(server, "evicts it")[1] == 0
        assert answer(server) == (text, PREFIX)
        assert server.metric("external_prefix_cache_hits_total") > 0, "a part of it was still in the cache"
        with serving(*small, *tiers) as other:
            assert answer(other, "evicts it")[1] == PREFIX


def drain_the_owner(server: ServeProcess) -> None:
    listed = httpx.get(f"{server.url}/engines").json()["engines"]
    [owner] = [engine["name"] for engine in listed if engine["streams"]]
    httpx.post(f"{server.url}/engines/{owner}/drain").raise_for_status()


async def test_a_stream_that_moves_fetches_its_blocks_from_the_engine_before() -> None:
    """The other engine computes nothing but the last block. There is no directory."""
    peers = ("--kv-peer-address", "tcp://127.0.0.1:0", "--data-parallel-size", "2", "--enable-admin-routes")
    with serving(*SIM, *peers, "--tensor-parallel-size", "2") as server:
        text, _ = answer(server)
        async with server.async_client() as client:
            model, parts = (await client.models.list()).data[0].id, list[str]()
            async for chunk in await client.completions.create(
                model=model, prompt=TOKENS, max_tokens=200, stream=True, temperature=0, extra_body={"ignore_eos": True}
            ):
                parts += [choice.text for choice in chunk.choices]
                if len(parts) == 20:
                    await asyncio.to_thread(drain_the_owner, server)
        assert "".join(parts).startswith(text)
        assert server.metric("stream_moves_total") == 1
        assert server.metric("external_prefix_cache_hits_total") >= PREFIX


async def test_tiers_survive_kills_and_damaged_files() -> None:
    """A reduced case of `make soak PART=tiers`."""
    happened, failures = await tier_faults(2.0, 1)
    assert failures == []
    assert happened["everything killed"] == 1
    assert happened["requests"] > 0
