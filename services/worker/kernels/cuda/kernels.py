"""The implementation for CUDA devices."""

from collections.abc import Callable

import torch

from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.attention import num_processors
from services.worker.kernels.cuda.attention_buffers import AttentionBuffers
from services.worker.kernels.cuda.drafting import CudaDrafting, lookup_bytes
from services.worker.kernels.cuda.graph_plan import GraphPlan
from services.worker.kernels.cuda.graphs import CudaGraphs
from services.worker.kernels.cuda.logit_rules import counts_bytes
from services.worker.kernels.cuda.network import CudaNetwork
from services.worker.kernels.cuda.rows import CudaRows
from services.worker.kernels.cuda.sampling import CudaSampling, sampling_bytes
from services.worker.kernels.interface.kernels import EpochSizes, Kernels, Uses


class CudaKernels(Kernels):
    """
    Args:
        activations: dtype of products, weights and KV cache
        eager: launch the kernels of decode steps one by one instead of replaying graphs
        graphs: for tests, makes the graphs of an epoch; by default CUDA graphs, where the device has them
    """

    def __init__(
        self,
        activations: torch.dtype,
        device: ComputeDevice,
        eager: bool = False,
        graphs: Callable[[], CudaGraphs] | None = None,
    ) -> None:
        self.device, self._activations = device, activations
        if graphs is None and not eager and device.where.type == "cuda":
            graphs = CudaGraphs
        self._captures = graphs is not None
        self.network, self.rows = CudaNetwork(activations, device, graphs), CudaRows(device)
        self.sampling, self.drafting = CudaSampling(device), CudaDrafting(device)

    def workspaces(self, sizes: EpochSizes) -> Uses:
        """Graphs are an estimate; the log has what they take."""
        shape, cache, sampled = sizes.attention, sizes.cache, sizes.rows["sampled"]
        processors, meta = num_processors(self.device.where), torch.device("meta")
        sized = shape, cache.kv_heads, sizes.rows["tokens"], self._activations
        attention = AttentionBuffers(*sized, processors, meta)
        plan = GraphPlan.for_rows(min(sizes.rows.values()) if self._captures else 0)
        row = 0 if self._activations == torch.float32 else self._activations.itemsize * sizes.vocab_size
        return {
            "attention": attention.num_bytes + shape.frequencies.nbytes + shape.amplitudes.nbytes,
            "logits": row * sampled,
            "sampling": sampling_bytes(sampled, sizes.vocab_size),
            "penalties": counts_bytes(sampled, sizes.vocab_size),
            "drafts": lookup_bytes(sizes.num_slots, sizes.max_model_len) if sizes.num_drafts else 0,
            "graphs": plan.num_bytes(cache.layers, row),
        }

    def use_threads(self, number: int) -> None:
        """Do nothing: kernels run on the device."""
