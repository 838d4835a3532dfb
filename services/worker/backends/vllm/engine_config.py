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
    """Everything that vLLM's worker depends on. A worker keeps its weights as long as that is equal."""

    directory: Path
    dtype: str
    config: WorkerConfig
    assignment: Assignment
    """Without the number of the epoch."""


def create_engine_config(options: EngineOptions, device_arguments: Mapping[str, Any]) -> Any:
    """Return vLLM's `VllmConfig`.

    Args:
        device_arguments: of `WorkerPlatform.arguments`

    Raises: LoadError, if vLLM or this backend cannot serve the model.
    """
    c, assignment = options.config, options.assignment
    rows = min(assignment.num_slots, assignment.max_num_batched_tokens)
    speculation = assignment.speculation
    # A draft model computes one token more than the model for each row, in buffers of this size.
    extra = rows if speculation is not None and speculation.method == "draft_model" else 0
    arguments = vllm_api.EngineArgs(
        model=str(options.directory),
        skip_tokenizer_init=True,  # requests and results are token ids
        limit_mm_per_prompt=MODALITIES,
        dtype=options.dtype,
        max_model_len=assignment.max_model_len or None,
        block_size=assignment.block_size,
        max_num_seqs=rows,
        max_num_batched_tokens=assignment.max_num_batched_tokens + extra,
        tensor_parallel_size=assignment.tensor_parallel_size,
        pipeline_parallel_size=assignment.pipeline_parallel_size,
        quantization=c.quantization,
        load_format=c.load_format,
        runner=c.runner,
        hf_overrides=dict(c.hf_overrides),
        enforce_eager=c.enforce_eager,
        performance_mode=c.performance_mode,
        enable_prefix_caching=False,  # the scheduler has a prefix cache
        # None: except where vLLM itself does so, as for chunked local attention.
        disable_hybrid_kv_cache_manager=None if assignment.max_kv_groups > 1 else True,
        disable_log_stats=True,
        speculative_config=drafter_config(speculation),
        **_pooler_arguments(c.pooler_config),
        **_lora_arguments(assignment),
        **device_arguments,
    )
    try:
        config = arguments.create_engine_config()
    except (ValueError, NotImplementedError, OSError) as error:
        raise LoadError(f"vLLM cannot serve this model: {' '.join(str(error).split())}") from error
    _check(config, assignment)
    check_drafter(config, speculation)
    return config


def _pooler_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Raises: LoadError, if vLLM does not know a setting or its value"""
    if not settings:
        return {}
    try:
        return {"pooler_config": vllm_api.PoolerConfig(**settings)}
    except (TypeError, ValueError) as error:
        raise LoadError(f"--pooler-config: {' '.join(str(error).split())}") from error


def _lora_arguments(assignment: Assignment) -> dict[str, Any]:
    if not assignment.max_loras:
        return {}
    wanted = assignment.max_lora_rank
    rank = next((size for size in _LORA_RANKS if size >= wanted), wanted)
    return {"enable_lora": True, "max_loras": assignment.max_loras, "max_lora_rank": rank}


def _check(config: Any, assignment: Assignment) -> None:
    """Raises: LoadError, for what this backend cannot do."""
    model = config.model_config
    if model.runner_type == "pooling" and (assignment.speculation is not None or assignment.max_loras):
        raise LoadError("models for pooling are served without --speculative-config and --enable-lora")
    if config.parallel_config.pipeline_parallel_size > 1 and (
        model.runner_type == "pooling" or model.is_hybrid or assignment.max_loras
    ):
        raise LoadError(
            "models for pooling or with recurrent states, and --enable-lora, are served with --pipeline-parallel-size 1"
        )
    if assignment.max_loras and model.is_moe:
        raise LoadError("models with experts are served without --enable-lora: vLLM's build for CPUs fails with both")
    if model.is_multimodal_model:
        _check_media(config, assignment.speculation)
    if config.use_v2_model_runner:
        raise LoadError("vLLM's second model runner is not supported: unset VLLM_USE_V2_MODEL_RUNNER")
    if model.is_hybrid and assignment.max_kv_groups == 1:
        raise LoadError(
            "this model has recurrent states, which need groups of KV cache: start the scheduler without "
            "--disable-hybrid-kv-cache-manager and --batching-policy phased"
        )
    check_block_size(config, assignment.block_size)


def _check_media(config: Any, speculation: Speculation | None) -> None:
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
    refused = {
        "--pipeline-parallel-size above 1": config.parallel_config.pipeline_parallel_size > 1,
        "drafters other than ngram": speculation is not None and speculation.method != "ngram",
        "--runner pooling": model.runner_type == "pooling",
    }
    for name, is_set in refused.items():
        if is_set:
            raise LoadError(f"models that read images or sounds are not served with {name}")


def check_block_size(config: Any, block_size: int) -> None:
    """Check the size that vLLM has replaced, for latent attention and for recurrent states. Raises: LoadError"""
    if block_size != (fitting := config.cache_config.block_size):
        raise LoadError(
            f"--block-size {block_size} does not fit this model; start the scheduler with --block-size {fitting}"
        )
