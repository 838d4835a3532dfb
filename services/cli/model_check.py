"""Checks of model, sizes and memory before any service starts, without torch and without reading weights."""

import importlib.util
from pathlib import Path

from protocol.membership import Shard
from services.checkpoint import CheckpointError, is_local, resolve
from services.checkpoint.default_model import packaged_model
from services.cli.settings import ConfigurationError
from services.config import ServeConfig
from services.units import size_text
from services.worker import machine
from services.worker.backends.native.memory import RankMemory, rank_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import ModelPart, tensor_parallel_sizes
from services.worker.runner import LoadError

PACKAGES = {"native": ("torch", "numba"), "vllm": ("vllm",), "sim": ("torch",)}
"""Packages that a backend needs."""
REMEDY = {
    "native": "install the extra: pip install 'runahead-engine[native]'",
    "sim": "install the extra: pip install 'runahead-engine[native]'",
    "vllm": "docs/vllm.md has the installation; --backend native needs no vLLM",
}
GROUP = 32
"""Inputs that int8 and int4 weights share a scale for."""


def check_sizes(config: ServeConfig) -> None:
    """Check that the backend is installed, and that model, ranks, context and memory fit together.

    Names on the hub, and models of vLLM, are checked by the workers. So are the sizes of the default model, unless a
    setting has changed them.

    Raises: ConfigurationError
    """
    missing = [name for name in PACKAGES[config.backend] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"--backend {config.backend} needs {' and '.join(missing)}; {REMEDY[config.backend]}"
        )
    if config.backend != "native" or not is_local(config.model):
        return
    try:
        path = resolve(config.model)
        if path == packaged_model() and not config.model_fields_set & CHECKED:
            return
        check_native(config, path)
    except (CheckpointError, LoadError) as error:
        raise ConfigurationError(str(error)) from None


CHECKED = {
    "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "kv_cache_memory_bytes", "quantization"
}  # fmt: skip
"""Settings that may not fit the model."""


def check_native(config: ServeConfig, path: Path) -> None:
    """Raises: ConfigurationError, CheckpointError, LoadError"""
    model = ModelConfig.from_checkpoint(path)
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigurationError(
            f"--max-model-len {config.max_model_len} is more than the {model.max_position} positions of the model; "
            f"use --max-model-len {model.max_position}"
        )
    memory = [rank_memory(config, path, part, config.block_size) for part in parts(config, model)]
    _check_memory(config, memory, config.max_model_len or model.max_position)


def parts(config: ServeConfig, model: ModelConfig) -> list[ModelPart]:
    """Return the part of each rank on this machine. Raises: LoadError, if the model cannot be divided like this"""
    group = GROUP if config.quantization in ("int8", "int4") else 1
    tensor_parallel_sizes(model, group)
    tp, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    size = 1 if tp == "auto" else tp
    return [
        ModelPart.from_shard(model, Shard(rank, size, stage, stages), group)
        for stage in range(stages)
        for rank in range(size)
    ]


def cache_bytes(config: ServeConfig, memory: RankMemory, context: int) -> int:
    """Return the bytes of the largest KV cache that a rank allocates."""
    useful = 2 * config.max_num_seqs * -(-context // config.block_size) * memory.kv_block
    return min(machine.cache_budget(config.kv_cache_memory_bytes), useful)


def _check_memory(config: ServeConfig, memory: list[RankMemory], context: int) -> None:
    """Raises: ConfigurationError"""
    free, weights = machine.free_memory(), sum(rank.weights for rank in memory)
    caches = sum(cache_bytes(config, rank, context) for rank in memory) if config.kv_cache_memory_bytes else 0
    if weights > free:
        raise ConfigurationError(
            f"the weights take {size_text(weights)} of memory, but {size_text(free)} are free; use a smaller model, "
            "--quantization int4, or another machine"
        )
    if weights + caches > free:
        each = max(0, free - weights) // len(memory)
        raise ConfigurationError(
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}: {size_text(weights)} of weights and "
            f"{size_text(caches)} of KV cache are more than the {size_text(free)} of memory that are free; use at "
            f"most {each}"
        )
