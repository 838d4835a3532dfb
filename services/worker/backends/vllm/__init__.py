from services.worker.backends.vllm.runner import VllmRunner

__all__ = ["VllmRunner"]
