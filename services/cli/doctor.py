"""`runahead doctor`: what this machine has for serving, and what would be slow on it and why."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from services.checkpoint import DEMO_MODEL
from services.checkpoint.default_model import packaged_model
from services.cli.preflight import free_port
from services.cli.serving_memory import CPU_BUILD
from services.cli.settings import ConfigurationError
from services.config import ServeConfig
from services.release import installed
from services.units import size_text

PACKAGES = ("runahead-engine", "torch", "numba", "vllm")
LITTLE_MEMORY = 2 << 30
"""Bytes of free memory below which even small models have little room."""


def doctor() -> int:
    """Print facts and remarks. Return the exit status: 0, or 1 if the native backend cannot run here."""
    versions = {name: installed(name) for name in PACKAGES}
    print(f"Python      {platform.python_version()}, {sys.platform}, {platform.machine()}")
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    print(f"packages    {shown}")
    if not versions["torch"]:
        print("The native backend needs the extra `native`: pip install 'runahead-engine[native]'.")
        return 1
    remarks = [*_gpus(), *_server()]
    if not versions["numba"]:
        remarks.append(
            "numba is missing, which compiles kernels for processors: the native backend computes on a GPU alone."
        )
    else:
        remarks = [*_processor(), *_memory(), *remarks]
    if not versions["vllm"]:
        remarks.append("vLLM is not installed: --backend vllm is refused. docs/vllm.md has the installation.")
    for remark in remarks:
        print(f"- {remark}")
    return 0


def _processor() -> Iterator[str]:
    """Print processor and kernels; yield remarks."""
    import torch

    from services.worker import machine
    from services.worker.kernels import selection

    features, cores = selection.processor_features(), machine.cores()
    named = [name for name in selection.NAMED if name in features]
    print(f"processor   {_model_name()}: {cores} cores, {', '.join(named) or 'no vector features'}")
    for dtype in (torch.bfloat16, torch.float32):
        print(f"            {selection.choose('auto', 'cpu', dtype, features).describe(features)}")
    if "avx2" not in features:
        yield "The processor has no AVX2: kernels use narrow vectors and take several times as long."
    if not {*selection.OWN_BFLOAT16} & features:
        yield (
            "The processor has no bfloat16 arithmetic: bfloat16 weights are multiplied in float32. Decoding reads half "
            "the bytes that float32 weights have, but prompts are computed no faster."
        )
    if sys.platform == "linux" and cores < (present := len(os.sched_getaffinity(0))):
        yield f"The container may use {cores} of {present} cores: give it whole cores, or set --threads."
    if cores == 1:
        yield "Scheduler, frontend and worker share one core: tokens of many streams arrive in bursts."


def _memory() -> Iterator[str]:
    """Print memory; yield remarks."""
    from services.worker import machine
    from services.worker.bandwidth import read_bandwidth
    from services.worker.kernels.cpu import compile_cache

    free, compiled = machine.free_memory(), compile_cache.directory()
    speed = f"{size_text(round(read_bandwidth()))}/s read by all cores"
    print(f"memory      {size_text(free)} free; default KV cache: {size_text(machine.cache_budget(0))}; {speed}")
    if free < LITTLE_MEMORY:
        yield f"{size_text(free)} of memory are free: use a small model, or set --kv-cache-memory-bytes."
    if not any(compiled.glob("**/*.nbc")):
        yield "No kernels are compiled for this processor: the first start takes up to a minute longer."


def _gpus() -> Iterator[str]:
    """Print the GPUs; yield remarks."""
    from services.worker.gpus import gpus

    found, version = gpus(), installed("torch")
    for gpu in found:
        print(f"GPU         {gpu.name}: {size_text(gpu.free)} of {size_text(gpu.total)} free")
    if found and version.endswith(CPU_BUILD):
        yield f"torch {version} is a build for CPUs, so no GPU is used: install a CUDA build of torch."
    if len(found) > 1:
        yield "A group computes on one GPU so far: start a server for each, with CUDA_VISIBLE_DEVICES."


def _server() -> Iterator[str]:
    """Print what `serve` would do without arguments; yield remarks."""
    config, model = ServeConfig(), packaged_model()
    print(f"model       {model or DEMO_MODEL}")
    if model is None:
        yield "The default model is not installed: `serve` without a model serves the demo model of the tests."
    try:
        free_port(config.host, config.port)
    except ConfigurationError as error:
        yield f"{str(error)[:1].upper()}{str(error)[1:]}."


def _model_name() -> str:
    """Return the processor's name in /proc/cpuinfo, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
