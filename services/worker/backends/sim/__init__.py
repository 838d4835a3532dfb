from services.worker.backends.sim.runner import SimRunner

__all__ = ["SimRunner"]
