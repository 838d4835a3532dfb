"""`runahead plan MODEL`: memory per rank, KV blocks and sequences of each layout, and the highest speed of each
quantisation, without reading weights."""

import os
from collections.abc import Iterator
from pathlib import Path

from protocol.kv_groups import ONE_GROUP
from services.checkpoint import CheckpointError, is_gguf, model_name, resolve
from services.cli.model_check import cache_bytes, context_length, parts, rank_memories, sequence_blocks
from services.cli.serving_memory import ServingMemory, serving_memory
from services.cli.settings import ConfigurationError, refusing
from services.config import ServeConfig
from services.scheduler.recording import EventRecording, RecordingError
from services.scheduler.what_if import History
from services.units import size_text
from services.worker.backends.native.memory import served_dtype
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.partition import tensor_parallel_sizes
from services.worker.bandwidth import read_bandwidth
from services.worker.kernels.layout import inputs_kept_together
from services.worker.runner import LoadError

EXAMPLE_CONTEXT = 512
"""Tokens of the requests whose speed is predicted."""
MOST_RANKS = 64
"""Largest tensor-parallel size that is listed."""
COLUMNS = "{:>10}  {:>14}  {:>14}  {:>9}  {:>10}  {:>9}  {}"


def plan(config: ServeConfig) -> int:
    """Print the plan of the native backend. Return 0 if a layout fits into the free memory, else 1.

    Raises: ConfigurationError
    """
    if config.backend != "native":
        raise ConfigurationError(f"plan computes sizes of --backend native, not of --backend {config.backend}")
    with refusing(CheckpointError, LoadError):
        path = resolve(config.model, config.revision)
        model = ModelConfig.from_checkpoint(path)
        serving = serving_memory(config)
        rows = [*_rows(config, path, model, serving)]
    context = context_length(config, model)
    print(
        f"{model_name(path)}: {model.num_layers} layers, {model.num_heads} heads, {model.num_kv_heads} KV heads, "
        f"{model.max_position} positions; {served_dtype(config, model)}"
    )
    print(f"{size_text(serving.free)} {serving.words}; all ranks are on this machine")
    names = "TP size", "weights a rank", "KV cache a rank", "KV blocks", "tokens", "sequences", ""
    print(COLUMNS.format(*names))
    for *columns, _ in rows:
        print(COLUMNS.format(*columns))
    print(f"sequences: of {context} tokens at the same time; --max-num-seqs is {config.max_num_seqs}")
    if not serving.is_gpu:
        print("\n".join(_quantisations(config, path, model, serving)))
    if config.record is not None:
        print("\n".join(_speeds(config, Path(os.path.expanduser(config.record)), context)))
    return 0 if any(fits for *_, fits in rows) else 1


def _speeds(config: ServeConfig, directory: Path, context: int) -> Iterator[str]:
    """Yield the speeds that the cost model of a recording gives; one line with the reason if there is none."""
    try:
        recording = EventRecording(directory)
        cost = next(History.read(recording).costs())
    except (RecordingError, ValueError) as error:
        yield f"no speeds are predicted: {error}"
        return
    length, chunk = min(context, EXAMPLE_CONTEXT), min(config.max_num_batched_tokens, context)
    yield f"speeds by recording {recording.incarnation} ({cost.num_steps:,} steps, error {100 * cost.error:.0f} %):"
    seconds = cost.of_prefill(chunk)
    yield f"  prefill of {chunk} tokens: {1e3 * seconds:.1f} ms, {chunk / seconds:,.0f} tokens/s"
    for rows in sorted({1, *(n for n in (4, 16, 64) if n < config.max_num_seqs), config.max_num_seqs}):
        seconds = cost.of_decodes(rows, length)
        speed = f"{1e3 * seconds:.1f} ms a step, {rows / seconds:,.0f} tokens/s"
        yield f"  {rows} decodes with {length} tokens each: {speed}"


def _quantisations(config: ServeConfig, path: Path, model: ModelConfig, serving: ServingMemory) -> Iterator[str]:
    """Yield the memory and the highest speed of each quantisation that the model allows, on one rank."""
    bandwidth, context = read_bandwidth(), context_length(config, model)
    yield (
        f"this machine reads {size_text(round(bandwidth))}/s (measured); a token of one stream reads its weights once:"
    )
    for name in (None, "int8", "int4", *(["none"] if is_gguf(path) else [])):
        layout = config.model_copy(
            update={"quantization": name, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        )
        label = "as stored" if name is None else f"--quantization {name}"
        try:
            (part,) = parts(layout, model)
        except LoadError as error:
            yield f"  {label}: not possible: {error}"
            continue
        (rank,) = rank_memories(layout, path, [part], context)
        needed = rank.weights + sequence_blocks(layout, rank, context) * rank.kv_block
        fits = "fits" if needed <= serving.free else "does not fit"
        yield (
            f"  {label}: weights {size_text(rank.weights)}, with one sequence of {context} tokens {size_text(needed)}, "
            f"{fits}; at most {bandwidth / rank.per_token:,.0f} tokens/s"
        )


def _rows(config: ServeConfig, path: Path, model: ModelConfig, serving: ServingMemory) -> Iterator[tuple[object, ...]]:
    """Yield the columns of each tensor-parallel size, and whether it fits.

    Raises: ConfigurationError, CheckpointError, LoadError
    """
    context, free = context_length(config, model), serving.free
    for size in tensor_parallel_sizes(model, inputs_kept_together(config.quantization)):
        if size > (1 if serving.is_gpu else MOST_RANKS):
            return
        layout = config.model_copy(update={"tensor_parallel_size": size})
        ranks = rank_memories(config, path, parts(layout, model), context)
        caches = [cache_bytes(config, rank, context, serving) for rank in ranks]
        blocks = min(cache // rank.kv_block for cache, rank in zip(caches, ranks, strict=True))
        needed, tokens = sum(rank.weights for rank in ranks) + sum(caches), blocks * config.block_size
        sequences = tokens // context
        if ranks[0].groups != ONE_GROUP:
            sequences = blocks // sequence_blocks(config, ranks[0], context)
            tokens = sequences * context
        fits = needed <= free and blocks > 0
        remark = "fits" if fits else f"does not fit: {size_text(needed)} in all"
        weights = size_text(max(rank.weights for rank in ranks))
        yield (size, weights, size_text(max(caches)), f"{blocks:,}", f"{tokens:,}", sequences, remark, fits)
