"""The histogram equals that of prometheus_client; statistics of the engine are exported."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protocol.requests import EnginePhase, EngineState
from services.frontend.engine.ledger import RequestLedger
from services.frontend.metrics import VLLM_NAMES, Metrics
from services.frontend.metrics.collectors import ValueHistogram
from services.frontend.metrics.vllm_names import VLLM
from services.frontend.placement import Placement

BUCKETS = (0.01, 0.5, 1, 2.5, 10)
LABELS = ("demo", "0")


def samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.one_of(st.sampled_from(BUCKETS), st.floats(0, 20))))
def test_histogram_equals_that_of_the_library(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    seconds = ValueHistogram("runahead:x_seconds", "text", BUCKETS, LABELS)
    ours.register(seconds)
    histogram = Histogram("runahead:x_seconds", "text", ("model_name", "engine"), buckets=BUCKETS, registry=theirs)
    for value in values:
        seconds.observe(value)
        histogram.labels(*LABELS).observe(value)
    histogram.labels(*LABELS)
    assert samples(ours) == pytest.approx(samples(theirs)), "sums may differ in the last digits"


def engines_in(*states: EngineState) -> SimpleNamespace:
    """Return what metrics read of an `EngineClient` whose engines are in these states."""
    engines = {str(i): SimpleNamespace(name=str(i), state=state, ready=True) for i, state in enumerate(states)}
    return SimpleNamespace(
        engines=engines,
        ledger=RequestLedger(),
        num_shed=0,
        owners=SimpleNamespace(decisions={("place", "1", "load"): 2, ("move", "0", "lost"): 1}),
        placement=Placement(),
    )


def text_of(*states: dict[str, object]) -> str:
    """Return the metrics of a frontend with engines in these states."""
    engines = engines_in(*(EngineState(EnginePhase.READY, **state) for state in states))  # type: ignore[arg-type]
    return asyncio.run(Metrics(engines, "demo").render()).decode()  # type: ignore[arg-type]


def test_statistics_of_the_engine_are_labelled_by_position() -> None:
    stats = {"accepted:0": 5.0, "accepted:1": 3.0, "steps_total": 7.0, "epoch": 2.0}
    first = {"stats": stats, "max_loras": 2, "running_loras": ["b", "a"], "waiting_loras": ["c"]}
    text = text_of(first, {"stats": {"steps_total": 9.0}, "max_loras": 1, "running_loras": ["a"]})
    for line in (
        'runahead:accepted_total{engine="0",model_name="demo",position="0"} 5.0',
        'runahead:accepted_total{engine="0",model_name="demo",position="1"} 3.0',
        'runahead:steps_total{engine="0",model_name="demo"} 7.0',
        'runahead:steps_total{engine="1",model_name="demo"} 9.0',
        'runahead:epoch{engine="0",model_name="demo"} 2.0',
        'vllm:lora_requests_info{max_lora="3",running_lora_adapters="a,b",waiting_lora_adapters="c"} ',
        'runahead:stream_moves_total{engine="0",model_name="demo",reason="lost"} 1.0',
        'runahead:placements_total{engine="1",model_name="demo",reason="load"} 2.0',
        'runahead:requests_total{code="429",engine="0",model_name="demo",outcome="rejected"} 0.0',
    ):
        assert line in text
    assert text.count("# TYPE runahead:steps_total") == 1


async def test_other_tasks_run_while_metrics_are_rendered() -> None:
    engine = engines_in(EngineState(EnginePhase.READY))
    turns = 0

    async def other_task() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other_task())
    text = await Metrics(engine, "demo").render()  # type: ignore[arg-type]
    task.cancel()
    assert turns >= text.count(b"# TYPE"), "one turn for each family"


def rendered(**state: object) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text_of(state))
        for sample in family.samples
    }


COMMON = (("engine", "0"), ("model_name", "demo"))


def test_steps_by_their_tokens_are_a_histogram() -> None:
    stats = {
        "iteration_tokens:0": 2.0,
        "iteration_tokens:2": 1.0,
        "iteration_tokens:13": 1.0,
        "iteration_tokens_sum": 20016.0,
    }
    found = rendered(stats=stats)
    name = "vllm:iteration_tokens_total"
    below = [value for (bucket, labels), value in found.items() if bucket == f"{name}_bucket"]
    assert below == [2, 2, *[3] * 11, 4]
    assert found[f"{name}_sum", COMMON] == 20016
    assert found[f"{name}_count", COMMON] == 4


def test_sizes_of_the_cache_and_waiting_requests_have_vllm_labels() -> None:
    by_reason = {"capacity": 4.0, "deferred": 1.0}
    stats = {f"num_requests_waiting_by_reason:{reason}": count for reason, count in by_reason.items()}
    found = rendered(num_blocks=100, block_size=16, stats=stats, info={"prefix_caching": "False", "engine": "another"})
    (sizes,) = [dict(labels) for (name, labels) in found if name == "vllm:cache_config_info"]
    assert (sizes["block_size"], sizes["num_gpu_blocks"], sizes["engine"]) == ("16", "100", "0")
    assert sizes["enable_prefix_caching"] == "False"
    assert [dict(labels)["engine"] for (name, labels) in found if name == "runahead:engine_info"] == ["0"]
    waiting = {dict(labels)["reason"]: value for (name, labels), value in found.items()
               if name == "vllm:num_requests_waiting_by_reason"}  # fmt: skip
    assert waiting == by_reason


def test_refusals_of_all_engines_are_one_sample_under_vllm_name() -> None:
    text = text_of(*({"stats": {"admission_rejections:max_num_queued_tokens": count}} for count in (6.0, 1.0)))
    rejected = 'vllm:admission_rejections_total{model_name="demo",reason="max_num_queued_tokens"} '
    assert [line for line in text.splitlines() if line.startswith(rejected)] == [f"{rejected}7.0"]


def test_every_family_of_the_list_is_shown_under_both_names() -> None:
    stats = dict.fromkeys(
        (
            "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions",
            "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens",
            "external_prefix_cache_queries", "external_prefix_cache_hits",
            "admission_rejections:max_num_queued_reqs", "num_requests_waiting_by_reason:capacity",
            "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens",
            "spec_decode_num_accepted_tokens_per_pos:0", "iteration_tokens_sum",
        ),
        1.0,
    )  # fmt: skip
    lines = text_of({"num_blocks": 2, "block_size": 16, "stats": stats}).splitlines()
    families = [line.split()[2] for line in lines if line.startswith("# TYPE") and not line.endswith("_created gauge")]
    assert len(set(families)) == len(families)
    for name in VLLM_NAMES:
        for prefix in ("runahead:", "vllm:"):
            assert {prefix + name, f"{prefix}{name}_total"} & set(families), name
    for name, former in (
        ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        *((each, f"gpu_{each}") for each in ("prefix_cache_queries", "prefix_cache_hits")),
        ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    ):
        now, before = ([line for line in lines if line.startswith(VLLM + each)] for each in (name, former))
        assert [line.replace(former, name, 1) for line in before] == now != []
