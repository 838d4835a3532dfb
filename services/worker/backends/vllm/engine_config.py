"""vLLM's configuration of one rank, and the checks of what this backend can do."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol.media import MAX_FILES
from protocol.membership import Assignment, Speculation
from services.config import WorkerConfig
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.drafters import check_drafter, drafter_config
from services.worker.runner import LoadError

MODALITIES = {"image": MAX_FILES, "audio": MAX_FILES, "video": 0}
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Maximum ranks that vLLM has."""


@dataclass(frozen=True)
class EngineOptions:
    """Settings of vLLM that do not depend on the rank. A worker keeps its weights as long as they are equal."""

    directory: Path
    dtype: str
    threads: int
    """0: this machine's cores, divided among the group's ranks on it."""
    block_size: int
    num_slots: int
    max_num_batched_tokens: int
    max_model_len: int
    """0: the context length of the checkpoint."""
    quantization: str | None
    load_format: str
    runner: str
    pooler_config: Mapping[str, Any]
    hf_overrides: Mapping[str, Any]
    enforce_eager: bool
    has_groups: bool
    """Layers with a window may have block tables of their own."""
    speculation: Speculation | None
    max_loras: int
    """0: no adapters."""
    max_lora_rank: int

    @classmethod
    def from_config(cls, directory: Path, dtype: str, config: WorkerConfig, assignment: Assignment) -> "EngineOptions":
        return cls(
            directory=directory,
            dtype=dtype,
            threads=config.threads,
            block_size=assignment.block_size,
            num_slots=assignment.num_slots,
            max_num_batched_tokens=assignment.max_num_batched_tokens,
            max_model_len=assignment.max_model_len,
            quantization=config.quantization,
            load_format=config.load_format,
            runner=config.runner,
            pooler_config=config.pooler_config,
            hf_overrides=config.hf_overrides,
            enforce_eager=config.enforce_eager,
            has_groups=assignment.max_kv_groups > 1,
            speculation=assignment.speculation,
            max_loras=assignment.max_loras,
            max_lora_rank=assignment.max_lora_rank,
        )


def create_engine_config(options: EngineOptions, assignment: Assignment, device_arguments: Mapping[str, Any]) -> Any:
    """Return vLLM's `VllmConfig`.

    Args:
        device_arguments: of `WorkerPlatform.arguments`

    Raises: LoadError, if vLLM or this backend cannot serve the model.
    """
    rows = min(options.num_slots, options.max_num_batched_tokens)
    speculation = options.speculation
    # A draft model computes one token more than the model for each row, in buffers of this size.
    extra = rows if speculation is not None and speculation.method == "draft_model" else 0
    arguments = vllm_api.EngineArgs(
        model=str(options.directory),
        skip_tokenizer_init=True,  # requests and results are token ids
        limit_mm_per_prompt=MODALITIES,
        dtype=options.dtype,
        max_model_len=options.max_model_len or None,
        block_size=options.block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=options.max_num_batched_tokens + extra,
        tensor_parallel_size=assignment.tensor_parallel_size,
        pipeline_parallel_size=assignment.pipeline_parallel_size,
        quantization=options.quantization,
        load_format=options.load_format,
        runner=options.runner,
        hf_overrides=dict(options.hf_overrides),
        enforce_eager=options.enforce_eager,
        enable_prefix_caching=False,  # the scheduler has a prefix cache
        # None: except where vLLM itself does so, as for chunked local attention.
        disable_hybrid_kv_cache_manager=None if options.has_groups else True,
        disable_log_stats=True,
        speculative_config=drafter_config(speculation),
        **_pooler_arguments(options),
        **_lora_arguments(options),
        **device_arguments,
    )
    try:
        config = arguments.create_engine_config()
    except (ValueError, NotImplementedError, OSError) as error:
        raise LoadError(f"vLLM cannot serve this model: {' '.join(str(error).split())}") from error
    _check(config, options)
    check_drafter(config, speculation)
    return config


def _pooler_arguments(options: EngineOptions) -> dict[str, Any]:
    """Raises: LoadError, if vLLM does not know a setting or its value"""
    if not options.pooler_config:
        return {}
    try:
        return {"pooler_config": vllm_api.PoolerConfig(**options.pooler_config)}
    except (TypeError, ValueError) as error:
        raise LoadError(f"--pooler-config: {' '.join(str(error).split())}") from error


def _lora_arguments(options: EngineOptions) -> dict[str, Any]:
    if not options.max_loras:
        return {}
    rank = next((size for size in _LORA_RANKS if size >= options.max_lora_rank), options.max_lora_rank)
    return {"enable_lora": True, "max_loras": options.max_loras, "max_lora_rank": rank}


def _check(config: Any, options: EngineOptions) -> None:
    """Raises: LoadError, for what this backend cannot do."""
    model = config.model_config
    if model.runner_type == "pooling" and (options.speculation is not None or options.max_loras):
        raise LoadError("models for pooling are served without --speculative-config and --enable-lora")
    if config.parallel_config.pipeline_parallel_size > 1 and (
        model.runner_type == "pooling" or model.is_hybrid or options.max_loras
    ):
        raise LoadError(
            "models for pooling or with recurrent states, and --enable-lora, are served with --pipeline-parallel-size 1"
        )
    if model.is_multimodal_model:
        _check_media(config, options)
    if config.use_v2_model_runner:
        raise LoadError("vLLM's second model runner is not supported: unset VLLM_USE_V2_MODEL_RUNNER")
    if model.is_hybrid and not options.has_groups:
        raise LoadError(
            "this model has recurrent states, which need groups of KV cache: start the scheduler without "
            "--disable-hybrid-kv-cache-manager and --batching-policy phased"
        )
    check_block_size(config, options)


def _check_media(config: Any, options: EngineOptions) -> None:
    """Raises: LoadError, for kinds of input, and for settings beside it, that are not served"""
    model = config.model_config
    model.skip_tokenizer_init = False  # vLLM's processor reads it, to find the positions of items
    processor: Any = vllm_api.MULTIMODAL_REGISTRY.create_processor(model)
    modalities = processor.info.get_supported_mm_limits()
    is_other = model.is_encoder_decoder or model.is_multimodal_raw_input_only_model
    if is_other or modalities.keys().isdisjoint(("image", "audio")):
        raise LoadError(f"models with {', '.join(modalities)} as input are not supported with --backend vllm")
    if model.is_mm_prefix_lm:
        raise LoadError("models whose images attend in both directions are not supported with --backend vllm")
    speculation = options.speculation
    refused = {
        "--pipeline-parallel-size above 1": config.parallel_config.pipeline_parallel_size > 1,
        "drafters other than ngram": speculation is not None and speculation.method != "ngram",
        "--runner pooling": model.runner_type == "pooling",
    }
    for name, is_set in refused.items():
        if is_set:
            raise LoadError(f"models that read images or sounds are not served with {name}")


def check_block_size(config: Any, options: EngineOptions) -> None:
    """Check the size that vLLM has replaced, for latent attention and for recurrent states. Raises: LoadError"""
    if options.block_size != (fitting := config.cache_config.block_size):
        raise LoadError(
            f"--block-size {options.block_size} does not fit this model; start the scheduler with "
            f"--block-size {fitting}"
        )
