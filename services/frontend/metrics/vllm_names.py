"""Families of metrics once more, under vLLM's names."""

from collections import defaultdict
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from services.frontend.metrics.collectors import OURS

VLLM = "vllm:"
VLLM_NAMES = frozenset(
    {
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
        "engine_sleep_state", "cache_config_info", "lora_requests_info", "prompt_tokens", "prompt_tokens_by_source",
        "prompt_tokens_cached", "prompt_tokens_cached_by_source", "generation_tokens", "request_success",
        "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
        "external_prefix_cache_hits", "admission_rejections",
        "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens",
        "request_params_n", "request_params_max_tokens", "request_num_preemptions",
        "request_prefill_kv_computed_tokens",
    }
)  # fmt: skip
"""Families that are also shown under vLLM's name."""
FORMER_NAMES = {
    "inter_token_latency_seconds": "time_per_output_token_seconds",
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
}
"""Names that vLLM has replaced, which older dashboards and autoscalers ask for."""


def with_vllm_names(family: Metric) -> Iterator[Metric]:
    """Yield the family under vLLM's name and its former one, if it is one of VLLM_NAMES."""
    name = family.name.removeprefix(OURS)
    if name in VLLM_NAMES:
        yield _renamed(family, name, name)
    if name in FORMER_NAMES:
        yield _renamed(family, name, FORMER_NAMES[name])


def _renamed(family: Metric, name: str, other: str) -> Metric:
    """Return the family, whose name is `name` with our prefix, under another name."""
    renamed = Metric(VLLM + other, family.documentation, family.type)
    samples = family.samples
    if name == "admission_rejections":  # has no label `engine` in vLLM
        totals = defaultdict[tuple[str, str], float](float)
        for sample in samples:
            totals[sample.labels["model_name"], sample.labels["reason"]] += sample.value
        labels = ({"model_name": model, "reason": reason} for model, reason in totals)
        samples = [*map(Sample, [samples[0].name] * len(totals), labels, totals.values())]
    renamed.samples = [Sample(s.name.replace(OURS + name, VLLM + other, 1), *s[1:]) for s in samples]
    return renamed
