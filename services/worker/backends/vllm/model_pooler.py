"""Models with a pooler of their own: what they compute, and vLLM's parameters of a request."""

import inspect
from collections.abc import Iterable
from typing import Any, get_args

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.fields import MAX_ITEMS, MAX_TEXT
from protocol.pooling import PoolingModel, PoolingParams, PoolingTask
from services.worker.backends.vllm import vllm_api
from services.worker.runner import LoadError

_DEFAULTS = PoolingParams()


class ModelPooler:
    """
    Args:
        config: vLLM's `VllmConfig`
        runner: vLLM's model runner, with the model in memory
        specs: `KVCacheSpec` of each layer

    Raises: LoadError, for a task that is not served.
    """

    def __init__(self, config: Any, runner: Any, specs: Iterable[Any]) -> None:
        self._model_config, model = config.model_config, runner.get_model()
        supported = tuple(runner.get_supported_pooling_tasks())
        try:
            task = self._model_config.get_pooling_task(supported)
        except RuntimeError as error:
            raise LoadError(f"vLLM cannot serve this model: {error}") from error
        if task not in get_args(PoolingTask):
            raise LoadError(f"this model serves {', '.join(supported)}, which is not supported")
        self.model = _description(self._model_config, task, specs)
        most = config.scheduler_config.max_num_batched_tokens
        if self.model.is_tokenwise and 4 * most * self.model.size > MAX_MESSAGE_BYTES // 2:
            fitting = MAX_MESSAGE_BYTES // 2 // (4 * self.model.size)
            raise LoadError(
                f"{most} vectors of {self.model.size} numbers are too large for a message; "
                f"use --max-num-batched-tokens {fitting}"
            )
        vllm_pooler = model.pooler
        self._updates = vllm_pooler.get_pooling_updates(task)
        has_types = getattr(self._model_config.hf_config, "type_vocab_size", 0) > 1
        self._has_types = has_types and "token_type_ids" in inspect.signature(model.forward).parameters

    def to_vllm_params(self, given: PoolingParams | None) -> vllm_api.PoolingParams:
        given, extra = given or _DEFAULTS, None
        if given.second_text is not None and self._has_types:
            extra = {"compressed_token_type_ids": given.second_text}
        params = vllm_api.PoolingParams(
            task=self.model.task,
            use_activation=given.use_activation,
            dimensions=given.dimensions if self.model.has_length(given.dimensions) else None,
            extra_kwargs=extra,
        )
        params.verify(self._model_config)
        self._updates.apply(params)
        return params


def _description(model_config: Any, task: PoolingTask, specs: Iterable[Any]) -> PoolingModel:
    """Return the properties of the model. `model_config`: vLLM's `ModelConfig`."""
    hf_config, is_tokenwise, lengths = model_config.hf_config, task.startswith("token_"), None
    # vLLM keeps the hidden states of a prompt that comes in chunks, without a bound.
    is_whole = is_tokenwise or not model_config.is_chunked_prefill_supported
    is_whole = is_whole or any(getattr(spec, "non_causal", False) for spec in specs)
    if task in ("embed", "token_embed"):
        size, labels = int(model_config.embedding_size), []
        if model_config.is_matryoshka:
            lengths = [int(length) for length in model_config.matryoshka_dimensions or ()]
    else:
        size = len(model_config.pooler_config.returned_token_ids or ()) or int(hf_config.num_labels)
        names = getattr(hf_config, "id2label", None) or {}
        labels = [str(names.get(index, ""))[:MAX_TEXT] for index in range(min(size, MAX_ITEMS))]
    return PoolingModel(task, size, is_whole, labels, lengths, bool(model_config.use_sep_token))
