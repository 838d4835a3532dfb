"""Queries of dashboards and alerts have data: those of vLLM's dashboard and those of this project."""

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import ServeProcess, serving, wait_until

GRAFANA = Path(__file__).resolve().parents[2] / "deploy" / "grafana"
SERVED = "demo_model"
MODEL, INTERVAL = '{model_name="$model_name"}', "[$__rate_interval]"
VLLM_QUERIES = [
    *(
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:{name}_seconds_bucket{MODEL}{INTERVAL})))"
        for name in ("e2e_request_latency", "inter_token_latency", "time_per_output_token", "time_to_first_token")
        for quantile in (0.99, 0.95, 0.9, 0.5)
    ),
    *(
        f"rate(vllm:{name}_seconds_sum{MODEL}{INTERVAL}) / rate(vllm:{name}_seconds_count{MODEL}{INTERVAL})"
        for name in ("e2e_request_latency", "inter_token_latency", "time_per_output_token", "time_to_first_token")
    ),
    *(
        f"rate(vllm:{name}{MODEL}{INTERVAL})"
        for name in (
            "prompt_tokens_total", "generation_tokens_total", "request_queue_time_seconds_sum",
            "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
            "request_max_num_generation_tokens_sum",
        )
    ),
    *(f"vllm:{name}{MODEL}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
    f"sum by(le) (increase(vllm:request_prompt_tokens_bucket{MODEL}{INTERVAL}))",
    f"sum by(le) (increase(vllm:request_generation_tokens_bucket{MODEL}{INTERVAL}))",
    f"sum by(finished_reason) (increase(vllm:request_success_total{MODEL}{INTERVAL}))",
]  # fmt: skip
"""Every query of vLLM's examples/observability/prometheus_grafana/grafana.json, also of the one of 0.11."""
ENDPOINT_PICKER = (
    "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "lora_requests_info", "cache_config_info",
)  # fmt: skip
"""Gauges that the Endpoint Picker of the Gateway API inference extension reads by default, without "vllm:"."""
DRAFTS = re.compile(r"spec_decode_")
"""Metrics of an engine with speculation."""


def own_queries() -> list[str]:
    panels = json.loads((GRAFANA / "runahead.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def alert_queries() -> list[str]:
    (group,) = yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]
    return [rule["expr"] for rule in group["rules"]]


def generate(sim: ServeProcess, requests: int = 3) -> None:
    with sim.client() as client:
        for _ in range(requests):
            client.completions.create(model=SERVED, prompt="Once upon a time", max_tokens=16, temperature=0)


def exposed(sim: ServeProcess) -> dict[str, set[str]]:
    """Return the labels of each metric by its name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(sim.get("/metrics")[1]):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_and_label_of_the_queries_exists(sim: ServeProcess) -> None:
    generate(sim)
    wait_until(lambda: sim.metric("generation_tokens_total") > 0, "the scheduler has reported its totals")
    found = exposed(sim)
    queries = [*VLLM_QUERIES, *own_queries(), *alert_queries()]
    named = set()
    for query in queries:
        for name, labels in re.findall(r"((?:vllm|runahead):\w+)(\{[^}]*\})?", query):
            named.add(name)
            if DRAFTS.search(name):
                continue
            assert name in found, query
            assert set(re.findall(r"(\w+)=", labels)) <= found[name], query
            for grouped in re.findall(r"by ?\(([^)]*)\)", query):
                assert {label.strip() for label in grouped.split(",")} <= found[name], query
    assert len(named) > 40
    assert {f"vllm:{name}" for name in ENDPOINT_PICKER} <= set(found)


class PrometheusServer:
    """Debian's Prometheus, which reads the metrics of one server twice a second."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process = process
        self._http = httpx.Client(base_url=url)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression; none before Prometheus answers."""
        assert self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            response = self._http.get("/api/v1/query", params={"query": expression})
            if response.status_code != 503:
                content = response.json()
                assert content["status"] == "success", f"{expression}: {content}"
                return content["data"]["result"]  # type: ignore[no-any-return]
        return []

    def value(self, expression: str) -> float:
        return sum(float(series["value"][1]) for series in self.query(expression))

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def scraping(url: str, directory: Path, key: Path = GRAFANA / "no-key") -> Iterator[PrometheusServer]:
    """Run Prometheus with the project's job. `key`: the file that the overlay mounts."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus (Debian's package) is not installed")
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [url.partition("//")[2]]}]
    job["authorization"]["credentials_file"] = str(key)
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(GRAFANA / "alerts.yml")],
        "scrape_configs": [job],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [
        binary,
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with (directory / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        server = PrometheusServer(process, f"http://127.0.0.1:{port}")
        try:
            yield server
        finally:
            server.close()
            process.kill()


@pytest.fixture
def prometheus(sim: ServeProcess, tmp_path: Path) -> Iterator[PrometheusServer]:
    with scraping(sim.url, tmp_path) as server:
        yield server


def test_every_panel_has_data_in_prometheus(sim: ServeProcess, prometheus: PrometheusServer) -> None:
    wait_until(lambda: prometheus.value("runahead:engine_ready") == 1, "Prometheus has read the metrics")
    generate(sim, 1)
    before = sim.metric("generation_tokens_total")
    generate(sim)
    wait_until(lambda: sim.metric("generation_tokens_total") >= before + 48, "the totals are reported")
    total = sim.metric("generation_tokens_total")
    wait_until(lambda: prometheus.value("runahead:generation_tokens_total") >= total, "Prometheus has read the totals")
    for query in [*VLLM_QUERIES, *own_queries()]:
        if DRAFTS.search(query):
            continue
        filled = query.replace("$model_name", SERVED).replace("$__rate_interval", "1m")
        series = prometheus.query(filled)
        assert series, f"no data: {filled}"
        values = [float(one["value"][1]) for one in series]
        assert any(math.isfinite(value) for value in values), f"no number: {filled}: {values}"
    assert prometheus.query("ALERTS") == [], "a server that serves has an alert"


def test_metrics_behind_a_key_are_read_with_the_key_of_the_overlay(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with serving("--backend", "sim", "--api-key", "sesame") as server, scraping(server.url, tmp_path, key) as reader:
        wait_until(lambda: reader.value("runahead:engine_ready") == 1, "Prometheus has read the metrics")
        key.write_text("another\n")
        wait_until(lambda: bool(reader.query("up == 0")), "Prometheus is refused with another key")
