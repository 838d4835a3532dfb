"""`runahead status`: state, ranks and load of a running server, from its HTTP API."""

import json
import re
from collections.abc import Iterator
from typing import Any

from services.cli.ask import ServerAddress, about_server, ask, ask_object
from services.config.commands import ShowConfig
from services.units import size_text

_SAMPLE = re.compile(r'^runahead:(\w+)\{engine="[^"]*",model_name="[^"]*"\} (\S+)$', re.MULTILINE)
_TIER = re.compile(r'^runahead:kv_tier_(bytes|hit_tokens)(?:_total)?\{.*\btier="(\w+)".*\} (\S+)$', re.MULTILINE)

_MEANS = ("kv_cache_usage_perc", "expected_queue_seconds", "seconds_per_prompt_token", "epoch")
"""Metrics of which a sum over engines says nothing."""
_SHOWN = (
    "phase", "detail", "served_model_names", "features", "max_model_len", "num_blocks", "block_size", "version",
)  # fmt: skip


@about_server
def status(server: ServerAddress, config: ShowConfig) -> int:
    """Print the status. Return the exit status: 0 if requests are served, else 1."""
    found = collect(server)
    print(json.dumps(found, indent=2) if config.as_json else "\n".join(lines(server.url, found)))
    return 0 if found["phase"] == "ready" else 1


def collect(server: ServerAddress) -> dict[str, Any]:
    """Return the answer of /server_info, the metrics that have no labels of their own, and those of tiers.

    Those of several engines are added up, or their mean is taken.

    Raises: NoAnswer
    """
    info = ask_object(server, "/server_info", *_SHOWN)
    samples: dict[str, list[float]] = {}
    tiers: dict[str, dict[str, float]] = {}
    text = ask(server, "/metrics").decode()
    for name, value in _SAMPLE.findall(text):
        samples.setdefault(name, []).append(float(value))
    metrics = {name: sum(found) / (len(found) if name in _MEANS else 1) for name, found in samples.items()}
    for kind, tier, value in _TIER.findall(text):
        counts = tiers.setdefault(tier, {"bytes": 0.0, "hit_tokens": 0.0})
        counts[kind] += float(value)
    return {**info, "metrics": metrics, "kv_tiers": tiers}


def lines(url: str, found: dict[str, Any]) -> Iterator[str]:
    features, metrics = found["features"], found["metrics"]
    detail = "" if found["detail"] == found["phase"] else f": {found['detail']}"
    yield f"{', '.join(found['served_model_names'])} at {url}: {found['phase']}{detail}"
    rows = {
        "engine": ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in features.items()),
        "engines": _counted(metrics, engine_ready="ready"),
        "ranks": _counted(
            metrics, num_workers="registered", weight_loads="loads of weights", epochs_lost_total="groups lost"
        ),
        "requests": _counted(metrics, num_requests_running="running", num_requests_waiting="waiting"),
        "context": f"{found['max_model_len']} tokens" if found["max_model_len"] else "",
        "KV cache": f"{found['num_blocks']:,} blocks of {found['block_size']} tokens, "
        f"{metrics.get('kv_cache_usage_perc', 0.0):.1%} in use",
        "KV tiers": ", ".join(
            f"{name} {size_text(int(tier['bytes']))} ({tier['hit_tokens']:,.0f} tokens found)"
            for name, tier in found["kv_tiers"].items()
        ),
        "steps": _counted(metrics, inflight_steps="in flight", steps_total="so far"),
        "recoveries": _counted(metrics, requests_resubmitted_total="requests resubmitted"),
        "version": found["version"],
    }
    for name, text in rows.items():
        if text:
            yield f"  {name:<11} {text}"


def _counted(metrics: dict[str, float], **words: str) -> str:
    """Return the metrics that exist, such as "running 3, waiting 0"."""
    return ", ".join(f"{word} {metrics[name]:,.0f}" for name, word in words.items() if name in metrics)
