# First: OpenMP reads its settings when torch is imported
import services.worker.backends.vllm.openmp  # isort: skip
from services.worker.backends.vllm.runner import VllmRunner
