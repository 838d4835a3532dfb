"""vLLM's own Worker of one rank, started in the order of vLLM's engine."""

import json
import logging
import time
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from protocol.kv_groups import ONE_GROUP
from protocol.lora import LoRAAdapter
from protocol.media import MediaModel
from protocol.membership import Speculation
from services.worker import machine
from services.worker.backends.pooling import PooledRows
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.adapters import check_adapters, score_prompts_with_own_adapters, to_vllm
from services.worker.backends.vllm.checkpoint import DTYPE_CHOICES
from services.worker.backends.vllm.draft_verifier import DraftVerifier
from services.worker.backends.vllm.drafters import give_next_tokens_of_chunks
from services.worker.backends.vllm.engine_config import EngineOptions, check_block_size, create_engine_config
from services.worker.backends.vllm.kv_groups import kv_groups
from services.worker.backends.vllm.model_pooler import ModelPooler
from services.worker.backends.vllm.plan import TranslatedMasks
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from services.worker.backends.vllm.process_groups import ProcessGroups
from services.worker.backends.vllm.recurrent_states import RecurrentStates
from services.worker.backends.vllm.sampled_steps import SampledStep
from services.worker.backends.vllm.thread_choice import ThreadChoice, numbers_to_try
from services.worker.batch.slots import Rows
from services.worker.distributed.messages import one_line
from services.worker.runner import LoadError, RanksLost

log = logging.getLogger("runahead.worker")
_set_num_threads = torch.set_num_threads  # vLLM replaces the function by one that does nothing


class VllmEngine:
    """One worker of vLLM with its weights in memory.

    Args:
        groups: joined here, after the model has been checked
        platform: the device of this rank

    Raises:
        LoadError: the model cannot be served with these options.
        RanksLost: the other ranks cannot be reached.
    """

    def __init__(self, options: EngineOptions, groups: ProcessGroups, platform: WorkerPlatform) -> None:
        self.options, self.platform = options, platform
        assignment, speculation = options.assignment, options.assignment.speculation
        self.config = create_engine_config(options, platform.arguments())
        platform.check(self.config, options)
        if self.media is not None and not platform.is_host:
            raise LoadError("models that read images or sounds are served with --device cpu only")
        if options.config.enforce_eager:
            torch.compiler.set_stance("force_eager")  # vLLM compiles parts of its sampler in any case
        if speculation is not None:
            # vLLM warns of parameters that DraftVerifier supports.
            logging.getLogger("vllm.v1.sample.logits_processor").setLevel(logging.ERROR)
        self._wrapper = vllm_api.WorkerWrapperBase(rpc_rank=assignment.rank)
        arguments: dict[str, Any] = {
            "vllm_config": self.config,
            "local_rank": assignment.rank,
            "rank": assignment.rank,
            "distributed_init_method": groups.join(),
            "is_driver_worker": assignment.rank == 0,
        }
        self._pipeline = groups.pipeline
        self.threads = ThreadChoice(_numbers_of_threads(options.config.threads, groups, platform))
        _set_num_threads(self.threads.choose(0))
        self._wrapper.init_worker([arguments] * assignment.world_size)
        with _refusals_of_vllm():
            self._wrapper.init_device()
            groups.unlink_shared_memory()
            self._wrapper.load_model()
        if assignment.max_loras:
            score_prompts_with_own_adapters(self.runner)
            check_adapters(self.runner.lora_manager)
        if self.config.model_config.is_hybrid:  # a block of attention holds a recurrent state
            vllm_api.current_platform.update_block_size_for_backend(self.config)
            check_block_size(self.config, assignment.block_size)
        self._verifier: DraftVerifier | None = None
        if speculation is not None and self._pipeline.is_last:
            self._verifier = self._set_up_drafts(speculation)
        elif speculation is not None:
            self.runner.drafter = None  # only the last stage has one, but vLLM reads it on every stage
        specs = self._wrapper.get_kv_cache_spec()
        layout = vllm_api.resolve_kv_cache_layout(
            self.config, [self._wrapper.get_supported_kv_cache_layouts()], list(specs.values())
        )
        vllm_api.set_kv_cache_layout(self._wrapper, self.config, layout.name)
        whole = vllm_api.get_kv_cache_groups(self.config, dict(ChainMap(*groups.gather(specs))))
        self._cache_groups = vllm_api.project_kv_cache_groups(whole, specs)
        self.pooler = None if self.generates else ModelPooler(self.config, self.runner, specs.values())
        if self._cache_groups or self.generates:
            self.groups = kv_groups(whole, assignment.block_size, assignment.max_kv_groups)
        else:
            self.groups = ONE_GROUP  # of blocks without memory: the layers attend in both directions
        with self._check_kernels(groups):
            self.cache_budget = platform.measure(self._wrapper)
            """Bytes for the KV cache; 0: the host's memory has them."""
            if platform.is_host:
                self.threads.begin(self._timed, self.runner.max_num_tokens)
                _set_num_threads(self.threads.choose(1))
                self._wrapper.execute_dummy_batch()
        vllm_api.enable_envs_cache()  # vLLM reads its environment variables in every step
        vllm_api.freeze_gc_heap()

    @contextmanager
    def _check_kernels(self, groups: ProcessGroups) -> Iterator[None]:
        """Raises: LoadError, if the kernels for quantised weights fail in the enclosed code.

        Some kernels take certain dtypes only, on certain processors, and check it when they first compute.
        """
        quantization = self.config.model_config.quantization
        try:
            with groups.detect_lost_ranks():
                yield
        except RanksLost:
            raise
        except RuntimeError as error:
            if quantization is None:
                raise
            others = " or ".join(f"--dtype {name}" for name in DTYPE_CHOICES if name != self.options.dtype)
            reason = " ".join(str(error).split()).rstrip(".")
            raise LoadError(
                f"on this processor vLLM cannot compute {quantization} weights in {self.options.dtype} ({reason}); "
                f"use {others}"
            ) from error

    def _set_up_drafts(self, speculation: Speculation) -> DraftVerifier:
        """Set the limits of vLLM's drafter and replace its rejection sampler."""
        runner, batch = self.runner, self.runner.input_batch
        # Drafters stop at the end of the context by themselves. vLLM would drop the drafts of all requests when one of
        # them comes near the end.
        runner.effective_drafter_max_model_len = self.max_model_len + speculation.num_speculative_tokens
        if speculation.method == "ngram":
            runner.drafter.max_model_len = min(speculation.max_model_len or self.max_model_len, self.max_model_len)
        else:
            give_next_tokens_of_chunks(runner)
        kinds: list[Any] = vllm_api.BUILTIN_LOGITS_PROCESSORS
        processors = [kind(self.config, runner.device, False) for kind in kinds]
        # With drafts, vLLM creates only one of them
        batch.logitsprocs = vllm_api.LogitsProcessors(processors)
        batch.logitsprocs_need_output_token_ids = True
        runner.rejection_sampler = verifier = DraftVerifier(runner.sampler)
        return verifier

    @property
    def runner(self) -> Any:
        """vLLM's model runner, which holds the batch."""
        return self._wrapper.worker.model_runner

    @property
    def vocab_size(self) -> int:
        return int(self.config.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        return int(self.config.model_config.max_model_len)

    @property
    def generates(self) -> bool:
        return bool(self.config.model_config.runner_type == "generate")

    @property
    def media(self) -> MediaModel | None:
        """None: the model reads text only."""
        if not self.config.model_config.is_multimodal_model:
            return None
        return MediaModel(self.options.dtype, json.dumps(self.options.config.hf_overrides))

    @property
    def longrope(self) -> str:
        """`Loaded.longrope`, chosen as by vLLM's Phi3LongRoPEScaledRotaryEmbedding."""
        rope = getattr(self.config.model_config.hf_text_config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return ""
        return "long" if self.max_model_len > rope["original_max_position_embeddings"] else "short"

    @property
    def hidden_size(self) -> int:
        return int(self.config.model_config.get_hidden_size()) if self.pooler is None else self.pooler.model.size

    @property
    def bytes_per_block(self) -> int:
        """0: the model has no KV cache."""
        groups = self._cache_groups
        return int(vllm_api.pool_bytes_per_block(self.config, groups)) if groups else 0

    def allocate(self, num_blocks: int) -> None:
        """Create an empty cache and an empty batch."""
        cache = self.config.cache_config
        cache.num_gpu_blocks_override = cache.num_gpu_blocks = num_blocks
        config = vllm_api.get_kv_cache_config(self.config, self._cache_groups, num_blocks * self.bytes_per_block)
        config.kv_cache_layout = cache.kv_cache_layout
        self._wrapper.initialize_from_config([config] * self.config.parallel_config.world_size)
        layers = self.config.compilation_config.static_forward_context
        self.states = RecurrentStates(layers, self._cache_groups)
        self._wrapper.compile_or_warm_up_model()
        if self.generates:
            self._warm_up_logprobs()
        speculation = self.options.assignment.speculation
        if speculation is not None and speculation.method == "ngram" and self._pipeline.is_last:
            self._warm_up_drafts(speculation.num_speculative_tokens)

    def _warm_up_drafts(self, count: int) -> None:
        """Compile the drafter, which the first step with drafts would wait for."""
        vllm_api.store_compiled_drafter()
        batch = self.runner.input_batch
        self.runner.drafter.propose(count, [[0]], batch.num_tokens_no_spec, batch.token_ids_cpu)

    @torch.inference_mode()
    def _timed(self, num_tokens: int, threads: int) -> float:
        """Execute a step without attention. Return its seconds."""
        _set_num_threads(threads)
        began = time.monotonic()
        states, _ = self.runner._dummy_run(num_tokens)  # noqa: SLF001  no public method of vLLM executes a model alone
        if self.generates:
            self.runner.model.compute_logits(states[:num_tokens])
        return time.monotonic() - began

    @torch.inference_mode()
    def _warm_up_logprobs(self) -> None:
        """Compile the ranks of tokens, which the first request with log-probabilities would wait for (some 10 s)."""
        where = self.runner.device
        logprobs, ids = torch.zeros(2, self.vocab_size, device=where), torch.zeros(2, dtype=torch.int64)
        self.runner.sampler.gather_logprobs(logprobs, 1, ids.to(where))

    def drop_cache(self) -> None:
        """Drop the cache and the batch, and keep the weights."""
        runner = self.runner
        runner.execute_model_state = None
        if runner.requests:
            step = vllm_api.SchedulerOutput.make_empty()
            step.finished_req_ids = set(runner.requests)
            self.execute(step)
        self.platform.drop_graphs(runner)
        runner._cleanup_profiling_kv_cache()  # noqa: SLF001  no public method of vLLM drops the cache

    def close(self) -> None:
        """Free cache and weights."""
        self._wrapper.shutdown()

    def receive(self, num_tokens: int) -> vllm_api.IntermediateTensors | None:
        """Wait for the activations of a step of `num_tokens` from the stage before; None on the first stage.

        Raises: RanksLost
        """
        if self._pipeline.is_first:
            return None
        # vLLM's own buffers, which it would copy them to.
        tensors = {name: buffer[:num_tokens] for name, buffer in self.runner.intermediate_tensors.items()}
        self._pipeline.receive_activations(*(tensors[name] for name in sorted(tensors)))
        return vllm_api.IntermediateTensors(tensors)

    def loads(self, adapter: LoRAAdapter) -> bool:
        """Load an adapter, unless it is in memory. Return False, with the reason in the log, if that fails."""
        try:
            self.runner.add_lora(to_vllm(adapter))
        except Exception as error:  # of any kind: the files are the user's
            log.error("the adapter %s cannot be loaded, and its requests end: %s", adapter.name, one_line(error))
            self.runner.remove_lora(adapter.number)  # it may be in memory in part
            return False
        return True

    def execute(self, step: vllm_api.SchedulerOutput, activations: vllm_api.IntermediateTensors | None = None) -> Any:
        """Execute the forward pass of a step, and send its activations to the next stage.

        vLLM's worker would send their names as pickles, and wait before the next step until they have left.

        Args:
            activations: of `receive`

        Returns: the result of a model with a pooler, which samples nothing.
        """
        _set_num_threads(self.threads.choose(step.total_num_scheduled_tokens))
        began = time.monotonic()
        output = self.runner.execute_model(step, activations)
        self.threads.record(time.monotonic() - began)
        if isinstance(output, vllm_api.IntermediateTensors):
            self._pipeline.send_activations(*(output.tensors[name] for name in sorted(output.tensors)))
        return output

    @torch.inference_mode()
    def pool(self, pooled: PooledRows, ids: list[str], rows: Rows) -> None:
        """Add the hidden states of the step just executed, after the final norm, to `pooled`.

        vLLM's batch is ordered differently; `pooled` counts tokens in the order of the plan.

        Args:
            ids: request id of each of `rows`
        """
        batch = self.runner.input_batch
        vllm_starts = self.runner.query_start_loc.np[[batch.req_id_to_index[request_id] for request_id in ids]]
        starts = np.cumsum(rows.counts) - rows.counts
        shift = np.repeat(vllm_starts - starts, rows.counts)
        states = self.runner.execute_model_state.hidden_states
        (tokens,) = self.platform.upload(pooled.tokens + shift[pooled.tokens].astype(np.int64))
        pooled.take(states[tokens].float())

    def sample(self, masks: TranslatedMasks, ids: list[str]) -> SampledStep:
        """Sample the step just executed.

        Args:
            ids: request id of each row of the plan
        """
        row_of = self.runner.input_batch.req_id_to_index
        if self._verifier is not None:
            limits = () if masks.acceptable is None else zip(ids, masks.acceptable.tolist(), strict=True)
            self._verifier.acceptable = {row_of[request_id]: limit for request_id, limit in limits}
        for request_id in masks.left_out:
            self._discard(row_of[request_id])
        return SampledStep(self._wrapper.sample_tokens(masks.grammar))

    def _discard(self, row: int) -> None:
        """Let vLLM discard what it samples for a row of its batch, as it does for a part of a prompt, and take back the
        random numbers."""
        self.runner.discard_request_mask.np[row] = True
        if (generator := self.runner.input_batch.generators.get(row)) is not None:
            generator.keep_state()

    def take_drafts(self) -> tuple[list[str], list[list[int]]]:
        """Return the drafts that were proposed after the step just sampled: request ids, and drafts of each."""
        drafts: vllm_api.DraftTokenIds | None = self._wrapper.take_draft_token_ids()
        return (drafts.req_ids, drafts.draft_token_ids) if drafts is not None else ([], [])


def _numbers_of_threads(wanted: int, groups: ProcessGroups, platform: WorkerPlatform) -> Sequence[int]:
    """Return the numbers of compute threads to choose from. `wanted`: 0: this machine's cores, divided among the
    group's ranks on it."""
    if wanted:
        return (wanted,)
    cores = max(1, machine.cores() // groups.ranks_on_machine)
    # A rank's time has the waits for other ranks in it, and a GPU's steps are only enqueued here.
    return numbers_to_try(cores) if platform.is_host and not groups.has_several_ranks else (cores,)


@contextmanager
def _refusals_of_vllm() -> Iterator[None]:
    """Raises: LoadError, if the enclosed code fails because vLLM refuses the model, the device or its free memory."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        raise LoadError(f"vLLM cannot serve this model here: {' '.join(str(error).split())}") from error
