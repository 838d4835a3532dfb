"""The Kubernetes manifests, offline: against Kubernetes' schemas, one another and the settings of the services."""

import copy
import ipaddress
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from services.cli.healthcheck import main as healthcheck
from services.cli.settings import PREFIX, merge
from services.cli.start import check_endpoints
from services.config import SERVICES, SchedulerConfig, ServeConfig, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes" / "base"
LEADER_WORKER_SET_API = "leaderworkerset.x-k8s.io/v1"
SERVICE_NAMES = ("frontend", "scheduler", "worker")

Object = dict[str, Any]
kustomization: Object = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


@cache
def objects() -> tuple[Object, ...]:
    texts = [(FOLDER / name).read_text() for name in kustomization["resources"]]
    return tuple(found for text in texts for found in yaml.safe_load_all(text))


def named(kind: str, name: str) -> Object:
    (found,) = [o for o in objects() if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod_template(service: str) -> Object:
    if service == "worker":
        group: Object = named("LeaderWorkerSet", "runahead-worker")["spec"]["leaderWorkerTemplate"]
        return group["workerTemplate"]  # type: ignore[no-any-return]
    return named("Deployment", f"runahead-{service}")["spec"]["template"]  # type: ignore[no-any-return]


def container(service: str) -> Object:
    (only,) = pod_template(service)["spec"]["containers"]
    return only  # type: ignore[no-any-return]


def environment(service: str) -> dict[str, str]:
    """Return the environment that Kubernetes sets in a pod with the address 10.1.2.3."""
    values: dict[str, str] = {}
    for entry in container(service)["env"]:
        field = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        text = {"status.podIP": "10.1.2.3", None: entry.get("value")}[field]
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], text)
    return values


def selects(selector: Object, service: str) -> bool:
    labels = pod_template(service)["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in selector.items())


def selected(selector: Object) -> list[str]:
    return [service for service in SERVICE_NAMES if selects(selector, service)]


@pytest.mark.parametrize("version", ["1.29", "1.33", kubernetes_validate.latest_version()])
def test_every_object_matches_the_schema_of_its_kind(version: str) -> None:
    for manifest in objects():
        if manifest["apiVersion"] == LEADER_WORKER_SET_API:
            continue
        kubernetes_validate.validate(manifest, version, strict=True)
    template = pod_template("worker")
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "PodTemplate", "template": template}, version, strict=True
    )


def test_worker_group_has_enough_ranks() -> None:
    spec = named("LeaderWorkerSet", "runahead-worker")["spec"]
    group = spec["leaderWorkerTemplate"]
    config = merge(SchedulerConfig, {}, environ=environment("scheduler")).config
    assert isinstance(config.tensor_parallel_size, int)
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    assert spec["replicas"] * group["size"] >= ranks


def test_kustomization_lists_every_file() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(kustomization["resources"])
    (namespace,) = [o["metadata"]["name"] for o in objects() if o["kind"] == "Namespace"]
    assert kustomization["namespace"] == namespace
    names = [(o["kind"], o["metadata"]["name"]) for o in objects()]
    assert len(names) == len(set(names))


def test_images_are_those_of_compose_at_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    tags = {image["name"]: image["newTag"] for image in kustomization["images"]}
    assert set(tags.values()) == {version}
    for service in SERVICE_NAMES:
        image = container(service)["image"]
        assert image in tags
        assert compose[service]["image"] == f"{image}:${{RUNAHEAD_VERSION:-{version}}}"


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_services_accept_their_environment(service: str) -> None:
    given = environment(service)
    model = SERVICES[service]
    unknown = [n for n in given if n != "POD_IP" and n.removeprefix(PREFIX).lower() not in model.model_fields]
    assert not unknown
    check_endpoints(merge(model, {}, environ=given).config)


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_pods_meet_the_restricted_profile(service: str) -> None:
    pod, only = pod_template(service)["spec"], container(service)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False, "variables of Services would have the names of settings"
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(pod)
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {next(iter(set(volume) - {"name"})) for volume in pod["volumes"]} <= {"emptyDir", "secret"}
    assert "memory" in only["resources"]["limits"]
    assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "/tmp" in [mount["mountPath"] for mount in only["volumeMounts"]]


def test_api_keys_are_a_file_from_a_secret() -> None:
    (secret,) = [v for v in pod_template("frontend")["spec"]["volumes"] if v["name"] == "keys"]
    assert secret["secret"]["secretName"] == "runahead-api-keys"
    (mount,) = [m for m in container("frontend")["volumeMounts"] if m["name"] == secret["name"]]
    assert environment("frontend")["RUNAHEAD_API_KEY_FILE"].startswith(mount["mountPath"] + "/")
    assert not any(o["kind"] == "Secret" for o in objects())


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_each_pod_has_the_keys_of_its_role_alone(service: str) -> None:
    (secret,) = [v for v in pod_template(service)["spec"]["volumes"] if v["name"] == "transport"]
    assert secret["secret"] == {"secretName": f"runahead-{service}-keys", "defaultMode": 0o440}
    (mount,) = [m for m in container(service)["volumeMounts"] if m["name"] == "transport"]
    assert mount["readOnly"]
    assert environment(service)["RUNAHEAD_TRANSPORT_KEYS"] == mount["mountPath"]
    assert "RUNAHEAD_INSECURE_TRANSPORT" not in environment(service)


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_every_pod_has_three_probes_that_its_service_answers(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    ports = {port["name"]: port["containerPort"] for port in container(service).get("ports", [])}
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container(service)[kind]
        if "httpGet" in probe:
            assert ports[probe["httpGet"]["port"]] == int(environment(service)["RUNAHEAD_PORT"])
            assert probe["httpGet"]["path"] == ("/readyz" if kind == "readinessProbe" else "/livez")
            continue
        command = probe["exec"]["command"]
        if command[:2] == ["sh", "-c"]:  # Kubernetes replaces variables in commands, but not in probes
            command = command[2].removeprefix("exec ").replace("$POD_IP", "127.0.0.1").split()
        assert "$" not in "".join(command)
        assert command[:2] == ["runahead", "healthcheck"]
        target = command[-1]
        assert target.endswith((":5601", ":5602"))
        arguments = [a.replace("runahead-scheduler", "127.0.0.1") for a in command[2:-1]] + ["tcp://127.0.0.1:1"]
        assert healthcheck(arguments, timeout=0.05) == 1, capsys.readouterr().err
        assert probe["timeoutSeconds"] > 5


def test_a_lost_scheduler_restarts_no_worker() -> None:
    """A worker waits for the next one with its weights, and exits by itself if none comes."""
    probe = container("worker")["livenessProbe"]
    patience = environment("worker").get("RUNAHEAD_RECOVERY_TIMEOUT_SECONDS")
    default = WorkerConfig().recovery_timeout_seconds
    assert probe["failureThreshold"] * probe["periodSeconds"] > float(patience or default)


def test_selectors_match_only_their_own_pods() -> None:
    for manifest in objects():
        component = manifest["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        spec = manifest.get("spec", {})
        match manifest["kind"]:
            case "Deployment":
                assert selected(spec["selector"]["matchLabels"]) == [component]
            case "Service":
                assert selected(spec["selector"]) == [component]
            case "PodDisruptionBudget":
                service = manifest["metadata"]["name"].removeprefix("runahead-")
                assert selected(spec["selector"]["matchLabels"]) == [service]


def test_endpoints_match_the_ports_of_services_and_pods() -> None:
    scheduler, headless = environment("scheduler"), named("Service", "runahead-scheduler")["spec"]
    assert headless["clusterIP"] == "None"
    ports = {port["name"]: port["containerPort"] for port in container("scheduler")["ports"]}
    for port in headless["ports"]:
        assert ports[port["targetPort"]] == port["port"]  # a headless service does not translate ports
    for service, endpoint in (("frontend", "CLIENT"), ("worker", "WORKER")):
        bound = scheduler[f"RUNAHEAD_{endpoint}_ENDPOINT"].removeprefix("tcp://")
        connected = environment(service)["RUNAHEAD_SCHEDULER_ENDPOINT"].removeprefix("tcp://")
        assert ipaddress.ip_address(bound.partition(":")[0]) == ipaddress.ip_address("10.1.2.3")
        assert connected == f"runahead-scheduler:{bound.partition(':')[2]}"
        assert int(bound.partition(":")[2]) in ports.values()
    (http,) = named("Service", "runahead")["spec"]["ports"]
    (port,) = container("frontend")["ports"]
    assert (http["targetPort"], port["containerPort"]) == (port["name"], int(environment("frontend")["RUNAHEAD_PORT"]))


def test_scheduler_has_one_replica_and_is_never_doubled() -> None:
    spec = named("Deployment", "runahead-scheduler")["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate")


def allowed(source: str, target: str, port: int) -> bool:
    """Return whether the network policies let a pod of `source` ("": any other) connect to `port` of `target`."""
    policies = [o["spec"] for o in objects() if o["kind"] == "NetworkPolicy"]

    def passes(own: str, other: str, direction: str, peers: str) -> bool:
        mine = [
            p
            for p in policies
            if selects(p["podSelector"]["matchLabels"], own) and direction.title() in p["policyTypes"]
        ]
        if not mine:
            return True
        rules = [rule for policy in mine for rule in policy.get(direction, ())]
        return any(
            (peers not in rule or any(other and selects(p["podSelector"]["matchLabels"], other) for p in rule[peers]))
            and ("ports" not in rule or port in [p["port"] for p in rule["ports"]])
            for rule in rules
        )

    return (not source or passes(source, target, "egress", "to")) and passes(target, source, "ingress", "from")


def test_network_policies_allow_only_the_connections_of_the_services() -> None:
    ports = (5601, 5602, 8000, 43210)
    paths = {
        (source, target, port)
        for source in ("", *SERVICE_NAMES)
        for target in SERVICE_NAMES
        for port in ports
        if allowed(source, target, port)
    }
    assert paths == {
        ("", "frontend", 8000),
        ("frontend", "scheduler", 5601),
        ("worker", "scheduler", 5602),
        *(("worker", "worker", port) for port in ports),  # between ranks, at any port
    }
    (names,) = named("NetworkPolicy", "runahead-default-deny")["spec"]["egress"]
    assert names["ports"] == [{"port": 53, "protocol": protocol} for protocol in ("UDP", "TCP")]


def test_grace_period_covers_the_pre_stop_hook_and_open_streams() -> None:
    frontend = pod_template("frontend")["spec"]
    before = int(container("frontend")["lifecycle"]["preStop"]["exec"]["command"][1])
    assert frontend["terminationGracePeriodSeconds"] > before + 60
    for role in ("scheduler", "worker"):  # they serve the open streams, if all pods are deleted at once
        assert pod_template(role)["spec"]["terminationGracePeriodSeconds"] == frontend["terminationGracePeriodSeconds"]
    budgets = {o["metadata"]["name"] for o in objects() if o["kind"] == "PodDisruptionBudget"}
    assert budgets == {"runahead-frontend", "runahead-worker"}


def patched(found: Object, patches: list[Object]) -> Object:
    """Return a copy of an object after JSON patches: test, replace and add."""
    found = copy.deepcopy(found)
    for patch in patches:
        *path, last = patch["path"].split("/")[1:]
        where: Any = found
        for key in path:
            where = where[int(key) if isinstance(where, list) else key]
        key = int(last) if isinstance(where, list) and last != "-" else last
        match patch["op"]:
            case "test":
                assert where[key] == patch["value"], patch["path"]
            case "replace":
                assert where[key] is not None
                where[key] = patch["value"]
            case "add" if last == "-":
                where.append(patch["value"])
            case "add":
                assert key not in where
                where[key] = patch["value"]
    return found


def overlaid(overlay: str, kind: str, name: str) -> Object:
    """Return an object with the patches of an overlay, and before them those of the overlay that it is made from."""
    content = yaml.safe_load((FOLDER.parent / overlay / "kustomization.yaml").read_text())
    (base,) = content["resources"]
    found = named(kind, name) if base == "../base" else overlaid(base.removeprefix("../"), kind, name)
    for entry in content["patches"]:
        if entry.get("target") == {"kind": kind, "name": name}:
            found = patched(found, yaml.safe_load((FOLDER.parent / overlay / entry["path"]).read_text()))
    return found


def image_of(overlay: str) -> tuple[str, str]:
    """Return name and tag of an overlay's worker."""
    content = yaml.safe_load((FOLDER.parent / overlay / "kustomization.yaml").read_text())
    (base,), (image,) = content["resources"], content["images"]
    before = "runahead-worker" if base == "../base" else image_of(base.removeprefix("../"))[0]
    assert image["name"] == before
    return image["newName"], image["newTag"]


OVERLAYS = sorted({path.parent.name for path in FOLDER.parent.glob("*/kustomization.yaml")} - {"base"})
GPU_OVERLAYS = [name for name in OVERLAYS if name != "engines"]


def test_no_kustomization_is_made_from_a_folder_above_it() -> None:
    """kustomize calls that a cycle."""
    for file in FOLDER.parent.rglob("kustomization.yaml"):
        for resource in yaml.safe_load(file.read_text())["resources"]:
            assert not file.parent.is_relative_to((file.parent / resource).resolve()), file


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("overlay", [".", *OVERLAYS])
def test_kubectl_builds_every_kustomization(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER.parent / overlay)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    made = list(yaml.safe_load_all(result.stdout))
    assert len(made) == len(objects()) - (overlay == "engines")  # whose engines have their workers
    image = image_of(overlay)[0] if overlay in GPU_OVERLAYS else "runahead-worker"
    assert f"image: {image}:" in result.stdout


@pytest.mark.parametrize("overlay", GPU_OVERLAYS)
def test_an_overlay_for_gpus_has_one_rank_with_one_gpu(overlay: str) -> None:
    group = overlaid(overlay, "LeaderWorkerSet", "runahead-worker")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 1
    pod = group["workerTemplate"]["spec"]
    (worker,) = pod["containers"]
    values = {entry["name"]: entry.get("value", "") for entry in worker["env"]}
    assert (values["RUNAHEAD_DEVICE"], values["RUNAHEAD_KV_CACHE_MEMORY_BYTES"]) == ("cuda", "0")
    assert set(values) <= {f"{PREFIX}{name.upper()}" for name in SERVICES["worker"].model_fields}
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {mount["name"] for mount in worker["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "/cache" in [mount["mountPath"] for mount in worker["volumeMounts"]]
    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker"}, "spec": pod}, "1.33", strict=True
    )
    (scheduler,) = overlaid(overlay, "Deployment", "runahead-scheduler")["spec"]["template"]["spec"]["containers"]
    settings = {entry["name"]: entry.get("value", "") for entry in scheduler["env"]}
    assert settings["RUNAHEAD_TENSOR_PARALLEL_SIZE"] == "1"


@pytest.mark.parametrize(("overlay", "backend"), [("gpu", "native"), ("vllm-gpu", "vllm")])
def test_an_overlay_for_gpus_has_the_image_of_its_backend(overlay: str, backend: str) -> None:
    pod = overlaid(overlay, "LeaderWorkerSet", "runahead-worker")["spec"]["leaderWorkerTemplate"]
    (worker,) = pod["workerTemplate"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value", "") for entry in worker["env"]}
    assert values.get("RUNAHEAD_BACKEND", "native") == backend
    assert GPU_OVERLAYS == ["gpu", "vllm-gpu"]
    name, tag = image_of(overlay)
    compose = yaml.safe_load((ROOT / "deploy" / "compose" / f"{overlay}.yml").read_text())["services"]["worker"]
    assert compose["image"] == f"{name}:${{RUNAHEAD_VERSION:-{tag}}}"
    assert {image["newTag"] for image in kustomization["images"]} == {tag}


def test_engines_are_pods_behind_the_headless_service() -> None:
    engines = overlaid("engines", "Deployment", "runahead-scheduler")
    frontends = overlaid("engines", "Deployment", "runahead-frontend")
    for found in (engines, frontends):
        kubernetes_validate.validate(found, "1.33", strict=True)
    assert engines["spec"]["replicas"] > 1
    assert engines["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    (engine,) = engines["spec"]["template"]["spec"]["containers"]
    assert (engine["image"], engine["args"]) == ("runahead-worker", ["serve", "--headless"])
    values = {e["name"]: e.get("value", "").replace("$(POD_IP)", "10.1.2.3") for e in engine["env"]}
    del values["POD_IP"]
    config = merge(ServeConfig, {"headless": "true"}, environ=values).config
    check_endpoints(config)
    (frontend,) = frontends["spec"]["template"]["spec"]["containers"]
    given = {e["name"]: e["value"] for e in frontend["env"]}
    assert given["RUNAHEAD_ENGINES"] == f"dns://runahead-scheduler:{config.client_endpoint.rpartition(':')[2]}"
    check_endpoints(merge(SERVICES["frontend"], {}, environ=given).config)
