"""Properties of a checkpoint that can be read before vLLM loads it."""

import json
from pathlib import Path
from typing import Any

from services.checkpoint import CheckpointError, default_dtype, read_json
from services.config import WorkerConfig
from services.worker.runner import SINGLE_GPU, Identity, LoadError
from services.worker.weights import model_digest, open_checkpoint, tokenizer_digest

DTYPES = ("float32", "bfloat16", "float16")
"""Data types of activations that vLLM computes in."""
DTYPE_CHOICES = DTYPES[:2]
"""Values of --dtype, beside `auto`."""


def read_identity(directory: Path, worker: WorkerConfig) -> Identity:
    """Return the properties of the checkpoint. `Identity.model_hash` is the digest of config.json, of every tensor's
    name, shape and dtype, and of the settings that change the model.

    Raises: LoadError, if config.json or a header of the weights cannot be read, or its dtype is unknown.
    """
    try:
        config = read_json(directory, "config.json")
    except CheckpointError as error:
        raise LoadError(f"{error}; download the model again") from error
    model = config.get("text_config", config)
    settings = [] if worker.quantization is None else [worker.quantization]
    if worker.runner != "auto":
        settings.append(worker.runner)
    settings += [json.dumps(x, sort_keys=True) for x in (worker.pooler_config, worker.hf_overrides) if x]
    single = SINGLE_GPU if worker.device == "cuda" else ""
    layers = model.get("num_hidden_layers") or model.get("n_layer") or 1
    return Identity(
        model_hash=model_digest(directory, open_checkpoint(directory), settings),
        dtype=_dtype(worker, model),
        tensor_parallel_sizes=(1,) if single else _tensor_parallel_sizes(model),
        max_pipeline_parallel_size=1 if single else int(layers),
        tokenizer=tokenizer_digest(directory),
        leaves_rows_out=not single,  # the end of a forward pass on a GPU is not observed
        waits_for_masks=False,
        single_rank=single,
        serves_loras=not single,  # not run on a GPU yet
    )


def _dtype(worker: WorkerConfig, model: dict[str, Any]) -> str:
    """Return the dtype of --dtype, of the demo model, or of the checkpoint, in this order."""
    if worker.dtype != "auto":
        return worker.dtype
    own = str(model.get("dtype") or model.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = default_dtype(worker.model) or own
    if dtype not in DTYPES:
        raise LoadError(
            f"config.json has the dtype {dtype}, which is not supported; "
            f"use --dtype {' or --dtype '.join(DTYPE_CHOICES)}"
        )
    return dtype


def _tensor_parallel_sizes(model: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of ranks that the attention heads can be divided among, in ascending order. vLLM pads the
    vocabulary, and checks the other dimensions when it loads."""
    heads = model.get("num_attention_heads") or model.get("n_head")
    if not isinstance(heads, int) or heads < 1:
        return (1,)
    kv_heads = model.get("num_key_value_heads") or heads
    return tuple(
        size for size in range(1, heads + 1) if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    )
