"""Matrix products of cuBLAS."""

import torch

from services.worker.backends.native.device.interface import ComputeDevice
from services.worker.backends.native.kernels.quantized_weight import QuantizedWeight, Weight
from services.worker.runner import LoadError


class CudaLinear:
    """`Linear` with the weights in the dtype of the activations."""

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None, activations: torch.dtype, device: ComputeDevice
    ) -> None:
        """Raises: LoadError, for quantised weights."""
        plain = device.keep(dense(weight)).to(activations)
        self._transposed, self.num_bytes = plain.t(), plain.nbytes
        self._bias = bias if bias is None else device.keep(bias).to(activations)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)


def dense(weight: Weight) -> torch.Tensor:
    """Raises: LoadError, for quantised weights."""
    if isinstance(weight, QuantizedWeight):
        raise LoadError(
            f"quantised weights ({', '.join(weight.kinds)}) are not supported on CUDA; use --quantization none, "
            "or --device cpu"
        )
    return weight
