"""Which class computes. A backend is imported only when it is chosen: torch takes seconds that `sim` does not need."""

from services.config import WorkerConfig
from services.worker.runner import ModelRunner


def create(config: WorkerConfig) -> ModelRunner:
    """The runner of `config.backend`, nothing loaded yet.

    Raises: LoadError, when the backend itself is missing.
    """
    match config.backend:
        case "sim":
            from services.worker.backends.sim import SimRunner

            return SimRunner(config)
        case "native":
            from services.worker.backends.native import NativeRunner

            return NativeRunner(config)
        case "vllm":
            from services.worker.backends.vllm import VllmRunner

            return VllmRunner(config)
    raise ValueError(f"unknown backend {config.backend!r}: native, vllm or sim")
