"""The kind of device that `--device` names."""

import torch

from services.worker.runner import LoadError


def device_kind(wanted: str) -> str:
    """Return "cuda" or "cpu". `wanted`: one of them, or "auto": CUDA if torch has a device.

    Raises: LoadError, for "cuda" without one.
    """
    if wanted == "cpu":
        return wanted
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "auto":
        return "cpu"
    raise LoadError(f"--device cuda: {_missing()}; use --device cpu")


def _missing() -> str:
    """Return why there is no CUDA device, and what to do."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build for CPUs; install a CUDA build of torch"
    return (
        f"torch {torch.__version__} finds no NVIDIA GPU with a driver for CUDA {torch.version.cuda}; "
        "check nvidia-smi, and that a container has the NVIDIA runtime and a device"
    )
