"""A model behind HTTP, against the stages of the runner alone. Needs the packages of all services."""

import json
import os
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.cli.bench.load import LoadResult, run_load
from services.config import BenchConfig
from services.worker.backends.native.model.config import ModelConfig
from tests.benchmarks.gpu.engine import StageEngine
from tests.benchmarks.gpu.shapes import SHAPES, RandomCheckpoint
from tests.benchmarks.gpu.target import MeasuredDevice, ServedLoad
from tests.benchmarks.support.random_llama import config_json, tensor_shapes, write_tokenizer
from tests.benchmarks.support.report import medians
from tests.benchmarks.support.servers import runahead_process

WAVES = 3
"""Measured waves of requests, after one that is not measured. Each begins when the one before has ended."""


def served(target: MeasuredDevice) -> dict[str, Any]:
    """Rates of the same load through HTTP and in the bare stages: prompts of one length that all begin together.

    Returns, in tokens per second, medians over waves:
        decode: sum over requests of the tokens behind the first one, by the time from the first one to the end
        whole: all tokens, by the time from the first request to the last answer

    with the ratio of HTTP to the bare stages for each.
    """
    load = target.served
    directory = Path(os.environ.get("TMPDIR", "/tmp")) / "runahead-gpu" / load.model
    if not (directory / "tokenizer.json").is_file():
        write_checkpoint(directory, SHAPES[load.model], target.dtype)
        write_tokenizer(directory)  # the last file, so that what was not finished is written again
    bare = _bare_stages(target)
    flags = (
        f"--max-num-seqs={load.batch}", f"--max-model-len={load.prompt + load.output + 16}",
        f"--max-num-batched-tokens={load.batch * load.prompt}", *load.flags,
    )  # fmt: skip
    with runahead_process(directory, *flags) as server:
        http = _bench(server.url, load)
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
            engine.prefill_random(load.prompt)
            prefilled = time.monotonic()
            engine.decode(load.output - 1, 2)
            ended = time.monotonic()
            decode = load.batch * (load.output - 1) / (ended - prefilled)
            waves.append({"decode": decode, "whole": load.batch * load.output / (ended - began)})
    return medians(waves[1:])


def write_checkpoint(directory: Path, shape: ModelConfig, dtype: torch.dtype) -> None:
    """Write random weights in Hugging Face format, one file per layer."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = RandomCheckpoint(torch.device("cuda" if torch.cuda.is_available() else "cpu"), shape.num_layers)
    rope = shape.ropes[0]
    assert rope is not None
    config = config_json(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position,
        rms_norm_eps=shape.norm_eps,
        rope_theta=rope.theta,
        tie_word_embeddings=shape.tied,
        torch_dtype=shape.dtype,
    )
    index: dict[str, str] = {}
    for part, tensors in groupby(tensor_shapes(config).items(), lambda tensor: tensor[0].split(".")[:3]):
        file = f"{'-'.join(part)}.safetensors"
        values = {name: checkpoint.take(name, size, dtype).cpu() for name, size in tensors}
        save_file(values, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(values, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def _bench(url: str, load: ServedLoad) -> dict[str, float]:
    """Raises: RuntimeError, if a request failed."""
    waves = []
    for seed in range(1 + WAVES):  # other prompts each time, which no prefix cache has
        config = BenchConfig(
            base_url=url, num_prompts=load.batch, random_input_len=load.prompt,
            random_output_len=load.output, ignore_eos=True, seed=seed,
        )  # fmt: skip
        waves.append(rates(run_load(config)))
    return medians(waves[1:])


def rates(result: LoadResult) -> dict[str, float]:
    """Raises: RuntimeError, if a request failed."""
    if failed := [request.error for request in result.requests if request.error]:
        raise RuntimeError(f"{len(failed)} of {len(result.requests)} requests failed: {failed[0]}")
    spans = ((each.output_tokens - 1, each.ended - each.arrivals[0]) for each in result.requests)
    whole = sum(each.output_tokens for each in result.requests)
    return {"decode": sum(count / seconds for count, seconds in spans), "whole": whole / result.duration}
