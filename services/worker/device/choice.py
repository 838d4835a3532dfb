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
    why = "is a build for CPUs; install a CUDA build of torch"
    if torch.version.cuda is not None:
        why = (
            f"finds no NVIDIA GPU with a driver for CUDA {torch.version.cuda}; check nvidia-smi, and that a container "
            "has the NVIDIA runtime and a device"
        )
    raise LoadError(f"--device cuda: torch {torch.__version__} {why}; use --device cpu")
