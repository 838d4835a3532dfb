"""Checks of model, sizes and memory before any service starts, without torch and without reading weights."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from protocol.kv_groups import most_blocks
from protocol.membership import Shard
from services.checkpoint import CheckpointError, is_gguf, is_local, read_text, resolve, weight_shards
from services.checkpoint.default_model import packaged_model
from services.cli.serving_memory import ServingMemory, serving_memory
from services.cli.settings import ConfigurationError, refusing
from services.config import ServeConfig, flag
from services.units import size_text
from services.worker.backends.kv_blocks import affordable_blocks
from services.worker.backends.native.memory import RankMemory, rank_memory
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import ModelPart, tensor_parallel_sizes
from services.worker.kernels.layout import inputs_kept_together
from services.worker.runner import LoadError


def check_sizes(config: ServeConfig) -> None:
    """Check that the backend is installed, and that model, ranks, context and memory fit together.

    Names on the hub, and models of vLLM, are checked by the workers. So are the sizes of the default model, unless a
    setting has changed them.

    Raises: ConfigurationError
    """
    _check_package(config, "vllm" if config.backend == "vllm" else "torch")
    if config.backend != "native":
        return
    serving = serving_memory(config)
    if config.device != "cuda" and not serving.is_gpu:
        _check_package(config, "numba")  # compiles the kernels of processors
        _check_no_gpu_settings(config)
    if not is_local(config.model):
        return
    with refusing(CheckpointError, LoadError):
        path = resolve(config.model)
        if path != packaged_model() or config.model_fields_set & CHECKED:
            check_native(config, path, serving)


def _check_no_gpu_settings(config: ServeConfig) -> None:
    """Raises: ConfigurationError, for a setting that has no effect without a GPU"""
    for name in ("gpu_memory_utilization", "enforce_eager"):
        if getattr(config, name) != ServeConfig.model_fields[name].default:
            raise ConfigurationError(
                f"{flag(name)} is for GPUs, and this machine has none that torch can use; leave it out"
            )


CHECKED = {
    "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "kv_cache_memory_bytes", "quantization",
    "gpu_memory_utilization",
}  # fmt: skip
"""Settings that may not fit the model."""


def _check_package(config: ServeConfig, name: str) -> None:
    """Raises: ConfigurationError, if a package that the backend needs is not installed"""
    if importlib.util.find_spec(name) is None:
        remedy = "install the extra: pip install 'runahead-engine[native]'"
        if name == "vllm":
            remedy = "docs/vllm.md has the installation; --backend native needs no vLLM"
        raise ConfigurationError(f"--backend {config.backend} needs {name}; {remedy}")


def check_native(config: ServeConfig, path: Path, serving: ServingMemory) -> None:
    """Raises: ConfigurationError, CheckpointError, LoadError"""
    model = ModelConfig.from_checkpoint(path)
    context = context_length(config, model)
    memory = rank_memories(config, path, parts(config, model), context)
    memory *= config.data_parallel_size
    _check_memory(config, memory, context, serving)
    for rank in memory if config.kv_cache_memory_bytes else ():
        affordable_blocks(config.kv_cache_memory_bytes, rank.kv_block)
    for shard in () if is_gguf(path) else weight_shards(path):
        _check_shard(shard)


def _check_shard(path: Path) -> None:
    """Raises: CheckpointError, if a file of weights is damaged or cut off"""
    from safetensors import SafetensorError, safe_open  # of the extra native; `runahead plan` needs none

    try:
        with safe_open(path, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not a valid safetensors file ({error}); download the model again") from None


def check_drafter(config: ServeConfig) -> None:
    """Check that the drafter's checkpoint exists, if it is on this machine. Raises: ConfigurationError"""
    speculation = config.speculative_config
    if speculation is None or not speculation.model or not is_local(speculation.model):
        return
    with refusing(CheckpointError, prefix="--speculative-config: "):
        resolve(speculation.model)


def check_tokenizer(config: ServeConfig) -> None:
    """Check that the tokenizer exists and is whole, if it is on this machine. Raises: ConfigurationError"""
    source = config.tokenizer or config.model
    if not is_local(source):
        return
    with refusing(CheckpointError, prefix="--tokenizer: " if config.tokenizer else ""):
        path = resolve(source)
        text = "{}" if is_gguf(path) else read_text(path, "tokenizer.json")
    if text is None:
        raise ConfigurationError(f"{path} has no tokenizer.json; name another tokenizer with --tokenizer")
    text = text.strip()
    if text[:1] != "{" or text[-1:] != "}":  # its services parse it
        raise ConfigurationError(f"{path / 'tokenizer.json'} is damaged or cut off; download it again")


def context_length(config: ServeConfig, model: ModelConfig) -> int:
    """Return the tokens of the longest sequence. Raises: ConfigurationError, if the model has fewer positions"""
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ConfigurationError(
            f"--max-model-len {config.max_model_len} is more than the {model.max_position} positions "
            f"{model.positions}; use --max-model-len {model.max_position}"
        )
    return config.max_model_len or model.max_position


def parts(config: ServeConfig, model: ModelConfig) -> list[ModelPart]:
    """Return the part of each rank on this machine. Raises: LoadError, if the model cannot be divided like this"""
    group = inputs_kept_together(config.quantization)
    tensor_parallel_sizes(model, group)
    tp, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    size = 1 if tp == "auto" else tp
    return [
        ModelPart.from_shard(model, Shard(rank, size, stage, stages), group)
        for stage in range(stages)
        for rank in range(size)
    ]


def rank_memories(config: ServeConfig, path: Path, ranks: Sequence[ModelPart], context: int) -> list[RankMemory]:
    size, groups = config.block_size, config.max_kv_groups
    return [rank_memory(config, path, part, size, context, groups) for part in ranks]


def sequence_blocks(config: ServeConfig, memory: RankMemory, tokens: int) -> int:
    """Return the maximum number of KV blocks of a sequence."""
    return most_blocks(memory.groups, tokens, config.max_num_batched_tokens, config.block_size)


def cache_bytes(config: ServeConfig, memory: RankMemory, context: int, serving: ServingMemory) -> int:
    """Return the bytes of the largest KV cache that a rank allocates."""
    budget = serving.cache_budget(config.kv_cache_memory_bytes, memory.weights)
    if config.kv_cache_memory_bytes or serving.is_gpu:
        return budget
    useful = 2 * config.max_num_seqs * sequence_blocks(config, memory, context) * memory.kv_block
    return min(budget // (config.data_parallel_size * config.num_workers), useful)  # all ranks share the default


def _check_memory(config: ServeConfig, memory: list[RankMemory], context: int, serving: ServingMemory) -> None:
    """Raises: ConfigurationError"""
    free, weights, caches = serving.free, sum(rank.weights for rank in memory), 0
    if config.kv_cache_memory_bytes:
        caches = sum(cache_bytes(config, rank, context, serving) for rank in memory)
    if weights > free:
        raise ConfigurationError(
            f"the weights take {size_text(weights)}, but {size_text(free)} {serving.words}; use a smaller model, "
            "--quantization int4 on a CPU, or another machine"
        )
    if weights + caches > free:
        each = max(0, free - weights) // len(memory)
        raise ConfigurationError(
            f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}: {size_text(weights)} of weights and "
            f"{size_text(caches)} of KV cache do not fit: {size_text(free)} {serving.words}; use at most {each}"
        )
