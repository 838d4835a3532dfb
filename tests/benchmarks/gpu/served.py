"""A model behind HTTP, against the stages of the runner alone. Needs the packages of all services."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from services.cli.bench.load import LoadResult, run_load
from services.config import BenchConfig
from services.worker.backends.native.model.config import ModelConfig
from tests.benchmarks.gpu.engine import StageEngine
from tests.benchmarks.gpu.processes import kill_tree
from tests.benchmarks.gpu.shapes import SHAPES, RandomCheckpoint
from tests.benchmarks.gpu.target import MeasuredDevice, ServedLoad

START = 240.0
"""Seconds that the server has until it is ready."""
WAVES = 3
"""Measured waves of requests, after one that is not measured. Each begins when the one before has ended."""


def served(target: MeasuredDevice) -> dict[str, Any]:
    """Rates of the same load through HTTP and in the bare stages: prompts of one length that all begin together.

    Returns, in tokens per second, medians over waves:
        decode: sum over requests of the tokens behind the first one, by the time from the first one to the end
        whole: all tokens, by the time from the first request to the last answer

    with the ratio of HTTP to the bare stages for each.
    """
    from tests.benchmarks.support.random_llama import write_tokenizer

    load = target.served
    directory = Path(os.environ.get("TMPDIR", "/tmp")) / "runahead-gpu" / load.model
    if not (directory / "tokenizer.json").is_file():
        write_checkpoint(directory, SHAPES[load.model], target.dtype)
        write_tokenizer(directory)  # the last file, so that what was not finished is written again
    bare = _bare_stages(target)
    with _server(directory, load) as url:
        http = _bench(url, load)
    ratios = {f"{name}_ratio": http[name] / bare[name] for name in bare}
    print(f"{load.model}, {load.batch} requests: HTTP over bare stages: {ratios}", flush=True)
    return {"model": load.model, "batch": load.batch, "http": http, "bare": bare, **ratios}


def _bare_stages(target: MeasuredDevice) -> dict[str, float]:
    load, kernels, waves = target.served, target.make(target.dtype), []
    tokens = load.prompt + load.output
    budget = load.batch * load.prompt
    with StageEngine(SHAPES[load.model], kernels, target.dtype, load.batch, tokens, budget) as engine:
        for _ in range(1 + WAVES):
            began = time.monotonic()
            engine.prefill(load.prompt)
            prefilled = time.monotonic()
            engine.decode(load.output - 1, 2)
            ended = time.monotonic()
            decode = load.batch * (load.output - 1) / (ended - prefilled)
            waves.append({"decode": decode, "whole": load.batch * load.output / (ended - began)})
    return _medians(waves[1:])


def _medians(waves: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(wave[name] for wave in waves) for name in waves[0]}


def write_checkpoint(directory: Path, shape: ModelConfig, dtype: torch.dtype) -> None:
    """Write random weights in Hugging Face format, one file per layer."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = RandomCheckpoint(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    index: dict[str, str] = {}

    def write(file: str, tensors: dict[str, tuple[int, ...]]) -> None:
        values = {name: checkpoint.take(name, size, dtype).cpu() for name, size in tensors.items()}
        save_file(values, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    hidden, mlp = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    ends = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    write("ends.safetensors", ends | ({} if shape.tied else {"lm_head.weight": (shape.vocab_size, hidden)}))
    products = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}."
        tensors: dict[str, tuple[int, ...]] = {
            f"{layer}self_attn.{name}_proj.weight": size for name, size in products.items()
        }
        tensors |= {f"{layer}mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = (hidden, mlp)
        tensors |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        write(f"layer-{number}.safetensors", tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config_json(shape), indent=1))


def config_json(shape: ModelConfig) -> dict[str, object]:
    rope = shape.ropes[0]
    assert rope is not None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": shape.dtype,
    }


@contextmanager
def _server(directory: Path, load: ServedLoad) -> Iterator[str]:
    """Yield the URL of a server that is ready.

    Raises: RuntimeError, with the end of its output, if it is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "services.cli", "serve", str(directory), "--port", str(port)]
    command += ["--max-num-seqs", str(load.batch), "--max-model-len", str(load.prompt + load.output + 16)]
    command += ["--max-num-batched-tokens", str(load.batch * load.prompt), *load.flags]
    log = directory.parent / f"{load.model}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + START
        while not _ready(f"http://127.0.0.1:{port}/readyz"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready:\n{log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _bench(url: str, load: ServedLoad) -> dict[str, float]:
    """Raises: RuntimeError, if a request failed."""
    waves = []
    for seed in range(1 + WAVES):  # other prompts each time, which no prefix cache has
        config = BenchConfig(
            base_url=url, num_prompts=load.batch, random_input_len=load.prompt,
            random_output_len=load.output, ignore_eos=True, seed=seed,
        )  # fmt: skip
        waves.append(rates(run_load(config)))
    return _medians(waves[1:])


def rates(result: LoadResult) -> dict[str, float]:
    """Raises: RuntimeError, if a request failed."""
    if failed := [request.error for request in result.requests if request.error]:
        raise RuntimeError(f"{len(failed)} of {len(result.requests)} requests failed: {failed[0]}")
    spans = ((each.output_tokens - 1, each.ended - each.arrivals[0]) for each in result.requests)
    whole = sum(each.output_tokens for each in result.requests)
    return {"decode": sum(count / seconds for count, seconds in spans), "whole": whole / result.duration}
