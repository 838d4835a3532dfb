"""Metrics of a load. Names and definitions are those of `vllm bench serve`; times are in milliseconds."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from services.config import BenchConfig

if TYPE_CHECKING:
    from services.cli.bench.load import LoadResult, SentRequest


def summarize(config: BenchConfig, load: "LoadResult") -> dict[str, object]:
    """Return settings, totals, rates per second and distributions over the requests that succeeded.

    ttft: time to first token; tpot: mean time per further token, per request; itl: time between two chunks; e2el:
    end-to-end latency.
    """
    done = [request for request in load.requests if not request.error]
    streamed = [request for request in done if request.arrivals]
    inputs = sum(len(request.prompt) for request in done)
    outputs = sum(request.output_tokens for request in done)
    result: dict[str, object] = {
        "base_url": config.base_url,
        "model_id": load.model,
        "num_prompts": config.num_prompts,
        "request_rate": config.request_rate or "inf",
        "max_concurrency": config.max_concurrency,
        "max_concurrent_requests": load.max_concurrent,
        "random_input_len": config.random_input_len,
        "random_output_len": config.random_output_len,
        "ignore_eos": config.ignore_eos,
        "temperature": config.temperature,
        "seed": config.seed,
        "duration": load.duration,
        "completed": len(done),
        "failed": len(load.requests) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / load.duration,
        "output_throughput": outputs / load.duration,
        "max_output_tokens_per_s": _peak(streamed),
        "total_token_throughput": (inputs + outputs) / load.duration,
    }
    tpot = [(r.arrivals[-1] - r.arrivals[0]) / (r.output_tokens - 1) for r in streamed if r.output_tokens > 1]
    for name, seconds in {
        "ttft": [r.arrivals[0] - r.started for r in streamed],
        "tpot": tpot,
        "itl": [later - earlier for r in streamed for earlier, later in pairwise(r.arrivals)],
        "e2el": [r.ended - r.started for r in done],
    }.items():
        result |= _distribution(name, np.array(seconds or [0.0]) * 1e3)
    return result


def _peak(requests: "list[SentRequest]") -> float:
    """Return the most chunks that arrived in one second, counted from the first request on."""
    if not requests:
        return 0.0
    start = min(request.started for request in requests)
    seconds = np.array([time - start for request in requests for time in request.arrivals]).astype(int)
    return float(np.bincount(seconds).max())


def _distribution(name: str, values: NDArray[np.float64]) -> dict[str, float]:
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
    }
