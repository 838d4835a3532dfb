"""Routes of --enable-admin-routes for the cache: pins, lists and drops of prefixes, and a reset."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.block_names import names_of
from protocol.codec import pack
from services.worker.tiers.disk import TEMPORARY
from tests.e2e.server import ServeProcess, serving, wait_until
from tests.e2e.test_tiers import BLOCK_SIZE, PREFIX, TOKENS, files, forget

SIM = ("--backend", "sim", "--sim-step-ms", "0", "--sim-prefill-token-us", "100")
NUM_BLOCKS = 60
SMALL = ("--max-model-len", "400", "--kv-cache-memory-bytes", str(NUM_BLOCKS * 8 * BLOCK_SIZE))
KEYS = ("first-key", "second-key")


def post(server: ServeProcess, path: str, key: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)


def control(server: ServeProcess, key: str = KEYS[0], **body: Any) -> dict[str, Any]:
    answer = post(server, "/v1/cache", key, **body)
    assert answer.status_code == 200, answer.text
    [engine] = answer.json()["engines"]
    return engine


def cached(server: ServeProcess, tokens: list[int], key: str = KEYS[0]) -> int:
    """Return the number of cached tokens of a request."""
    body = {"prompt": tokens, "max_tokens": 2, "ignore_eos": True}
    answer = post(server, "/v1/completions", key, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def fill(server: ServeProcess) -> None:
    """Evict what is not pinned."""
    for number in range(4):
        cached(server, [number, *TOKENS[1:]])


def refusal(server: ServeProcess, **body: Any) -> tuple[int, str]:
    answer = post(server, "/v1/cache", KEYS[0], **body)
    return answer.status_code, answer.json()["error"]["message"]


def remove_blocks(directory: Path) -> None:
    """Remove the files, so that nothing is loaded; but not one that is being written, which would end writing."""
    for path in files(directory):
        if not path.name.startswith(TEMPORARY):
            path.unlink()


def written(directory: Path, key: str) -> int:
    """Return the number of files with blocks of the prompt under a key's salt."""
    names = names_of(f"{sha256(key.encode()).hexdigest()[:16]}/", pack(TOKENS), BLOCK_SIZE)
    return sum(path.parent.name + path.name in {name.hex() for name in names} for path in files(directory))


def test_a_pinned_prefix_stays_and_a_dropped_one_is_gone(tmp_path: Path) -> None:
    tier = ("--kv-offload-dir", str(tmp_path / "kv"), "--enable-admin-routes")
    with serving(*SIM, *SMALL, *tier, "--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
        engine = control(server, action="pin", pin="system", prompt=TOKENS)
        [pin] = engine["pins"]
        assert (pin["pin"], pin["tokens"], pin["cached_tokens"], pin["bytes"]) == ("system", PREFIX, 0, 0)
        assert cached(server, TOKENS) == 0, "it is pinned when it is computed"
        [pin] = control(server, action="list")["pins"]
        assert (pin["cached_tokens"], pin["bytes"]) == (PREFIX, PREFIX // BLOCK_SIZE * 8 * BLOCK_SIZE)
        assert len(pin["owner"]) == 16
        wait_until(lambda: written(tmp_path, KEYS[0]) == PREFIX // BLOCK_SIZE, "its blocks are written")
        remove_blocks(tmp_path)
        fill(server)
        assert cached(server, TOKENS) == PREFIX
        assert cached(server, TOKENS, KEYS[1]) == 0, "another key does not find it"

        status, message = refusal(server, action="pin", prompt=[1, *TOKENS])
        assert status == 409
        assert f"of {NUM_BLOCKS} KV blocks would be pinned, but at most {NUM_BLOCKS - 25} can be" in message
        assert refusal(server, action="pin", pin="system", prompt=TOKENS)[0] == 409
        assert refusal(server, action="unpin", pin="unknown") == (409, "engine 0: there is no pin 'unknown'")
        assert refusal(server, action="unpin")[0] == 400
        assert refusal(server, action="pin")[0] == 400
        assert refusal(server, action="drop", pin="system", prompt=TOKENS)[0] == 400
        assert "only full blocks" in refusal(server, action="pin", prompt=TOKENS[:15])[1]
        assert refusal(server, action="keep")[0] == 400

        assert control(server, action="unpin", pin="system")["pins"] == []
        fill(server)
        remove_blocks(tmp_path)
        assert cached(server, TOKENS) == 0, "it was evicted"

        control(server, KEYS[1], action="drop", prompt=TOKENS)
        assert cached(server, TOKENS) == PREFIX, "a drop is for one key, too"
        wait_until(lambda: written(tmp_path, KEYS[0]) == PREFIX // BLOCK_SIZE, "its blocks are written")
        assert control(server, action="drop", prompt=TOKENS)["dropped_tokens"] == PREFIX
        assert written(tmp_path, KEYS[0]) == 0
        assert cached(server, TOKENS) == 0, "it is neither in the cache nor in the directory"
        control(server, action="pin", pin="again", prompt=TOKENS)
        forget(server, KEYS[0])
        [pin] = control(server, action="list")["pins"]
        assert pin["cached_tokens"] == 0
        assert control(server, action="drop", pin="again")["pins"] == []
        assert cached(server, TOKENS) == 0


def test_messages_are_a_prefix(sim: ServeProcess) -> None:
    system = [{"role": "system", "content": "Answer in one word, and in capital letters."}]
    engine = control(sim, action="pin", pin="chat", messages=system, add_generation_prompt=False)
    assert [pin["pin"] for pin in engine["pins"]] == ["chat"]
    tokens = engine["pins"][0]["tokens"]
    assert tokens > 0
    body = {"messages": [*system, {"role": "user", "content": "What is blue?"}], "max_tokens": 1}
    for expected in (0, tokens):
        usage = post(sim, "/v1/chat/completions", KEYS[0], **body).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= expected
    assert control(sim, action="list")["pins"][0]["cached_tokens"] == tokens
    assert control(sim, action="drop", pin="chat")["dropped_tokens"] == tokens


def test_the_next_scheduler_goes_on_with_pins_and_without_what_was_dropped() -> None:
    """Two ranks keep the pins. The names of dropped blocks are gone from their memory."""
    layout = ("--tensor-parallel-size", "2", "--enable-admin-routes")
    with serving(*SIM, *layout) as server:
        assert [cached(server, TOKENS) for _ in range(2)] == [0, PREFIX]
        assert control(server, action="drop", prompt=TOKENS[: PREFIX // 2])["dropped_tokens"] == PREFIX // 2 // 16 * 16
        control(server, action="pin", pin="ended", prompt=TOKENS)
        control(server, action="unpin", pin="ended")
        other = [9, *TOKENS[1:]]
        cached(server, other)
        control(server, action="pin", pin="kept", prompt=other)
        server.find_services()
        server.services["worker-1"].kill()
        assert cached(server, other) in (0, PREFIX)
        server.services["scheduler"].kill()
        assert cached(server, TOKENS) == 0, "its first half was dropped"
        kept = control(server, action="list")["pins"]
        assert [(pin["pin"], pin["tokens"]) for pin in kept] == [("kept", PREFIX)]
        server.find_services()
        for name in ("worker-0", "worker-1", "scheduler"):
            server.services[name].kill()
        assert cached(server, other) == PREFIX
        assert control(server, action="list")["pins"] == kept, "they outlive scheduler and workers together"


def test_a_reset_empties_the_cache(sim: ServeProcess) -> None:
    def reset(query: str = "") -> httpx.Response:
        return httpx.post(f"{sim.url}/reset_prefix_cache{query}")

    prompt = list(range(300, 364))
    cached(sim, prompt)
    assert cached(sim, prompt) == 48  # the last block has the token that is always computed
    assert reset().json() == {"success": True}
    assert cached(sim, prompt) == 0
    assert reset("?reset_running_requests=true").json() == {"success": True}
    assert cached(sim, prompt) == 0
    assert reset("?reset_running_requests=perhaps").status_code == 400


@pytest.mark.parametrize("path", ["/v1/cache", "/reset_prefix_cache"])
def test_the_route_is_not_served_without_the_flag(server: ServeProcess, path: str) -> None:
    assert httpx.post(f"{server.url}{path}", json={"action": "list"}).status_code == 404


def test_a_recorded_server_refuses_pins(tmp_path: Path) -> None:
    with serving(*SIM, "--enable-admin-routes", "--record", str(tmp_path)) as server:
        assert refusal(server, action="pin", prompt=TOKENS)[0] == 409
        assert control(server, action="list")["pins"] == []


def test_a_reset_while_the_worker_is_lost_holds_for_the_next_one() -> None:
    with serving(*SIM, "--enable-admin-routes") as server:
        cached(server, TOKENS)
        server.services["worker"].kill()
        server.wait_readyz(False)
        assert post(server, "/reset_prefix_cache", "none").json() == {"success": True}
        server.wait_readyz()
        assert cached(server, TOKENS) == 0
        assert cached(server, TOKENS) == PREFIX
