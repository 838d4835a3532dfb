"""Two engines and one frontend over links that break, a list of engines that changes, and engines that differ: streams
move, late answers are dropped, and no token differs."""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.handshake import PROTOCOL_VERSION
from tests.e2e.proxy import FAULTS, Way
from tests.e2e.separate import SeparateServices, separate_services
from tests.e2e.server import HttpServer, wait_until
from tests.e2e.streams import answers, assert_nothing_is_kept, engines_of, moves, run_command, text_and_error
from tests.metrics import total

ADMIN = "--enable-admin-routes"
soak = pytest.mark.soak


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """File with the placement of the frontend."""
    return tmp_path_factory.mktemp("recording") / "placement.jsonl"


@pytest.fixture(scope="module")
def services(recording: Path) -> Iterator[SeparateServices]:
    with separate_services(ADMIN, "--record-placement", str(recording), engines=2) as running:
        yield running


@pytest.mark.parametrize(
    "fault", [pytest.param("cut", marks=soak), "mute scheduler", pytest.param("both directions", marks=soak)]
)
async def test_streams_leave_an_engine_behind_a_link_that_is_down(
    services: SeparateServices, undisturbed_sim: list[Any], fault: str
) -> None:
    """The link is up again while they run elsewhere."""
    link, do = services.frontend_link(0), services.proxies.do

    async def disturb() -> None:
        before = moves(services)
        do(FAULTS[fault](link))
        await asyncio.to_thread(wait_until, lambda: moves(services) > before, "streams have moved")
        do(link.restore())

    services.wait_engines(2)
    async with services.async_client() as client:
        assert await answers(client, disturb) == undisturbed_sim
    services.wait_engines(2)
    assert_nothing_is_kept(services)


async def test_late_answers_of_an_engine_that_does_not_hear_of_a_move_are_dropped(
    services: SeparateServices, undisturbed_sim: list[Any]
) -> None:
    """Its connection lives, and it goes on with streams that have another owner."""
    link, do = services.frontend_link(0), services.proxies.do

    async def disturb() -> None:
        do(link.stall(Way.TO_SERVER))
        # Not by the command, which starts an interpreter: the frontend's lease ends soon
        await client.with_options(base_url=services.url).post("/engines/0/drain", cast_to=object)
        await asyncio.to_thread(wait_until, lambda: engines_of(services)["0"]["streams"] == 0, "all have left")
        found = re.search(r'num_requests_running\{engine="0".*\} (\S+)', services.get("/metrics")[1])
        assert float(found[1]) > 0

    services.wait_engines(2)
    try:
        async with services.async_client() as client:
            assert await answers(client, disturb) == undisturbed_sim
        wait_until(lambda: engines_of(services)["0"]["state"] == "gone", "its silence is noticed")
    finally:
        do(link.restore())
        run_command("drain", "0", services.url, "--cancel")
    services.wait_engines(2)
    assert_nothing_is_kept(services)


async def test_streams_move_when_an_engine_drains(services: SeparateServices, undisturbed_sim: list[Any]) -> None:
    moved = moves(services)
    async with services.async_client() as client:

        async def drain() -> None:
            await client.with_options(base_url=services.url).post("/engines/0/drain", cast_to=object)

        assert await answers(client, drain) == undisturbed_sim
    assert moves(services) > moved
    assert "engine 0 has no streams" in run_command("drain", "0", services.url)
    listed = json.loads(run_command("engines", services.url, "--json"))
    assert [(engine["state"], len(engine["pids"])) for engine in listed] == [("draining", 2), ("ready", 2)]
    assert "the only one that serves" in run_command("drain", "1", services.url, fails=True)
    run_command("drain", "0", services.url, "--cancel")
    services.wait_engines(2)
    assert_nothing_is_kept(services)


def test_a_frontend_finds_the_prefixes_that_another_one_has_placed(services: SeparateServices) -> None:
    """Under their salt alone."""
    prompts = [f"{i}, " + "and so on, " * 40 for i in range(6)]
    other = services.start_frontend("frontend-1")
    other.wait_readyz()
    other.wait_engines(2)

    def cached(server: HttpServer, salt: str) -> list[int]:
        with server.client() as client:
            model, counts = client.models.list().data[0].id, []
            for prompt in prompts:
                usage = client.completions.create(
                    model=model, prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
                ).usage
                counts.append(usage.prompt_tokens_details.cached_tokens or 0)
            return counts

    known = other.metric("placement_block_names")
    assert cached(services, "one key") == [0] * len(prompts)
    blocks = cached(services, "one key")[0] // 16 * len(prompts)
    assert blocks > 0
    wait_until(lambda: other.metric("placement_block_names") >= known + blocks, "the other frontend knows them")
    assert min(cached(other, "one key")) > 0
    assert cached(other, "another key") == [0] * len(prompts)
    services.processes["frontend-1"].send_signal(signal.SIGTERM)
    assert services.processes["frontend-1"].wait(60) == 0


def test_a_recording_of_placement_replays(services: SeparateServices, recording: Path) -> None:
    """It has the decisions of all tests so far, and no text. A decision that was changed is found."""

    frontend = services.processes["frontend"]
    frontend.send_signal(signal.SIGTERM)
    assert frontend.wait(60) == 0
    assert run_command("replay", str(recording)).startswith("equal: ")
    content = recording.read_text()
    assert '"type":"move"' in content
    assert recording.stat().st_mode & 0o077 == 0
    assert "and so on" not in content
    assert "one key" not in content
    recording.write_text(content.replace('"type":"place","engine":"0"', '"type":"place","engine":"1"', 1))
    assert "another decision" in run_command("replay", str(recording), fails=True)


NEWER = f"""
import msgspec
from protocol.transport import client, server
client.PROTOCOL_VERSION = server.PROTOCOL_VERSION = ({PROTOCOL_VERSION[0]}, {PROTOCOL_VERSION[1] + 1})
def appended(message, encode=client.encode):
    return msgspec.msgpack.encode([*msgspec.msgpack.decode(encode(message)), "of a newer release", [0.5]])
client.encode = server.encode = appended
"""
"""A release with a newer minor version: each of its messages has two more fields."""
FAST_RULES = """
from services.frontend.engine import output_pace
from services.frontend.placement import fleet, placement
output_pace.WINDOW, placement.SLOW_CHECK, fleet.SLOW_SECONDS, placement.REST = 0.3, 0.2, 0.5, 0.5
"""
"""The rules about slow engines with a fraction of their times."""
JUMPING = """
import signal, time
real, wall, offset = time.monotonic, time.time, [0.0, 0.0]
time.monotonic, time.time = lambda: real() + offset[0], lambda: wall() + offset[1]
def jump(*_):
    offset[0] += 3600.0
    offset[1] -= 7200.0
signal.signal(signal.SIGUSR1, jump)
"""
"""With each signal, the monotonic clock is an hour ahead, and the clock of the day two hours back."""
NEWER_ENGINE, OTHER_MODEL = 1, 2


@pytest.fixture(scope="module")
def unequal() -> Iterator[SeparateServices]:
    """Engine 1 is of a newer release, and engine 2 has another vocabulary. Each test begins and ends with engine 0."""
    with separate_services(
        ADMIN,
        engines=3,
        listed=1,
        worker={OTHER_MODEL: ("--sim-vocab-size", "8192")},
        patches={f"scheduler-{NEWER_ENGINE}": NEWER, f"worker-{NEWER_ENGINE}": NEWER, "frontend": FAST_RULES + JUMPING},
    ) as running:
        yield running


def use(services: SeparateServices, *engines: int) -> None:
    """List these engines, and wait until they are ready and others are left."""
    services.list_engines(*engines)
    listed = [str(engine) for engine in engines]
    wait_until(lambda: sorted(engines_of(services)) == listed, f"the engines are {listed}")
    services.wait_engines(len(engines))


async def test_streams_move_to_a_newer_release_and_back(unequal: SeparateServices, undisturbed_sim: list[Any]) -> None:
    async with unequal.async_client() as client:
        for old, new in ((0, NEWER_ENGINE), (NEWER_ENGINE, 0)):
            moved = moves(unequal)

            async def upgrade(old: int = old, new: int = new) -> None:
                await asyncio.to_thread(use, unequal, *sorted((old, new)))
                await asyncio.to_thread(use, unequal, new)

            assert await answers(client, upgrade) == undisturbed_sim
            assert moves(unequal) > moved
    assert_nothing_is_kept(unequal)


async def test_no_request_goes_to_another_model_and_no_stream_mixes_two(
    unequal: SeparateServices, undisturbed_sim: list[Any]
) -> None:
    use(unequal, 0, OTHER_MODEL)
    assert len({engine["identity"] for engine in engines_of(unequal).values()}) == 2
    async with unequal.async_client() as client:

        async def unlist() -> None:
            unequal.list_engines(OTHER_MODEL)

        assert await answers(client, unlist) == undisturbed_sim  # its streams stay until they end
        use(unequal, OTHER_MODEL)
        use(unequal, 0)
        expected, _ = await text_and_error(client, "Number 0 is", 100)
        running = asyncio.create_task(text_and_error(client, "Number 0 is", 1000))
        one = lambda: engines_of(unequal)["0"]["streams"] == 1  # noqa: E731
        await asyncio.to_thread(wait_until, one, "it runs")
        unequal.list_engines(more=unequal.line_of(OTHER_MODEL).replace(f" {OTHER_MODEL}\n", " 0\n"))
        found, error = await running
        assert "no other engine has the model" in error
        assert found.startswith(expected) or expected.startswith(found)
    use(unequal, 0)


async def test_streams_leave_an_engine_that_is_far_slower(
    unequal: SeparateServices, undisturbed_sim: list[Any]
) -> None:
    """Its worker is stopped most of the time. Both engines have streams all the time."""
    use(unequal, 0, NEWER_ENGINE)
    worker = unequal.processes["worker-0"]

    async def stop_and_go() -> None:
        try:
            while True:
                worker.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.3)
                worker.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.02)
        finally:
            worker.send_signal(signal.SIGCONT)

    async def disturb() -> None:
        slow = asyncio.create_task(stop_and_go())
        have_left = lambda: 'reason="slow"' in unequal.get("/metrics")[1]  # noqa: E731
        await asyncio.to_thread(wait_until, have_left, "streams have left it")
        slow.cancel()

    async with unequal.async_client() as client:
        others = [asyncio.create_task(text_and_error(client, f"{i}", 1900)) for i in range(6)]
        assert await answers(client, disturb) == undisturbed_sim
        for other in others:
            other.cancel()
        await asyncio.wait(others)
    assert_nothing_is_kept(unequal)
    use(unequal, 0)


async def test_a_frontend_whose_clocks_jump_loses_no_stream(
    unequal: SeparateServices, undisturbed_sim: list[Any]
) -> None:
    use(unequal, 0, NEWER_ENGINE)

    def lost() -> float:
        return total(unequal.get("/metrics")[1], "runahead:stream_moves_total", reason="lost")

    before = lost()

    async def jump() -> None:
        for _ in range(3):
            unequal.processes["frontend"].send_signal(signal.SIGUSR1)
            await asyncio.sleep(0.5)

    async with unequal.async_client() as client:
        assert await answers(client, jump) == undisturbed_sim
        assert lost() == before
        assert (await text_and_error(client, "Still", 5))[1] == ""
