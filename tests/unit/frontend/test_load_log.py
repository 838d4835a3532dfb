"""The line about the engine's load: rates between two readings, and silence without load."""

from services.frontend.load_log import LoadLog, total

BEFORE = {"steps_total": 10.0, "prompt_tokens": 100.0, "generation_tokens": 50.0, "num_requests_running": 0.0}
AFTER = {
    "steps_total": 110.0, "prompt_tokens": 12_100.0, "generation_tokens": 1050.0, "num_requests_running": 3.0,
    "num_requests_waiting": 2.0, "kv_cache_usage_perc": 0.125, "prefix_cache_queries": 200.0, "prefix_cache_hits": 50.0,
}  # fmt: skip


def test_line_has_rates_and_shares() -> None:
    load = LoadLog()
    assert load.line(BEFORE, 100.0) is None
    assert load.line(AFTER, 110.0) == (
        "load: prompt 1,200.0 tokens/s, generation 100.0 tokens/s, 3 requests run, 2 wait, KV cache 12.5 % used, "
        "prefix cache hits 25.0 %"
    )


def test_load_is_that_of_all_engines() -> None:
    stats = total([AFTER, AFTER])
    assert (stats["num_requests_running"], stats["generation_tokens"], stats["kv_cache_usage_perc"]) == (6, 2100, 0.125)


def test_drafts_are_shown_if_there_are_some() -> None:
    load = LoadLog()
    load.line(BEFORE, 100.0)
    drafts = {"spec_decode_num_draft_tokens": 10.0, "spec_decode_num_accepted_tokens": 4.0}
    assert str(load.line(AFTER | drafts, 110.0)).endswith("prefix cache hits 25.0 %, accepted drafts 40.0 %")


def test_no_line_without_load() -> None:
    load = LoadLog()
    load.line(AFTER, 100.0)
    assert load.line(AFTER | {"num_requests_running": 0.0}, 110.0) is None
    assert str(load.line(AFTER, 120.0)).endswith("12.5 % used")  # requests run, though no step ended or found a prefix


def test_restarted_scheduler_gives_no_negative_rates() -> None:
    load = LoadLog()
    load.line(AFTER, 100.0)
    assert "generation 0.0 tokens/s" in str(load.line(BEFORE | {"num_requests_running": 1.0}, 110.0))
