"""Overlays: those that run on any machine are started together, the others are only read by Compose."""

import os
import shutil
import signal
from pathlib import Path

import openai
import pytest
import yaml

from tests.docker.engine import ROOT, DockerEngine
from tests.docker.stack import Stack, free_ports, running, streamed


def test_two_frontends_with_keys_serve_a_mounted_model_whose_blocks_outlive_the_worker(
    engine: DockerEngine, tmp_path: Path
) -> None:
    first = free_ports(4)
    keys, model = tmp_path / "keys", tmp_path / "model"
    keys.write_text("sesame\nmellon\n")
    keys.chmod(0o440)  # the group is 0, as in the containers
    shutil.copytree(ROOT / "deploy" / "demo_model", model)
    with running(
        engine,
        "runahead-test-overlays",
        ("frontends", "api-key", "model", "kv-keeper"),
        RUNAHEAD_PORT=f"{first}-{first + 3}",
        RUNAHEAD_API_KEY_FILE=str(keys),
        RUNAHEAD_MODEL_DIR=str(model),
        RUNAHEAD_SERVED_MODEL_NAME="mine",
    ) as stack:
        frontends = stack.containers("frontend")
        assert len({frontend.host_port for frontend in frontends}) == len(frontends) == 2
        texts = set()
        for frontend, key in zip(frontends, ("sesame", "mellon"), strict=True):
            address = f"http://127.0.0.1:{frontend.host_port}/v1"
            with openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client:
                assert [card.id for card in client.models.list().data] == ["mine"]
                texts.add(streamed(client, "The os module", 64))
            with (
                openai.OpenAI(base_url=address, api_key="unknown", max_retries=0) as stranger,
                pytest.raises(openai.AuthenticationError),
            ):
                stranger.models.list()
            assert key not in str(frontend.details["Config"])
        assert len(texts) == 1
        (worker,) = stack.containers("worker")
        os.kill(worker.details["State"]["Pid"], signal.SIGKILL)
        stack.wait_until(lambda: "KV blocks are adopted" in stack.logs("scheduler"), "the next worker has them")


@pytest.mark.parametrize(("overlay", "image"), [
    ("gpu", "worker-cuda"), ("vllm", "worker-vllm-cpu"), ("vllm-gpu", "worker-vllm"),
])  # fmt: skip
def test_overlay_changes_what_workers_run(engine: DockerEngine, overlay: str, image: str) -> None:
    name = "runahead-test-config"
    plain, changed = (
        yaml.safe_load(Stack(engine, name, overlays).compose("config"))["services"]["worker"]
        for overlays in ((), (overlay,))
    )
    assert changed["image"].startswith(f"runahead-{image}:")
    assert changed["environment"].items() > plain["environment"].items() - {("RUNAHEAD_BACKEND", "native")}
    assert changed["read_only"] is plain["read_only"] is True


def test_overlay_adds_prometheus_and_grafana(engine: DockerEngine) -> None:
    content = yaml.safe_load(Stack(engine, "runahead-test-config", ("observability",)).compose("config"))
    assert {"prometheus", "grafana"} < set(content["services"])
    assert all(content["services"][name]["read_only"] is True for name in ("prometheus", "grafana"))
