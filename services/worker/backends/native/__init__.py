from services.worker.backends.native.runner import NativeRunner

__all__ = ["NativeRunner"]
