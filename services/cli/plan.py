"""`runahead plan MODEL`: memory per rank, KV blocks and sequences of each layout, without reading weights."""

from collections.abc import Iterator
from pathlib import Path

from services.checkpoint import CheckpointError, model_name, resolve
from services.cli.model_check import GROUP, cache_bytes, parts
from services.cli.settings import ConfigurationError
from services.config import ServeConfig
from services.units import size_text
from services.worker import machine
from services.worker.backends.native.memory import rank_memory, served_dtype
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import tensor_parallel_sizes
from services.worker.runner import LoadError

MOST_RANKS = 64
"""Largest tensor-parallel size that is listed."""
COLUMNS = "{:>10}  {:>14}  {:>14}  {:>9}  {:>10}  {:>9}  {}"


def plan(config: ServeConfig) -> int:
    """Print the plan of the native backend. Return 0 if a layout fits into the free memory, else 1.

    Raises: ConfigurationError
    """
    if config.backend != "native":
        raise ConfigurationError(
            f"plan computes sizes of --backend native, not of --backend {config.backend}"
        )
    try:
        path = resolve(config.model, config.revision)
        model = ModelConfig.from_checkpoint(path)
        rows = [*_rows(config, path, model)]
    except (CheckpointError, LoadError) as error:
        raise ConfigurationError(str(error)) from None
    context = config.max_model_len or model.max_position
    print(
        f"{model_name(path)}: {model.num_layers} layers, {model.num_heads} heads, {model.num_kv_heads} KV heads, "
        f"{model.max_position} positions; {served_dtype(config, model)}"
    )
    print(f"{size_text(machine.free_memory())} of memory are free; all ranks are on this machine")
    names = "TP size", "weights a rank", "KV cache a rank", "KV blocks", "tokens", "sequences", ""
    print(COLUMNS.format(*names))
    for *columns, _ in rows:
        print(COLUMNS.format(*columns))
    print(f"sequences: of {context} tokens at the same time; --max-num-seqs is {config.max_num_seqs}")
    return 0 if any(fits for *_, fits in rows) else 1


def _rows(config: ServeConfig, path: Path, model: ModelConfig) -> Iterator[tuple[object, ...]]:
    """Yield the columns of each tensor-parallel size, and whether it fits. Raises: CheckpointError, LoadError"""
    context, free = config.max_model_len or model.max_position, machine.free_memory()
    if context > model.max_position:
        raise LoadError(
            f"--max-model-len {context} is more than the {model.max_position} positions of the model"
        )
    group = GROUP if config.quantization in ("int8", "int4") else 1
    for size in tensor_parallel_sizes(model, group):
        if size > MOST_RANKS:
            return
        layout = config.model_copy(update={"tensor_parallel_size": size})
        ranks = [rank_memory(config, path, part, config.block_size) for part in parts(layout, model)]
        caches = [cache_bytes(config, rank, context) for rank in ranks]
        blocks = min(cache // rank.kv_block for cache, rank in zip(caches, ranks, strict=True))
        needed, tokens = sum(rank.weights for rank in ranks) + sum(caches), blocks * config.block_size
        fits = needed <= free and blocks > 0
        remark = "fits" if fits else f"does not fit: {size_text(needed)} in all"
        weights = size_text(max(rank.weights for rank in ranks))
        yield (
            size,
            weights,
            size_text(max(caches)),
            f"{blocks:,}",
            f"{tokens:,}",
            tokens // context,
            remark,
            fits,
        )
