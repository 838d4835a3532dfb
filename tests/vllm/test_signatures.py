"""Every name and call of vLLM in this backend, compared with the installed package, for its GPU worker too.

The backend's sources are parsed, so a new call is checked without a new test. A rename in vLLM fails here, also in
code that only a GPU runs.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CompilationConfig, ModelConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.pooler import Pooler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput, GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from services.worker.backends import vllm as backend
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.platforms.gpu import OFFSETS_PER_DRAW, GpuPlatform

SOURCES = sorted(Path(backend.__file__).parent.rglob("*.py"))
OBJECTS: dict[str, tuple[type, ...]] = {
    "self._wrapper": (WorkerWrapperBase, Worker),
    "wrapper": (WorkerWrapperBase, Worker),
    "self.runner": (GPUModelRunner,),
    "runner": (GPUModelRunner,),
    "self._runner": (GPUModelRunner,),
    "batch": (InputBatch, GPUModelRunner),
    "coordinator": (GroupCoordinator,),
    "self.runner.input_batch": (InputBatch,),
    "self.runner.sampler": (Sampler,),
    "runner.cudagraph_dispatcher": (CudagraphDispatcher,),
    "dispatcher": (CudagraphDispatcher,),
    "state": (vllm_api.CachedRequestState,),
    "result": (vllm_api.ModelRunnerOutput, vllm_api.SamplingParams),
    "self._output": (AsyncModelRunnerOutput,),
    "self._model_config": (ModelConfig,),
    "model_config": (ModelConfig,),
    "vllm_pooler": (Pooler,),
    "self.config.model_config": (ModelConfig,),
    "self.config.compilation_config": (CompilationConfig,),
    "layers[name]": (MambaBase,),
    "spec": (
        vllm_api.UniformTypeKVCacheSpecs,
        vllm_api.SlidingWindowSpec,
        vllm_api.ChunkedLocalAttentionSpec,
        vllm_api.MambaSpec,
    ),
}
"""Classes of the expressions that hold objects of vLLM; an attribute is one of any of them. The drafter is not among
them, because its module imports numba (vllm_api.py); test_speculation.py calls it."""


class Use(NamedTuple):
    """A use of one attribute in the backend's sources."""

    file: str
    line: int
    owner: str
    """The expression before the dot."""
    name: str
    call: ast.Call | None


def uses(source: str, file: str = "") -> Iterator[Use]:
    """Yield the attributes of `vllm_api` and of `OBJECTS` that a module uses."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner in OBJECTS or re.match(r"vllm_api\b", owner):
                yield Use(file, node.lineno, owner, node.attr, calls.get(id(node)))


def resolved(use: Use) -> object:
    """Return the attribute, or None for one that only objects have. Raises: AttributeError, if nothing has it"""
    if use.owner.startswith("vllm_api"):
        target: Any = vllm_api
        for name in use.owner.split(".")[1:]:
            target = getattr(target, name)
        return getattr(target, use.name)
    for owner in OBJECTS[use.owner]:
        if use.name in dir(owner):
            return getattr(owner, use.name)
        if use.name in fields(owner):
            return None
    raise AttributeError(f"{use.file}:{use.line}: vLLM has no {use.owner}.{use.name}")


@cache
def fields(owner: type) -> set[str]:
    """Return the names that the methods of a class assign, and its annotations."""
    names: set[str] = set()
    for each in owner.__mro__:
        names |= set(inspect.get_annotations(each))
        if each.__module__.startswith("vllm"):
            names |= set(re.findall(r"self\.(\w+)(?:: [^=\n]+)? =", textwrap.dedent(inspect.getsource(each))))
    return names


def bind(use: Use, target: Callable[..., object]) -> None:
    """Raises: TypeError, if the target does not take the arguments of the call"""
    if any(isinstance(each, ast.Starred) for each in use.call.args):
        return
    keywords = {each.arg: None for each in use.call.keywords if each.arg is not None}
    bound_to_class = use.owner in OBJECTS and not isinstance(
        inspect.getattr_static(OBJECTS[use.owner][0], use.name, None), staticmethod
    )
    arguments = [None] * (len(use.call.args) + bound_to_class)
    signature = inspect.signature(target)
    if any(each.arg is None for each in use.call.keywords):  # ** of a dictionary
        signature.bind_partial(*arguments, **keywords)
    else:
        signature.bind(*arguments, **keywords)


EVERY_USE = [use for path in SOURCES for use in uses(path.read_text(), path.name)]
EVERY_CALL = [use for use in EVERY_USE if use.call is not None]


def test_every_name_exists() -> None:
    for use in EVERY_USE:
        resolved(use)


@pytest.mark.parametrize("use", EVERY_CALL, ids=lambda use: f"{use.file}-{use.line}-{use.name}")
def test_every_call_fits_its_signature(use: Use) -> None:
    target = resolved(use)
    if callable(target) and not inspect.isbuiltin(target):
        bind(use, target)


def test_the_calls_of_a_step_are_among_them() -> None:
    """A check of the check: expressions that hold objects of vLLM are recognised."""
    names = {use.name for use in EVERY_CALL}
    steps = {"init_worker", "init_device", "load_model", "determine_available_memory", "initialize_from_config"}
    steps |= {"execute_model", "sample_tokens", "take_draft_token_ids", "get_output", "clear_all_graphs"}
    assert steps <= names


def test_the_gpu_worker_takes_what_the_backend_passes() -> None:
    """Arguments that are passed as a dictionary."""
    inspect.signature(vllm_api.EngineArgs).bind_partial(**GpuPlatform(0.9, 0).arguments())
    names = "vllm_config", "local_rank", "rank", "distributed_init_method", "is_driver_worker"
    for worker in (Worker, CPUWorker):
        inspect.signature(worker).bind(**dict.fromkeys(names))


def test_the_gpu_worker_returns_what_the_backend_reads() -> None:
    assert issubclass(AsyncGPUModelRunnerOutput, vllm_api.AsyncModelRunnerOutput)
    inspect.signature(AsyncGPUModelRunnerOutput.get_output).bind(None)
    for wrapper in (CUDAGraphWrapper, BreakableCUDAGraphWrapper):
        inspect.signature(wrapper.clear_all_graphs).bind()
    assert "all_token_ids[req_id]" in inspect.getsource(GPUModelRunner._update_states)  # noqa: SLF001  vLLM's own


def test_a_discarded_draw_is_taken_back_by_the_steps_that_a_generator_is_set_to() -> None:
    source = inspect.getsource(GPUModelRunner._bookkeeping_sync)  # noqa: SLF001  vLLM's own
    assert f"gen.set_offset(gen.get_offset() - {OFFSETS_PER_DRAW})" in source
