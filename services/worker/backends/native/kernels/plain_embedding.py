"""Vectors of tokens as a plain tensor."""

import torch

from services.worker.backends.native.kernels.interface.network import NetworkKernels


class PlainEmbedding:
    """`EmbeddingTable`"""

    def __init__(self, network: NetworkKernels, tensor: torch.Tensor) -> None:
        self._network, self._tensor, self.num_bytes = network, tensor, tensor.nbytes
        self.tensor: torch.Tensor | None = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        self._network.gather(index, self._tensor, out)
