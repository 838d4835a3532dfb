# First: OpenMP reads its settings when torch is imported
import services.worker.backends.vllm.openmp  # noqa: F401  # isort: skip
from services.worker.backends.vllm.runner import VllmRunner

__all__ = ["VllmRunner"]
