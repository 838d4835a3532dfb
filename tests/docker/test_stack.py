"""`docker compose up`: restrictions of the containers, scaling, killed workers and an orderly stop."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from tests.docker.engine import DockerEngine
from tests.docker.stack import PROMPTS, TOKENS, USER, VERSION, Container, Stack, StreamingLoad, running, streamed

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


LONG = 1000
"""Tokens of a stream that is open for long after its first chunk."""


@pytest.fixture(scope="module")
def stack(engine: DockerEngine) -> Iterator[Stack]:
    with running(engine, "runahead-test", RUNAHEAD_SETTLE_SECONDS="1") as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, str]:
    """Texts of one worker without faults, by prompt."""
    with stack.client() as client:
        return {prompt: streamed(client, prompt, TOKENS) for prompt in PROMPTS}


def test_streams_come_from_three_containers(stack: Stack, expected: dict[str, str]) -> None:
    assert [container.service for container in stack.containers()] == ["frontend", "scheduler", "worker"]
    with stack.client() as client:
        model = client.models.list().data[0].id
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat).strip()
        whole = client.completions.create(
            model=model, prompt=PROMPTS[0], max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    assert whole.choices[0].text == expected[PROMPTS[0]]
    assert len(set(expected.values())) == len(PROMPTS)


def test_image_contains_compiled_kernels(stack: Stack) -> None:
    """Any user finds them, so none is compiled in the container."""
    (worker,) = stack.containers("worker")
    compile_all = "python", "-m", "services.worker.kernels.cpu"
    lines = stack.engine.run("exec", "--env", "NUMBA_DEBUG_CACHE=1", worker.id, *compile_all).splitlines()
    assert any(line.startswith("[cache] data loaded from '/tmp/") for line in lines)
    assert not any(line.startswith("[cache] data saved") for line in lines)


def test_containers_have_no_privileges(stack: Stack) -> None:
    for container in stack.containers():
        host = container.details["HostConfig"]
        assert host["ReadonlyRootfs"]
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert not host["Privileged"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert 0 < host["PidsLimit"] <= 4096
        assert host["Memory"] > 0
        assert bool(host["PortBindings"]) == (container.service == "frontend")
        status = stack.engine.run("exec", container.id, "cat", "/proc/1/status")
        details = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(details["Uid"].split()) == {USER.partition(":")[0]}
        assert int(details["CapEff"], 16) == int(details["CapBnd"], 16) == 0
        assert details["NoNewPrivs"] == "1"


@pytest.mark.parametrize(
    ("target", "special"), [("frontend", ["opentelemetry"]), ("scheduler", []), ("worker", ["torch"])]
)
def test_images_contain_only_their_packages_and_no_writable_files(
    engine: DockerEngine, target: str, special: list[str]
) -> None:
    """`special`: packages that not every image has."""
    image = f"runahead-{target}:{VERSION}"
    (details,) = json.loads(engine.run("image", "inspect", image))
    assert details["Config"]["User"] == "10001:0"
    code = (
        "import importlib.util as u, os, sys\n"
        "names = 'torch', 'opentelemetry', 'transformers', 'pip', 'pytest'\n"
        "print([name for name in names if u.find_spec(name)])\n"
        "print([d for d, _, _ in os.walk('/app') if os.access(d, os.W_OK)], os.access('/opt/runahead', os.W_OK))"
    )
    found = engine.run("run", "--rm", "--entrypoint", "python", image, "-c", code).splitlines()
    assert found == [str(special), "[] False"]
    history = engine.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert "BEGIN CERTIFICATE" not in history
    assert engine.run("run", "--rm", image, "--version").startswith("runahead ")


def test_only_the_api_is_reachable_from_outside(stack: Stack) -> None:
    """Tensors of the ranks are not encrypted, so their network has no connection to the outside."""
    (frontend,), (scheduler,), (worker,) = map(stack.containers, ("frontend", "scheduler", "worker"))
    networks = frontend.details["NetworkSettings"]["Networks"]
    (inside,) = scheduler.details["NetworkSettings"]["Networks"]
    assert list(worker.details["NetworkSettings"]["Networks"]) == [inside]
    (outside,) = set(networks) - {inside}
    (details,) = json.loads(stack.engine.run("network", "inspect", inside))
    assert details["Internal"]
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


def test_network_of_the_services_needs_keys(stack: Stack) -> None:
    """Each container has the keys of its role. A container of the same network without keys gets no answer."""
    (keys,), (scheduler,) = stack.containers("keys"), stack.containers("scheduler")
    assert keys.details["State"]["ExitCode"] == 0
    for service in ("frontend", "scheduler", "worker"):
        (container,) = stack.containers(service)
        files = stack.engine.run("exec", container.id, "ls", "/run/keys").split()
        assert [name for name in files if name.endswith("_secret")] == [f"{service}.key_secret"]
    (inside,) = scheduler.details["NetworkSettings"]["Networks"]
    check = "runahead healthcheck tcp://scheduler:5601 || echo unhealthy"
    image = f"runahead-scheduler:{VERSION}"
    stranger = stack.engine.run("run", "--rm", "--network", inside, "--entrypoint", "sh", image, "-c", check)
    assert stranger.strip() == "unhealthy"
    assert stack.engine.run("exec", scheduler.id, "runahead", "healthcheck", "tcp://scheduler:5601") == ""


def test_scaling_under_load_changes_no_stream(stack: Stack, expected: dict[str, str]) -> None:
    assert stack.groups()[-1] == 1
    with StreamingLoad(stack, expected).on() as load:
        load.wait_for_more()
        stack.up(workers=2)
        stack.wait_until(lambda: stack.groups()[-1] == 2, "the group has two ranks")
        load.wait_for_more()
        assert stack.metric("num_workers") == 2
        stack.up(workers=1)
        stack.wait_until(lambda: stack.groups()[-1] == 1, "the group has one rank")
        load.wait_for_more()
    stack.wait_healthy()


def test_killed_worker_changes_no_stream(stack: Stack, expected: dict[str, str]) -> None:
    stack.up(workers=2)
    stack.wait_until(lambda: stack.groups()[-1] == 2, "the group has two ranks")
    with StreamingLoad(stack, expected).on() as load:
        load.wait_for_more()
        killed = stack.containers("worker")[-1]
        stack.engine.run("kill", killed.id)  # Docker treats this as a stop and does not restart the container
        stack.wait_until(lambda: stack.groups()[-1] == 1, "the group has one rank")
        load.wait_for_more()
    stack.up(workers=1)
    stack.wait_healthy()


def test_crashed_worker_is_restarted(stack: Stack, expected: dict[str, str]) -> None:
    (worker,) = stack.containers("worker")
    epochs = len(stack.groups())
    with StreamingLoad(stack, expected).on() as load:
        load.wait_for_more()
        os.kill(worker.details["State"]["Pid"], signal.SIGKILL)
        stack.wait_until(lambda: len(stack.groups()) > epochs, "a new epoch has begun")
        load.wait_for_more()
    (again,) = stack.containers("worker")
    assert (again.id, again.details["RestartCount"]) == (worker.id, worker.details["RestartCount"] + 1)
    stack.wait_healthy()


def test_crashed_scheduler_is_restarted_and_changes_no_stream(stack: Stack, expected: dict[str, str]) -> None:
    """Streams that were open go on, and the worker keeps its weights."""
    (scheduler,), (worker,) = stack.containers("scheduler"), stack.containers("worker")
    resubmitted, loads = stack.metric("requests_resubmitted_total"), stack.metric("weight_loads")
    kill = partial(os.kill, scheduler.details["State"]["Pid"], signal.SIGKILL)
    with stack.client() as client:
        wanted = streamed(client, PROMPTS[0], LONG)
        with StreamingLoad(stack, expected).on() as load:
            load.wait_for_more()
            assert streamed(client, PROMPTS[0], LONG, on_first=kill) == wanted
            assert stack.metric("requests_resubmitted_total") > resubmitted
            load.wait_for_more()
    (again,), (kept,) = stack.containers("scheduler"), stack.containers("worker")
    assert (again.id, again.details["RestartCount"]) == (scheduler.id, scheduler.details["RestartCount"] + 1)
    assert (kept.id, kept.details["RestartCount"]) == (worker.id, worker.details["RestartCount"])
    assert stack.metric("weight_loads") == loads
    stack.wait_healthy()


def test_stopped_worker_is_unhealthy_until_it_continues(stack: Stack) -> None:
    (worker,) = stack.containers("worker")
    check = ("exec", worker.id, "sh", "-c", "runahead healthcheck --connected tcp://scheduler:5602 2>&1 || true")
    assert stack.engine.run(*check) == ""
    os.kill(worker.details["State"]["Pid"], signal.SIGSTOP)
    try:
        assert stack.engine.run(*check) == "unhealthy: the main process does not run: its state in /proc is T\n"
    finally:
        os.kill(worker.details["State"]["Pid"], signal.SIGCONT)
    stack.wait_healthy()


def test_metrics_count_generated_tokens_and_requests(stack: Stack, expected: dict[str, str]) -> None:
    before = stack.metric("generation_tokens_total")
    with stack.client() as client:
        streamed(client, PROMPTS[0], TOKENS)
    stack.wait_until(lambda: stack.metric("generation_tokens_total") == before + TOKENS, "the tokens are counted")
    assert stack.metric("num_requests_running") == 0
    assert stack.metric("request_success_total") > len(expected)


def test_stop_waits_for_open_streams(stack: Stack) -> None:
    """Must be the last test, because it stops the stack."""
    with stack.client() as client:
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model, prompt="A list", max_tokens=1500, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(stream)
        stopping = threading.Thread(target=stack.compose, args=("stop",))
        stopping.start()
        try:
            chunks = [first, *stream]
        finally:
            stopping.join()
    assert chunks[-1].choices[0].finish_reason == "length"
    ends = {container.service: container.details["State"]["ExitCode"] for container in stack.containers()}
    assert ends == {"frontend": 0, "scheduler": 0, "worker": 0}


def _address(container: Container, network: str) -> str:
    return str(container.details["NetworkSettings"]["Networks"][network]["IPAddress"])
