"""Flags and commands of vLLM, SGLang, llama.cpp and Ollama that have another name here, or none; a hint for each."""

_EVERY_REQUEST = "with each request"
_BY_HINT = {
    # Another name
    "use --model": "-m --model-path",
    "use --model organisation/name:Q4_K_M": "-hf --hf-repo -hff --hf-file",
    "use --served-model-name": "-a --alias",
    "use --tokenizer": "--tokenizer-path",
    "use --revision": "--tokenizer-revision --code-revision",
    "use --chat-template": "--chat-template-file",
    "use --quantization": "-q",
    "use --tensor-parallel-size": "-tp --tp --tp-size",
    "use --pipeline-parallel-size": "-pp --pp --pp-size",
    "use --data-parallel-size": "-dp --dp-size --data-parallel-size-local",
    "use --threads": "-t -tb --threads-batch",
    "use --device cuda": "-ngl --gpu-layers --n-gpu-layers -dev",
    "set the variable CUDA_VISIBLE_DEVICES": "--base-gpu-id --device-ids -mg --main-gpu",
    "use --enforce-eager": "--disable-cuda-graph --enable-torch-compile --cuda-graph-max-bs",
    "use --kernels": "--attention-backend",
    "use --max-model-len": "-c --ctx-size --context-length",
    "use --max-num-seqs": "-np --parallel --max-running-requests",
    "use --max-num-batched-tokens": "-b -ub --batch-size --ubatch-size --chunked-prefill-size --max-prefill-tokens",
    "use --max-num-queued-reqs": "--max-queued-requests",
    "use --block-size": "--page-size",
    "use --kv-cache-memory-bytes": "--kv-cache-memory --max-total-tokens",
    "use --gpu-memory-utilization, or --kv-cache-memory-bytes 4G": "--mem-fraction-static",
    "use --kv-offload-bytes": "--kv-offloading-size --enable-hierarchical-cache",
    "use --kv-peer-address, --kv-offload-dir or --kv-offload-bytes": "--kv-transfer-config",
    "use --no-enable-prefix-caching": "--disable-radix-cache",
    "use --no-async-scheduling": "--disable-overlap-schedule",
    "use --batch-queue-depth": "--num-scheduler-steps",
    "use --scheduling-policy": "--schedule-policy",
    "use --batching-policy phased": "--no-enable-chunked-prefill",
    "use --step-timeout-seconds": "--watchdog-timeout",
    'use --speculative-config \'{"method": ..., "model": ...}\'': (
        "-md --model-draft --speculative-model --speculative-draft-model-path --speculative-algorithm --spec-method "
        "--spec-model -sc"
    ),
    "use --speculative-config '{\"num_speculative_tokens\": ...}'": (
        "--draft-max --draft-min --num-speculative-tokens --speculative-num-draft-tokens --speculative-num-steps "
        "--spec-tokens"
    ),
    "use --lora-modules NAME=DIRECTORY": "--lora --lora-paths",
    "use --pooling-type": "--pooling",
    "use --default-chat-template-kwargs": "--chat-template-kwargs",
    "use --default-chat-template-kwargs '{\"enable_thinking\": false}'": "--reasoning-budget",
    "use --reasoning-parser": "--reasoning-format",
    "use --request-timeout": "-to --timeout",
    "use --runner": "--convert",
    "use --runner pooling": "--is-embedding",
    "use --runner, and --pooler-config '{\"task\": ...}'": "--task",
    "use --pooler-config": "--override-pooler-config",
    "use --hf-overrides with --backend vllm": (
        "--rope-scaling --rope-theta --rope-freq-base --rope-scale --json-model-override-args"
    ),
    "use --enforce-eager with --backend vllm, or leave it out": (
        "-cc --compilation-config --cudagraph-capture-sizes --optimization-level -O0 -O1 -O2 -O3"
    ),
    "use --generation-config": "--sampling-defaults",
    "use --ssl-certfile": "--ssl-cert-file",
    "use --ssl-keyfile": "--ssl-key-file",
    "use --ssl-ca-certs": "--ssl-cert-reqs",
    "use --root-path": "--api-prefix",
    "use --no-ui": "--no-webui",
    "use --log-level": "--uvicorn-log-level -v --verbose -lv --log-verbosity --log-level-http",
    "use --log-level and --log-format": "--log-config-file",
    "use --log-level warning": "--disable-log-requests --no-enable-log-requests --disable-log-stats --log-disable",
    "use --enable-admin-routes and --api-key": "--admin-api-key",
    "use --allowed-media-domains, or send a data URL": "--allowed-local-media-path",
    # Somewhere else
    "set the variable HF_TOKEN": "--hf-token",
    "set the variable HF_HOME": "--download-dir",
    "set the variable HF_HUB_OFFLINE=1": "--offline",
    "put a proxy in front of the server": "--middleware --ssl-ciphers --enable-ssl-refresh",
    "use `runahead trace`": "--profiler-config --collect-detailed-traces",
    "start more `runahead frontend` processes (docs/deployment.md)": "--api-server-count",
    "start it with `numactl`": "--numa --numa-bind",
    "start the services of each machine (docs/deployment.md)": (
        "--nnodes --node-rank --master-addr --master-port --dist-init-addr --data-parallel-address "
        "--data-parallel-rank --data-parallel-start-rank --data-parallel-rpc-port --data-parallel-hybrid-lb "
        "--data-parallel-external-lb"
    ),
    "use `runahead ray`": "--data-parallel-backend",
    "a format is a class of the source (CONTRIBUTING.md)": "--tool-parser-plugin --reasoning-parser-plugin",
    "each request is logged; --log-level debug logs its steps": "--enable-log-requests --log-requests",
    f"send max_tokens {_EVERY_REQUEST}": "-n --predict --n-predict",
    "use --override-generation-config '{\"temperature\": ...}'": (
        "--temp --top-k --top-p --min-p --repeat-penalty --presence-penalty --frequency-penalty "
        "--preferred-sampling-params"
    ),
    f"send it {_EVERY_REQUEST}": "--return-tokens-as-token-ids",
    f"send structured_outputs or response_format {_EVERY_REQUEST}": "--grammar --grammar-file -j --json-schema",
    f"send stream_options {_EVERY_REQUEST}": "--enable-force-include-usage",
    f"a request without a seed is given its own; leave it out, or send one {_EVERY_REQUEST}": "--seed --random-seed -s",
}
_LEFT_OUT = {
    "it is the default: --batching-policy chunked": "--enable-chunked-prefill",
    "it is always on": (
        "--jinja -fa --flash-attn -cb --cont-batching --cache-prompt --enable-mixed-chunk --kv-unified -kvu"
    ),
    "requests that do not fit the context are refused": "--no-context-shift --context-shift --allow-auto-truncate",
    "/server_info and the page show what runs": "--props --slots --no-slots",
    "/metrics is always there": "--metrics --enable-metrics",
    "/v1/embeddings is always there": "--embedding --embeddings",
    "/rerank is always there": "--rerank --reranking",
    "/load is always there": "--enable-server-load-tracking",
    "/tokenizer_info is always there": "--enable-tokenizer-info-endpoint",
    "every response has x-request-id": "--enable-request-id-headers",
    "every usage has prompt_tokens_details": "--enable-prompt-tokens-details --enable-cache-report",
    "the KV cache has the type of the weights (--dtype)": "--kv-cache-dtype --cache-type-k --cache-type-v -ctk -ctv",
    "preempted requests are recomputed": "--swap-space",
    "weights are not offloaded": "--cpu-offload-gb --cpu-moe --n-cpu-moe -ot",
    "weights are mapped files, or packed once": "--mlock --no-mmap",
    "an engine does not sleep": "--enable-sleep-mode",
    "a stop lets open requests end, and a second signal does not": "--shutdown-timeout",
    "there is no access log": "--disable-uvicorn-access-log --disable-access-log-for-endpoints",
    "no such pages are served": "--disable-fastapi-docs",
    "texts of requests are never logged": "--max-log-len --enable-log-outputs",
    "code of a checkpoint is never executed": "--trust-remote-code",
    "a request cannot contain a template": "--trust-request-chat-template",
    "contents have the form that the template shows": "--chat-template-content-format",
    "there is one tokenizer, that of tokenizer.json": "--tokenizer-mode --skip-tokenizer-init",
    "each rank is a process of its own, on a Ray cluster with `runahead ray`": "--distributed-executor-backend",
    "ranks of a group exchange tensors by one means": "--disable-custom-all-reduce --enable-p2p-check --nccl-port",
    "an architecture has one implementation": "--model-impl",
    "kernels are prepared before a server is ready": "--no-warmup --skip-server-warmup",
    "adapters stay in memory": "--max-cpu-loras --fully-sharded-loras",
    "text models are served; images and sounds with --backend vllm": "--mmproj --enable-multimodal",
    "a rank has whole experts": "--enable-expert-parallel -ep --ep-size --enable-eplb --eplb-config --all2all-backend",
    "a rank has the whole context": "-dcp --decode-context-parallel-size -pcp --prefill-context-parallel-size",
    "llguidance is the only one": "--guided-decoding-backend --structured-outputs-config --grammar-backend",
    "SHA-256 is the only one": "--prefix-caching-hash-algo",
    "a request may ask for 20 at most": "--max-logprobs",
    "they are those of the model itself, before any parameter": "--logprobs-mode",
    "an answer has the role assistant": "--response-role",
    "a prompt may have 16 images and 16 sounds": "--limit-mm-per-prompt",
    "images and sounds are read as the checkpoint says": "--mm-processor-kwargs --media-io-kwargs --mm-encoder-tp-mode",
    "what was computed from images and sounds is not kept": "--mm-processor-cache-gb --mm-processor-cache-type",
    "requests bring no code": "--logits-processors",
    "a prompt is text, token ids or messages": "--enable-prompt-embeds --enable-mm-embeds",
    "prompts are random token ids": "--dataset-name",
}
_MAPPINGS = (
    "--speculative-config", "--default-chat-template-kwargs", "--override-generation-config", "--kv-events-config",
    "--pooler-config", "--hf-overrides",
)  # fmt: skip
"""Their fields are flags of their own in vLLM, such as --speculative-config.method."""
HINTS: dict[str, str] = {flag: text for text, flags in _BY_HINT.items() for flag in flags.split()} | {
    flag: f"{text}; leave it out" for text, flags in _LEFT_OUT.items() for flag in flags.split()
}
"""By flag; the text follows "No such option: FLAG; "."""

COMMANDS: dict[str, str] = {
    **dict.fromkeys(("run", "chat", "complete"), "use `runahead serve MODEL`, then the page or a client"),
    **dict.fromkeys(("launch_server", "launch"), "use `runahead serve MODEL`"),
    "pull": "`runahead serve NAME` downloads a model of the hub",
    **dict.fromkeys(("ps", "list"), "use `runahead status`"),
    "collect-env": "use `runahead doctor`",
}
"""By command; the text follows "No such command 'NAME'; "."""


def hint(flag: str) -> str | None:
    """Return the refusal of a flag that others have, None for any other."""
    text = HINTS.get(flag)
    setting, dot, field = flag.partition(".")
    if text is None and flag.startswith("--no-") and f"--{flag.removeprefix('--no-')}" in HINTS:
        text = "leave it out"
    elif dot and setting in _MAPPINGS:
        text = f"use {setting} '{{\"{field.replace('-', '_')}\": ...}}'"
    return None if text is None else f"No such option: {flag}; {text}"
