"""The backends by name. A backend is imported only when it is chosen: importing torch takes seconds."""

from services.config import WorkerConfig
from services.worker.runner import ModelRunner


def create_runner(config: WorkerConfig) -> ModelRunner:
    """Return the runner of `config.backend`, without a model.

    Raises: LoadError, if the backend's packages are not installed.
    """
    match config.backend:
        case "sim":
            from services.worker.backends.sim import SimRunner

            return SimRunner(config)
        case "native":
            from services.worker.backends.native.runner import NativeRunner

            return NativeRunner(config)
        case "vllm":
            from services.worker.backends.vllm import VllmRunner

            return VllmRunner(config)
    raise ValueError(f"unknown backend {config.backend!r}: native, vllm or sim")
