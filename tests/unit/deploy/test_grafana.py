"""Dashboard, alert rules and provisioning files: valid, and consistent with one another."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
GRAFANA = ROOT / "deploy" / "grafana"


def test_panels_have_ids_places_and_queries_of_their_own() -> None:
    board = json.loads((GRAFANA / "runahead.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        taken = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= taken
        assert (panel["type"] == "row") == (not panel.get("targets"))
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model_name"}


def test_alerts_have_a_summary_and_a_remedy() -> None:
    (group,) = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    assert len(set(names)) == len(names)
    for rule in group["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["expr"]
        assert set(rule["annotations"]) == {"summary", "description"}


def test_provisioned_paths_are_those_of_the_overlay() -> None:
    volumes = {}
    overlay = yaml.safe_load((ROOT / "deploy" / "compose" / "observability.yml").read_text())["services"]
    for service in overlay.values():
        volumes |= {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/runahead.yml").read_text())["providers"]
    assert f"{provider['options']['path']}/runahead.json" in volumes
    scrape = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
    assert volumes[scrape["rule_files"][0]] == "./deploy/grafana/alerts.yml"
    (job,) = scrape["scrape_configs"]
    assert job["dns_sd_configs"] == [{"names": ["frontend"], "type": "A", "port": 8000}]
    assert job["authorization"] == {"credentials_file": "/run/secrets/metrics_key"}
    assert overlay["prometheus"]["secrets"] == ["metrics_key"]
    assert f'job="{job["job_name"]}"' in (GRAFANA / "alerts.yml").read_text()


promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed"
)


@promtool
def test_a_frontend_that_is_found_no_longer_is_an_alert(tmp_path: Path) -> None:
    """A container that has ended has no address, so there is no `up` of it that is 0."""
    alert = {"eval_time": "5m", "alertname": "RunaheadFrontendDown"}
    labels = {"severity": "critical", "job": "runahead"}
    annotations = {
        "summary": "The frontend (none is found) does not answer",
        "description": "Its streams are broken. Read its log; `runahead status` shows whether another frontend serves.",
    }
    series = {"series": 'up{job="runahead", instance="10.0.0.2:8000"}', "values": "1x4 stale"}
    expected = [{"exp_labels": labels, "exp_annotations": annotations}]
    test = {"interval": "15s", "input_series": [series], "alert_rule_test": [{**alert, "exp_alerts": expected}]}
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(GRAFANA / "alerts.yml")], "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_accepts_the_alert_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", GRAFANA / "alerts.yml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
