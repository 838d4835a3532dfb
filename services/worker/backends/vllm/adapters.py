"""Modules that adapters may change, and adapters of rows whose prompts vLLM scores."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from protocol.lora import LoRAAdapter
from services.checkpoint import adapter_digest
from services.worker.backends.vllm import vllm_api

log = logging.getLogger("runahead.worker")


def to_vllm(adapter: LoRAAdapter) -> vllm_api.LoRARequest:
    """Return vLLM's adapter. Its name has the number too, because vLLM takes two of one name for the same, and requests
    of an adapter go on when its name was given to other files."""
    return vllm_api.LoRARequest(f"{adapter.name}@{adapter.number}", adapter.number, adapter.path)


def check_adapters(manager: Any) -> None:
    """Refuse each adapter whose files are not those that the frontend has read, and log the modules of others that vLLM
    leaves out, as those of an encoder of images."""
    load, adapters = manager._load_adapter, manager._adapter_manager  # noqa: SLF001  vLLM has no public names

    def loaded(request: vllm_api.LoRARequest) -> Any:
        digest = adapter_digest(Path(request.lora_path))
        if LoRAAdapter(request.lora_name, request.lora_path, digest).number != request.lora_int_id:
            raise ValueError(f"the files in {request.lora_path} are not those that the frontend has read")
        adapter = load(request)
        served = {*adapters.modules, *chain.from_iterable(adapters.packed_modules.values())}
        if ignored := sorted({*adapter.loras} - served):
            log.warning(
                "adapter %s: vLLM ignores %d of its %d modules, such as %s; it adapts the language model only",
                request.lora_name.rpartition("@")[0], len(ignored), len(adapter.loras), ignored[0],
            )  # fmt: skip
        return adapter

    manager._load_adapter = loaded  # noqa: SLF001


def adapted_modules(manager: Any, weights: Iterable[str]) -> tuple[str, ...]:
    """Return the last parts of the names of the modules that vLLM finds in adapters; it fails with any other.

    Args:
        manager: vLLM's, of the adapters
        weights: names in the checkpoint. Adapters have these, and vLLM maps them to its own.
    """
    adapters = manager._adapter_manager  # noqa: SLF001  vLLM has no public name
    packed, model = adapters.packed_modules_mapping, adapters.model
    served = {name for module in adapters.supported_lora_modules for name in packed.get(module, [module])}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper, skipped = mapper and mapper.get_rename_mapper(), tuple(getattr(model, "lora_skip_prefixes", None) or ())
    named = set[str]()
    for module in (name.removesuffix(".weight") for name in weights if name.endswith(".weight")):
        with suppress(ValueError):  # vLLM leaves the weight out
            found, _ = vllm_api.parse_fine_tuned_lora_name(f"base_model.model.{module}.lora_A.weight", mapper)
            if found.rpartition(".")[2] in served or module.startswith(skipped):
                named.add(module.rpartition(".")[2])
    return tuple(sorted(served | named))


def score_prompts_with_own_adapters(runner: Any) -> None:
    """Make vLLM's model runner compute the logits of each prompt with its request's adapter.

    vLLM computes them with the adapters of the step's sampled tokens: it fails where their number differs from the
    prompt's, also if no request has an adapter.
    """
    score = runner._get_prompt_logprobs_dict  # noqa: SLF001  vLLM has no public method

    def scored(states: torch.Tensor, counts: dict[str, int]) -> dict[str, vllm_api.LogprobsTensors | None]:
        batch = runner.input_batch
        found: dict[str, vllm_api.LogprobsTensors | None] = {}
        for request_id in [name for name in runner.num_prompt_logprobs if name in counts]:
            adapter = (int(batch.request_lora_mapping[batch.req_id_to_index[request_id]]),)
            runner._set_active_loras(adapter, adapter, {*batch.lora_id_to_lora_request.values()})  # noqa: SLF001
            found |= score(states, {request_id: counts[request_id]})
        return found

    runner._get_prompt_logprobs_dict = scored  # noqa: SLF001
