"""Flags of vLLM and SGLang that have another name here, or none, with a hint for each."""

_LEFT_OUT = "leave it out"

HINTS: dict[str, str] = {
    "-tp": "use --tensor-parallel-size",
    "--tp": "use --tensor-parallel-size",
    "--tp-size": "use --tensor-parallel-size",
    "-pp": "use --pipeline-parallel-size",
    "--pp": "use --pipeline-parallel-size",
    "--pp-size": "use --pipeline-parallel-size",
    "-q": "use --quantization",
    "-dp": "start several servers behind a router",
    "--data-parallel-size": "start several servers behind a router",
    "--model-path": "use --model",
    "--context-length": "use --max-model-len",
    "--max-running-requests": "use --max-num-seqs",
    "--chunked-prefill-size": "use --max-num-batched-tokens",
    "--gpu-memory-utilization": "give the size of the KV cache: --kv-cache-memory-bytes 4G",
    "--mem-fraction-static": "give the size of the KV cache: --kv-cache-memory-bytes 4G",
    "--kv-cache-memory": "use --kv-cache-memory-bytes",
    "--kv-cache-dtype": f"the KV cache has the type of the weights (--dtype); {_LEFT_OUT}",
    "--swap-space": f"preempted requests are recomputed; {_LEFT_OUT}",
    "--cpu-offload-gb": f"weights are not offloaded; {_LEFT_OUT}",
    "--enable-chunked-prefill": "it is the default: --batching-policy chunked",
    "--no-enable-chunked-prefill": "use --batching-policy phased",
    "--disable-radix-cache": "use --no-enable-prefix-caching",
    "--disable-overlap-schedule": "use --no-async-scheduling",
    "--schedule-policy": "use --scheduling-policy",
    "--uvicorn-log-level": "use --log-level",
    "--enable-log-requests": "each request is logged; --log-level debug logs its steps",
    "--disable-log-requests": "use --log-level warning",
    "--no-enable-log-requests": "use --log-level warning",
    "--disable-log-stats": "use --log-level warning",
    "--disable-uvicorn-access-log": f"there is no access log; {_LEFT_OUT}",
    "--trust-remote-code": f"code of a checkpoint is never executed; {_LEFT_OUT}",
    "--hf-token": "set the variable HF_TOKEN",
    "--download-dir": "set the variable HF_HOME",
    "--tokenizer-mode": f"there is one tokenizer, that of tokenizer.json; {_LEFT_OUT}",
    "--distributed-executor-backend": f"each rank is a process of its own; {_LEFT_OUT}",
    "--speculative-model": 'use --speculative-config \'{"method": ..., "model": ...}\'',
    "--num-speculative-tokens": "use --speculative-config '{\"num_speculative_tokens\": ...}'",
    "--guided-decoding-backend": f"llguidance is the only one; {_LEFT_OUT}",
    "--structured-outputs-config": f"llguidance is the only one; {_LEFT_OUT}",
    "--task": f"every model serves text and embeddings; {_LEFT_OUT}",
    "--runner": f"every model serves text and embeddings; {_LEFT_OUT}",
    "--override-generation-config": "--generation-config vllm drops the checkpoint's; requests can set each value",
    "--compilation-config": "use --enforce-eager with --backend vllm, or leave it out",
    "--enable-lora": "LoRA adapters are not served",
    "--lora-modules": "LoRA adapters are not served",
    "--api-server-count": "start more `runahead frontend` processes (docs/deployment.md)",
    "--middleware": "put a proxy in front of the server",
}
"""By flag; the text follows "No such option: FLAG; "."""


def hint(flag: str) -> str | None:
    """Return the refusal of a flag that others have, None for any other."""
    text = HINTS.get(flag)
    return None if text is None else f"No such option: {flag}; {text}"
