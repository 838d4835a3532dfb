"""The manifests that need operators (LeaderWorkerSet, KEDA, KubeRay), offline, as kustomize renders them."""

import copy
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from services.cli.settings import merge
from services.cli.start import check_endpoints
from services.config import OF_RAY, SERVICES, RayConfig, SchedulerConfig
from services.frontend.engine.availability import GAUGES
from services.ray.resources import missing

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "kubernetes" / "operators"
KINDS = yaml.safe_load((Path(__file__).parent / "operator_kinds.yaml").read_text())
TYPES = {
    **{name: {"type": name} for name in ("string", "integer", "boolean", "object")},
    "number-or-share": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[0-9]+%?$"}]},
    "pod": {"type": "object", "required": ["spec"]},
}

Object = dict[str, Any]
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


@cache
def rendered(overlay: str) -> dict[tuple[str, str], Object]:
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text)}


def schema(fields: Any) -> Object:
    """Return the JSON schema of fields in the form of operator_kinds.yaml."""
    match fields:
        case str():
            return TYPES.get(fields) or {"enum": fields.split("|")}
        case [item]:
            return {"type": "array", "items": schema(item)}
        case {"*": item}:
            return {"type": "object", "additionalProperties": schema(item)}
    return {
        "type": "object",
        "properties": {name.rstrip("!"): schema(value) for name, value in fields.items()},
        "required": [name.rstrip("!") for name in fields if name.endswith("!")],
        "additionalProperties": False,
    }


def pod_templates(overlay: str) -> dict[str, Object]:
    if overlay == "ray":
        cluster = rendered("ray")["RayService", "runahead"]["spec"]["rayClusterConfig"]
        (group,) = cluster["workerGroupSpecs"]
        return {"head": cluster["headGroupSpec"]["template"], "worker": group["template"]}
    group = rendered(overlay)["LeaderWorkerSet", "runahead-engine"]["spec"]["leaderWorkerTemplate"]
    return {"scheduler": group["leaderTemplate"], "worker": group["workerTemplate"]}


def environment(template: Object) -> dict[str, str]:
    """Return what Kubernetes and the operator of LeaderWorkerSets set in a pod with the address 10.1.2.3."""
    (container,) = template["spec"]["containers"]
    values = {"LWS_LEADER_ADDRESS": "runahead-engine-0.runahead-engine.runahead", "POD_IP": "10.1.2.3"}
    for entry in container["env"]:
        text = entry.get("value", "10.1.2.3")
        values[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], text)
    return {name: value for name, value in values.items() if name.startswith("RUNAHEAD_")}


@pytest.mark.parametrize("overlay", ["leader-worker-sets", "ray"])
def test_every_object_matches_the_schema_of_its_kind(overlay: str) -> None:
    for (kind, _), manifest in rendered(overlay).items():
        if kind in KINDS:
            jsonschema.validate(manifest["spec"], schema(KINDS[kind]))
        else:
            kubernetes_validate.validate(manifest, "1.33", strict=True)
    for template in pod_templates(overlay).values():
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(pod, "1.33", strict=True)


@pytest.mark.parametrize("overlay", ["leader-worker-sets", "ray"])
def test_pods_of_engines_are_restricted_and_have_time_for_probes_and_streams(overlay: str) -> None:
    for template in pod_templates(overlay).values():
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "variables of Services would have the names of settings"
        assert pod["terminationGracePeriodSeconds"] >= 120
        (container,) = pod["containers"]
        assert "memory" in container["resources"]["limits"]
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        assert len(probes) == (0 if overlay == "ray" else 3), "KubeRay adds its own"
        assert all(probe["timeoutSeconds"] > 5 for probe in probes)


def test_the_workers_of_the_base_match_the_schema() -> None:
    workers = rendered("../base")["LeaderWorkerSet", "runahead-worker"]
    jsonschema.validate(workers["spec"], schema(KINDS["LeaderWorkerSet"]))


@pytest.mark.parametrize(
    ("overlay", "kind", "path", "value"),
    [
        ("leader-worker-sets", "LeaderWorkerSet", ("leaderWorkerTemplate", "restartPolicy"), "Never"),
        ("leader-worker-sets", "LeaderWorkerSet", ("rolloutStrategy", "maxSurge"), 0),
        ("leader-worker-sets", "ScaledObject", ("maxReplicas",), 8),
        ("leader-worker-sets", "ScaledObject", ("triggers", 0, "metadata", "threshold"), 2),
        ("ray", "RayService", ("rayClusterConfig", "workerGroupSpecs", 0, "rayStartParams", "num-cpus"), 6),
    ],
)
def test_the_schemas_of_operators_refuse_mistakes(
    overlay: str, kind: str, path: tuple[str | int, ...], value: object
) -> None:
    spec = next(copy.deepcopy(o["spec"]) for (k, _), o in rendered(overlay).items() if k == kind)
    target = spec
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spec, schema(KINDS[kind]))


def test_a_group_is_an_engine_that_frontends_find_by_the_headless_service() -> None:
    objects, pods = rendered("leader-worker-sets"), pod_templates("leader-worker-sets")
    scheduler = merge(SchedulerConfig, {}, environ=environment(pods["scheduler"])).config
    check_endpoints(scheduler)
    worker = environment(pods["worker"])
    assert worker["RUNAHEAD_SCHEDULER_ENDPOINT"].rpartition(":")[2] == scheduler.worker_endpoint.rpartition(":")[2]
    assert isinstance(scheduler.tensor_parallel_size, int)
    spec = objects["LeaderWorkerSet", "runahead-engine"]["spec"]
    ranks = scheduler.tensor_parallel_size * scheduler.pipeline_parallel_size
    assert spec["leaderWorkerTemplate"]["size"] == 1 + ranks
    assert spec["replicas"] > 1
    frontend = environment(objects["Deployment", "runahead-frontend"]["spec"]["template"])
    engines = merge(SERVICES["frontend"], {}, environ=frontend).config.engines  # type: ignore[attr-defined]
    service = objects["Service", "runahead-scheduler"]["spec"]
    assert engines == f"dns://runahead-scheduler:{scheduler.client_endpoint.rpartition(':')[2]}"
    assert service["clusterIP"] == "None"
    labels = pods["scheduler"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    budgets = [o for (kind, _), o in objects.items() if kind == "PodDisruptionBudget"]
    assert any(o["spec"]["selector"]["matchLabels"].items() <= labels.items() for o in budgets)


def test_the_number_of_engines_follows_metrics_that_exist() -> None:
    scaled = rendered("leader-worker-sets")["ScaledObject", "runahead-engine"]["spec"]
    target = scaled["scaleTargetRef"]
    assert (target["kind"], target["name"]) in rendered("leader-worker-sets")
    for trigger in scaled["triggers"]:
        assert {*re.findall(r"runahead:(\w+)", trigger["metadata"]["query"])} <= GAUGES


def test_the_ray_service_deploys_the_application_of_the_configuration() -> None:
    service = rendered("ray")["RayService", "runahead"]["spec"]
    deployed = yaml.safe_load(service["serveConfigV2"])
    assert deployed == yaml.safe_load((ROOT / "deploy/ray/config.yaml").read_text())
    (application,) = deployed["applications"]
    config = merge(RayConfig, application["args"], environ={}, omitted=OF_RAY).config
    assert application["import_path"] == "services.ray:app"
    (group,) = service["rayClusterConfig"]["workerGroupSpecs"]
    nodes = [{"CPU": float(group["rayStartParams"]["num-cpus"])}] * group["replicas"]
    assert missing(config.model_copy(update={"data_parallel_size": config.max_engines}), nodes) == ""
    assert service["rayClusterConfig"]["rayVersion"] in (ROOT / "deploy/constraints.txt").read_text()
