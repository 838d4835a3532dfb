"""`docker compose up` as a user meets it: containers that keep to themselves, workers that come, go and are killed."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.docker.engine import Engine
from tests.docker.stack import (
    PROMPTS,
    TOKENS,
    USER,
    VERSION,
    Container,
    Load,
    Stack,
    running,
    streamed,
)

CONNECT = """
import socket, sys
for target in sys.argv[1:]:
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        print(target, "open")
    except OSError as error:
        print(target, "closed")
"""


@pytest.fixture(scope="module")
def stack(engine: Engine) -> Iterator[Stack]:
    with running(engine, "runahead-test", RUNAHEAD_SETTLE_SECONDS="1") as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, str]:
    """What one undisturbed worker says."""
    with stack.openai() as client:
        return {prompt: streamed(client, prompt, TOKENS) for prompt in PROMPTS}


def test_streams_come_from_three_containers(stack: Stack, expected: dict[str, str]) -> None:
    assert [container.service for container in stack.containers()] == ["frontend", "scheduler", "worker"]
    with stack.openai() as client:
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat).strip()
        whole = client.completions.create(
            model=model, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    assert whole.choices[0].text == expected[PROMPTS[0]]
    assert len(set(expected.values())) == len(PROMPTS)


def test_kernels_come_with_the_image(stack: Stack) -> None:
    """Whoever the container runs as finds them, and compiles none."""
    (worker,) = stack.containers("worker")
    compile_all = "import runpy; runpy.run_module('services.worker.backends.native.kernels')"
    said = stack.engine.run(
        "exec", "--env", "NUMBA_DEBUG_CACHE=1", worker.id, "python", "-c", compile_all
    ).splitlines()
    assert any(line.startswith("[cache] data loaded from '/tmp/") for line in said)
    assert not any(line.startswith("[cache] data saved") for line in said)


def test_containers_can_do_no_more_than_they_must(stack: Stack) -> None:
    for container in stack.containers():
        host = container.facts["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert not host["Privileged"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert 0 < host["PidsLimit"] <= 512
        assert host["Memory"] > 0
        assert bool(host["PortBindings"]) == (container.service == "frontend")
        status = stack.engine.run("exec", container.id, "cat", "/proc/1/status")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(facts["Uid"].split()) == {USER.partition(":")[0]}
        assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
        assert facts["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    ("target", "has_torch"), [("frontend", False), ("scheduler", False), ("worker", True)]
)
def test_images_are_slim_and_nobodys(engine: Engine, target: str, has_torch: bool) -> None:
    image = f"runahead-{target}:{VERSION}"
    (facts,) = json.loads(engine.run("image", "inspect", image))
    assert facts["Config"]["User"] == "10001:0"
    code = (
        "import importlib.util as u, os, sys\n"
        "print([name for name in ('torch', 'transformers', 'pip', 'pytest') if u.find_spec(name)])\n"
        "print([d for d, _, _ in os.walk('/app') if os.access(d, os.W_OK)], os.access('/opt/runahead', os.W_OK))"
    )
    found = engine.run("run", "--rm", "--entrypoint", "python", image, "-c", code).splitlines()
    assert found == [str(["torch"] if has_torch else []), "[] False"]
    history = engine.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "BEGIN CERTIFICATE" not in history
    assert engine.run("run", "--rm", image, "--version").startswith("runahead ")


def test_only_the_api_can_be_reached_from_outside(stack: Stack) -> None:
    """Plans and tensors travel unencrypted: on a network that nothing else enters, and that leads nowhere."""
    (frontend,), (scheduler,), (worker,) = map(stack.containers, ("frontend", "scheduler", "worker"))
    networks = frontend.facts["NetworkSettings"]["Networks"]
    (inside,) = scheduler.facts["NetworkSettings"]["Networks"]
    assert list(worker.facts["NetworkSettings"]["Networks"]) == [inside]
    (outside,) = set(networks) - {inside}
    (facts,) = json.loads(stack.engine.run("network", "inspect", inside))
    assert facts["Internal"]
    engine_targets = [
        f"{_address(container, inside)}:{port}" for container in (scheduler, worker) for port in (5601, 5602)
    ]
    api = f"{_address(frontend, outside)}:8000"
    image = f"runahead-scheduler:{VERSION}"
    stranger = ["run", "--rm", "--network", outside, "--entrypoint", "python", image, "-c", CONNECT]
    seen = stack.engine.run(*stranger, api, *engine_targets).splitlines()
    assert seen == [f"{api} open", *(f"{target} closed" for target in engine_targets)]
    seen = stack.engine.run(
        "exec", worker.id, "python", "-c", CONNECT, "scheduler:5601", "scheduler:5602", api
    ).splitlines()
    assert seen == ["scheduler:5601 open", "scheduler:5602 open", f"{api} closed"]


def test_scaling_under_load_leaves_every_stream_whole(stack: Stack, expected: dict[str, str]) -> None:
    assert stack.groups()[-1] == 1
    with Load(stack, expected).on() as load:
        load.wait_for_more()
        stack.up(workers=2)
        stack.wait_until(lambda: stack.groups()[-1] == 2, "two ranks share each layer")
        load.wait_for_more()
        assert stack.metric("num_workers") == 2
        stack.up(workers=1)
        stack.wait_until(lambda: stack.groups()[-1] == 1, "one rank is left")
        load.wait_for_more()
    stack.wait_healthy()


def test_killed_worker_costs_no_stream(stack: Stack, expected: dict[str, str]) -> None:
    stack.up(workers=2)
    stack.wait_until(lambda: stack.groups()[-1] == 2, "two ranks share each layer")
    with Load(stack, expected).on() as load:
        load.wait_for_more()
        killed = stack.containers("worker")[-1]
        stack.engine.run("kill", killed.id)  # for Docker that is a stop: it does not start it again
        stack.wait_until(lambda: stack.groups()[-1] == 1, "the other goes on alone")
        load.wait_for_more()
    stack.up(workers=1)
    stack.wait_healthy()


def test_crashed_worker_is_started_again(stack: Stack, expected: dict[str, str]) -> None:
    (worker,) = stack.containers("worker")
    epochs = len(stack.groups())
    with Load(stack, expected).on() as load:
        load.wait_for_more()
        os.kill(worker.facts["State"]["Pid"], signal.SIGKILL)
        stack.wait_until(lambda: len(stack.groups()) > epochs, "it is back")
        load.wait_for_more()
    (again,) = stack.containers("worker")
    assert (again.id, again.facts["RestartCount"]) == (worker.id, worker.facts["RestartCount"] + 1)
    stack.wait_healthy()


def test_stopped_worker_is_unhealthy_until_it_goes_on(stack: Stack) -> None:
    (worker,) = stack.containers("worker")
    check = (
        "exec",
        worker.id,
        "sh",
        "-c",
        "runahead healthcheck --connected tcp://scheduler:5602 2>&1 || true",
    )
    assert stack.engine.run(*check) == ""
    os.kill(worker.facts["State"]["Pid"], signal.SIGSTOP)
    try:
        assert stack.engine.run(*check) == "unhealthy: the main process does not run: its state is T\n"
    finally:
        os.kill(worker.facts["State"]["Pid"], signal.SIGCONT)
    stack.wait_healthy()


def test_metrics_tell_what_was_served(stack: Stack, expected: dict[str, str]) -> None:
    before = stack.metric("generation_tokens_total")
    with stack.openai() as client:
        streamed(client, PROMPTS[0], TOKENS)
    stack.wait_until(
        lambda: stack.metric("generation_tokens_total") == before + TOKENS, "the tokens are counted"
    )
    assert stack.metric("num_requests_running") == 0
    assert stack.metric("request_success_total") > len(expected)


def test_stop_lets_open_streams_end(stack: Stack) -> None:
    """Last: afterwards nothing runs."""
    with stack.openai() as client:
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model,
            prompt="A list",
            max_tokens=1500,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        first = next(stream)
        stopping = threading.Thread(target=stack.compose, args=("stop",))
        stopping.start()
        try:
            chunks = [first, *stream]
        finally:
            stopping.join()
    assert chunks[-1].choices[0].finish_reason == "length"
    ends = {container.service: container.facts["State"]["ExitCode"] for container in stack.containers()}
    assert ends == {"frontend": 0, "scheduler": 0, "worker": 0}


def _address(container: Container, network: str) -> str:
    return str(container.facts["NetworkSettings"]["Networks"][network]["IPAddress"])
