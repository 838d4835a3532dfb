"""The short form of each benchmark, and those of its figures that go to docs/benchmarks.md."""

from collections.abc import Sequence
from typing import NamedTuple

BRANCH = " > "
"""Separates the keys of a path in a report. `*`: each item of a list; `key=value; key=value`: the item with these."""


class Shown(NamedTuple):
    """A number of a report. `each` leads to its value of each repeat, divided by `over` if that is given."""

    label: str
    path: str = ""
    """Default: the median of `each`."""
    each: str = ""
    over: str = ""


class ShortForm(NamedTuple):
    """A benchmark with arguments that make it short. Its figures are a section of the page."""

    section: str
    benchmark: str
    question: str
    arguments: str
    figures: Sequence[Shown]
    seconds: float = 120.0
    """Limit."""
    report: str = ""
    """Name of its report. Default: that of the benchmark."""


def _rates(*numbers: int) -> list[Shown]:
    return [
        Shown(
            f"{name} over no drafts, {number} at once",
            f"speedup_by_concurrency > {method} > {number}",
            f"repeats > text > {number} > none > * > 0",
            f"repeats > text > {number} > {method} > * > 0",
        )
        for method, name in (("eagle", "EAGLE"), ("ngram", "n-gram"))
        for number in numbers
    ]


def _efficiency() -> list[Shown]:
    each = "repeats > runahead > * > output_throughput"
    return [
        Shown("over its own kernels", "ratio", each, "repeats > static batch > * > tokens_per_s"),
        Shown("over bare torch", "over_bare_torch", each, "repeats > bare torch > * > tokens_per_s"),
    ]


def _constrained(label: str, ratio: str, figure: str) -> Shown:
    repeats = [f"repeats > {batch} > * > {figure}" for batch in ("constrained", "unconstrained")]
    return Shown(label, f"{ratio}_ratio", *repeats)


def _bytes(kib: int) -> list[Shown]:
    return [
        Shown(f"{name}, plan of {kib} KiB, us", f"{key}, plan of {1024 * kib} bytes")
        for name, key in (("without keys", "tcp"), ("with CURVE", "CURVE"))
    ]


FORMS = (
    ShortForm(
        "run_ahead", "run_ahead", "How long do workers wait for plans at depth 1, and at depth 2?",
        "--repeats 1 --only sim --output 600",
        [
            Shown(f"{backend}: {label}", path.format(backend))
            for backend in ("sim", "native")
            for label, path in (
                ("tokens/s, depth 2 over 1", "throughput_ratio > {}"),
                ("worker idle at depth 1", "idle_fraction > {} > 1"),
                ("worker idle at depth 2", "idle_fraction > {} > 2"),
            )
        ],
    ),
    ShortForm(
        "served_depths", "served_depths",
        "What do clients gain from depth 2: throughput, first token, inter-token latency?",
        "--models m4 --repeats 3 --waves 1",
        [
            Shown(f"{model}, one thread: {name}, depth 2 over 1", f"{model}, native: depth 2 over depth 1 > {name}")
            for model, names in (("m4", ("tokens/s", "TTFT", "ITL", "ITL p99")), ("m155", ("tokens/s",)))
            for name in names
        ],
    ),
    ShortForm(
        "scheduler_cost", "scheduler_cost", "What does the scheduler cost per step?", "",
        [
            *(Shown(f"{n} running, us", f"step_us > {n}", f"repeats > {n} > * > step_us") for n in (64, 256, 1024)),
            Shown("256 running, with step records over without", "recorded_over_silent > 256"),
        ],
    ),
    ShortForm(
        "recording", "scheduler_cost", "What does `--record` cost per step?", "recording",
        [Shown(f"{n} running, recorded with {what} over not recorded", f"{what}_over_silent > {n}")
         for n in (16, 256) for what in ("tokens",)],
        report="scheduler_cost_recording",
    ),
    ShortForm(
        "balanced_policy", "balanced_policy",
        "When are even microbatches faster on pipeline stages, and when slower?", "--no-processes",
        [
            Shown("published setting, simulated: `chunked` over `balanced`, seconds", "published_setting_ratio"),
            Shown("the worst setting, simulated", "worst_ratio"),
            Shown("four `sim` stages, measured", "measured_ratio"),
            Shown("the same, predicted", "predicted_ratio"),
            Shown("two native stages, measured", "native_measured_ratio"),
            Shown("the same, predicted ", "native_predicted_ratio"),
        ],
    ),
    ShortForm(
        "phased_policy", "phased_policy",
        "How long does a device that cannot mix phases wait for plans, at TP 1 and 4?",
        "--repeats 1 --total 32",
        [
            Shown(f"idle at depth {depth}, TP {ranks}", f"idle_depth{depth} > {ranks}",
                   f"repeats > {ranks} > {depth} > * > idle_fraction")
            for ranks in (1, 4) for depth in (1, 2)
        ],
    ),
    ShortForm(
        "tensor_parallel", "tensor_parallel", "How much faster are two ranks than one?", "--models demo",
        [Shown(f"{model}: tokens/s, TP 2 over TP 1", f"over_one_rank > {model}_tp2") for model in ("demo", "m155")],
    ),
    ShortForm(
        "what_if", "what_if", "How well does a replay under other settings predict what they bring?",
        "--backends sim --scale 0.4 --repeats 1 --changes depth budget blocks",
        [Shown(f"largest error, {name}", f"largest error of {name}")
         for name in ("throughput", "TTFT, mean", "ITL, mean")],
    ),
    ShortForm(
        "engine_efficiency", "engine_efficiency",
        "Which share of the kernels' speed remains behind HTTP, scheduler and sockets? m155, 16 streams",
        "--repeats 1 --waves 2", _efficiency(), seconds=240,
    ),
    ShortForm(
        "engine_efficiency_m4", "engine_efficiency", "The same for m4, whose steps are short", "--model m4",
        _efficiency(),
    ),
    ShortForm(
        "frontend_streaming", "frontend_streaming", "What does a streamed token cost the frontend?",
        "--repeats 1 --only '1 a connection, step 15 ms'",
        [
            Shown(f"tokens per second of its processor time, {what}",
                   f"rows > streams=1 a connection, step 15 ms; server=runahead{suffix} > per_core_s",
                   f"repeats > 1 a connection, step 15 ms, runahead{suffix} > * > per_core_s")
            for what, suffix in (("coalesced", ""), ("a write per token", ", a write per token"))
        ],
    ),
    ShortForm(
        "vllm_streaming", "frontend_streaming",
        "What does a streamed token cost vLLM's API server, compared with this frontend? (`make setup-vllm` first)",
        "--vllm --repeats 1 --only '1 a connection, step 37.6 ms'",
        [Shown(f"tokens per core-second over vLLM's, {name}",
                f"over_vllm > 1 a connection, step 37.6 ms > runahead{suffix}")
         for name, suffix in (("as it is", ""), ("a write per token", ", a write per token"))],
    ),
    ShortForm(
        "step_viewer", "step_viewer", "What do step records and a page that shows them cost the frontend?",
        "--repeats 1",
        [
            Shown("tokens per second of CPU time, with over without", "with_over_without"),
            Shown("a record over the tokens of a step, CPU time", "share"),
        ],
    ),
    ShortForm(
        "overload", "overload",
        "What happens to first tokens and refusals at ten times the load that can be served?",
        "--seconds 10",
        [
            Shown("99th percentile of the first token, 10x over 1x", "p99 of the first token, 10x / 1x"),
            Shown("goodput at 10x, share of the capacity", "repeats > 10x > goodput"),
            Shown("refusal at 10x for the client, p99, ms", "repeats > 10x > refusal_p99_ms"),
            Shown("requests without an answer at 10x", "repeats > 10x > unanswered"),
        ],
    ),
    *(
        ShortForm(
            f"recovery_served_{victim}", "recovery_served",
            f"How soon is a lost {victim} detected, how long do its streams pause, and do they keep their tokens?",
            f"--victim {victim} --moments 3",
            [
                Shown("detection, s", "", "repeats > * > detection_s"),
                Shown("pause, s", "", "repeats > * > pause_s"),
                Shown("equal answers of 64, the least", "equal"),
            ],
        )
        for victim in ("worker", "scheduler")
    ),
    ShortForm(
        "recovery_moves", "recovery_served", "How long does a stream pause that moves to another engine?",
        "--contexts 2048 --moves",
        [Shown(f"{text}, {n} tokens, s", f"pause_seconds > {cause} > {n}")
         for cause, text in (("killed", "its engine is killed"), ("drained", "its engine drains"))
         for n in (2048,)],
    ),
    ShortForm(
        "recovery_cost", "recovery_cost", "What does recovery cost while nothing fails?",
        "--waves 4 --idle-seconds 10",
        [Shown("processor time, us/token", "processor time, us/token"),
         Shown("of that for recovery, us/token", "of that for recovery, us/token")],
    ),
    ShortForm(
        "start_up", "start_up", "How long does a start take?", "--repeats 3 -- --dtype bfloat16",
        [Shown("until the line with the URL, s", "", "repeats > * > ready s"),
         Shown("CPU time of the worker until then, s", "", "repeats > * > worker")],
    ),
    ShortForm(
        "encryption", "encryption", "What does CURVE between services cost per step?", "--repeats 3",
        [figure for kib in (1, 64) for figure in _bytes(kib)],
    ),
    ShortForm(
        "kv_tiers", "kv_tiers", "What do tiers of KV blocks cost without hits, and what do hits bring?",
        "--repeats 1 --passes 1 --waves 2 --input-len 500 --cache-tokens 2048",
        [
            Shown(f"{kind}: {label}", f"{kind} against off > {key}")
            for kind in ("host", "disk")
            for label, key in (
                ("cost without hits, %", "cost without hits, %"),
                ("tokens/s of prompts that come again, over off", "tokens/s again"),
                ("their TTFT over off", "TTFT again"),
            )
        ],
        seconds=240,
    ),
    ShortForm(
        "sampling_parameters", "sampling_parameters",
        "What do penalties and log-probabilities cost per step?", "--waves 1",
        [Shown(f"{name} in 64 of 256 requests: step time over none", f"over_nothing > {key}")
         for name, key in (("penalties", "penalties"), ("log-probabilities", "logprobs"),
                           ("both", "penalties and logprobs"))],
    ),
    ShortForm(
        "structured_output", "structured_output", "What does a quarter of constrained requests cost the batch?", "",
        [
            _constrained("tokens/s, constrained over not", "throughput", "tokens_per_s"),
            _constrained("neighbours' inter-token latency, the same", "neighbour_itl", "neighbour_itl_ms"),
            _constrained("its 99th percentile, the same", "neighbour_itl_p99", "neighbour_itl_p99_ms"),
        ],
    ),
    ShortForm(
        "speculation", "speculation",
        "How much faster are requests with drafts, and what do drafts cost when they fail?",
        "--repeats 1 --prompts 32 --streams 1 8",
        [
            *_rates(1, 4, 8, 16, 32),
            *(Shown(f"no drafts again, {n} at once", f"control > text > {n}") for n in (1, 8)),
            *(Shown(f"{name}, drafts fail: over no drafts, {n} at once", f"adaptive_floor_by_method > {method} > {n}")
              for method, name in (("eagle", "EAGLE"), ("ngram", "n-gram")) for n in (1, 8)),
        ],
        seconds=300,
    ),
    ShortForm(
        "threads", "threads",
        "Is `--threads 0` as fast as the best number of threads, alone and beside other work?",
        "--models m4 --backends native --repeats 1",
        [
            Shown(f"m4, {backend}, {n} at once: {label}",
                   f"rows > model, backend=m4, {backend}; streams={n} > {label}")
            for backend in ("native", "vllm") for n in (1, 16) for label in ("auto over best", "busy over alone")
        ],
    ),
    ShortForm(
        "placement", "placement",
        "What does it cost to choose the engine of a request? ([placement.md](placement.md#figures))",
        "--rounds 2 --engines 16 1000 --tokens 1024",
        [Shown(f"a new prompt of 1,024 tokens, {n} engines, us",
                f"rows > policy=prefix_aware; engines={n}; tokens=1024 > new, us") for n in (16, 1000)],
    ),
    ShortForm(
        "placement_scale", "placement_scale",
        "How do placement policies compare at 1,000 engines, simulated? ([placement.md](placement.md#figures))",
        "--engines 100 --frontends 10 --requests 20000",
        [Shown(f"{policy}: {label}", f"rows > policy={policy} > {key}")
         for policy in ("prefix_aware", "prefix_aware+events", "least_loaded")
         for label, key in (("hits over those of one cache with all memory", "of one cache"),)],
    ),
    ShortForm(
        "decode_bandwidth", "decode_bandwidth",
        "How close is the decode of one stream to the time that reading the weights takes?", "--repeats 3",
        [Shown(f"{kind}: floor over step", f"m155 {kind}")
         for kind in ("bfloat16", "int8", "int4", "int8, throughput", "int4, throughput")],
    ),
    ShortForm(
        "attention", "attention", "How fast is attention over the paged cache beside torch's?", "--repeats 10",
        [Shown(f"{load}, {dtype}: time over torch's", f"over_torch > {load}, {dtype}")
         for load in ("m155, decode 16 x 1,024", "m155, prefill 1,024") for dtype in ("bfloat16", "float32")],
    ),
    ShortForm(
        "float32_products", "float32_products", "How fast are our own float32 products beside torch's?",
        "--models m155 --rows 1 256 --seconds 2",
        [Shown(f"m155, {n} rows, {kind}: time over torch's", f"rows > model=m155; rows={n} > {kind} over it")
         for n in (1, 256) for kind in ("AVX-512", "narrow")],
    ),
    ShortForm(
        "perplexity", "perplexity", "What do the products with quantised weights change of a file's perplexity?",
        "--formats Q4_K IQ4_XS --tokens 256",
        [Shown("largest difference from dequantised float32, in float32, %", "float32")], seconds=240,
    ),
    ShortForm(
        "quantized_products", "quantized_products",
        "How fast are our products with bfloat16, int8 and int4 weights beside oneDNN's in bfloat16?",
        "--shapes 'm155 gate_up' --turns 3",
        [Shown(f"m155 gate_up, {n} rows, {kind}: time over oneDNN's",
                f"rows > product=m155 gate_up; rows={n} > {kind} over it")
         for n in (1, 256) for kind in ("bfloat16", "int8", "int4")],
    ),
    # The longest ones come last: where the time ends before, they are left out.
    ShortForm(
        "engine_efficiency_float32", "engine_efficiency", "The same for m155 in float32",
        "--dtype float32 --repeats 1 --waves 2", _efficiency(), seconds=240,
    ),
    ShortForm(
        "engines_served", "engines_served",
        "How are engines used behind our frontend, and behind SGLang's routers, and what is lost when one dies?",
        "--engines 2 8 --seconds 10 --front runahead --sessions-per-engine 0.4",
        [Shown(f"{n} engines, {front}: {label}", f"rows > engines={n}; in front={front} > {key}")
         for n, label, key in ((8, "share of prompt tokens from caches", "cached share"),
                               (2, "share lost with an engine", "lost with an engine"))
         for front in ("runahead", "sglang-router", "smg")],
        seconds=240,
    ),
    ShortForm(
        "roles_served", "roles_served",
        "How even are short streams beside long prompts: prefill apart, in chunks, or whole?", "--seconds 20",
        [Shown(f"{mode} over apart: {label}", f"{mode} / apart, {column}")
         for mode in ("chunked", "mixed")
         for label, column in (("ITL p99", "gap p99, ms"), ("ITL p99.9", "gap p99.9, ms"),
                               ("TTFT of long prompts", "long: TTFT p50, s"))
         if (mode, label) != ("mixed", "ITL p99")],  # about 1 % of the gaps are long: it is one or not by chance
        seconds=240,
    ),
    ShortForm(
        "peers", "peers",
        "How fast is this beside `vllm serve` and llama.cpp's server on the same model? (builds llama.cpp first)",
        "--repeats 1 --waves 1 --streams 1 32 --servers llama.cpp 'vllm serve, all cores' 'runahead native'",
        [Shown(f"tokens/s over {name}, {n} at once", f"over_{peer} > SmolLM2-135M-Instruct.Q4_1 > {n}")
         for peer, name in (("llama_cpp", "llama.cpp's server"), ("vllm", "`vllm serve`")) for n in (1, 32)],
        seconds=360,
    ),
    ShortForm(
        "vllm_served", "peers", "How much faster is vLLM under this scheduler? (`make setup-vllm` first)",
        "--model m4 --repeats 1 --waves 1 --streams 64 --input-len 64 --kv-gib 2 "
        "--servers 'vllm serve' 'runahead vllm' 'runahead native'",
        [
            Shown(f"m4 at {n}: {name} over the best `vllm serve`, {what}",
                   f"each_over_vllm > m4 > runahead {name} at {n} > {what}")
            for what, numbers in (("tokens/s", (1, 64, 256)), ("p99 ITL", (64,))) for n in numbers
            for name in ("native", "vllm")
        ],
        seconds=360,
    ),
    ShortForm(
        "ray_served", "ray_served",
        "What do Ray and Serve's proxy cost, beside `runahead serve`? (root; `make setup-ray` first)",
        "--repeats 1 --waves 2 --idle-seconds 10",
        [
            *(Shown(f"{way} over `runahead serve`: {name}", f"over_serve > {way} > {name}",
                     f"repeats > * > {way} > {name}", f"repeats > * > runahead serve > {name}")
              for way, name in (("Ray, frontend's port", "tokens/s"), ("Ray, Serve's proxy", "tokens/s"),
                                ("Ray, Serve's proxy", "ITL p99, ms"), ("Ray, Serve's proxy", "TTFT p50, ms"),
                                ("Ray, frontend's port", "start, s"))),
            Shown("Ray and Serve without requests, share of a core", "idle > Ray"),
        ],
        240,
    ),
)  # fmt: skip
