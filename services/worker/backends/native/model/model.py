"""The transformer's weights. All architectures share one forward pass, whose parts `ModelConfig` describes.

Tensor parallelism divides products in pairs: the first of a pair by its outputs (queries, keys and values; gate and
up), the second by its inputs (out; down). After one sum over the ranks per pair, every rank has the whole residual
stream with the same bits. Embedding and head are divided by token ids.
"""

import torch

from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.layer_groups import LayerGroups
from services.worker.backends.native.model.loading import ShardLoader, Wanted
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.model.rope import rotation
from services.worker.kernels.interface.attention import AttentionShape
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.interface.kv_cache import CacheShape
from services.worker.runner import Progress
from services.worker.weights import Checkpoint
from services.worker.weights.packed import PackedWeights


class Model:
    """The weights of one rank."""

    def __init__(
        self,
        part: ModelPart,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        kernels: Kernels,
        progress: Progress,
        quantization: Wanted = None,
        packed: PackedWeights | None = None,
    ) -> None:
        """Read the weights. `quantization`, `packed`: see `ShardLoader`.

        Raises: LoadError, if a tensor is missing or wrong.
        """
        packed = PackedWeights() if packed is None else packed
        self.part, self.config, self.dtype, self.kernels = part, part.config, dtype, kernels
        loader = ShardLoader(part, checkpoint, dtype, kernels.network, kernels.device, packed, quantization)
        self.embedding = loader.embedding() if part.is_first else None
        """Vectors of this rank's token ids."""
        self.layers = []
        for number in part.layers:
            self.layers.append(loader.layer(number))
            progress("loading weights", len(self.layers) / (len(part.layers) + 1))
        if part.is_last:
            self.final_norm = loader.norm("model.norm.weight")
            scale = part.whole.logits_scale
            self.head_norm = self.final_norm if scale == 1.0 else self.final_norm * scale
            """Norm of the head's input. The head has no bias, so a factor of the logits is a factor of its input."""
            self.head = loader.head(self.embedding)
        progress("loading weights", 1.0)
        self.weight_types = " and ".join(sorted(kind.removeprefix("torch.") for kind in packed.types))
        self.num_bytes = loader.num_bytes

    def attention(self, context: int, groups: LayerGroups | None = None) -> AttentionShape:
        """`context`: tokens of the longest sequence. `groups`: None: one block table for all layers"""
        shape = attention_shape(self.config, context)
        if groups is None:
            return shape
        return shape._replace(num_tables=len(groups.groups), tables=groups.numbers, places=groups.places)

    def cache_shape(self, block_size: int, groups: LayerGroups | None = None) -> CacheShape:
        shape = cache_shape(self.config, block_size, self.dtype)
        return shape if groups is None else shape._replace(layers=groups.depth)

    def bytes_per_block(self, block_size: int, groups: LayerGroups | None = None) -> int:
        return self.kernels.network.bytes_per_block(self.cache_shape(block_size, groups))


def attention_shape(config: ModelConfig, context: int) -> AttentionShape:
    """Return the shape with one block table. `context`: tokens of the longest sequence"""
    kinds = list(dict.fromkeys(config.ropes))
    frequencies, amplitudes = zip(*(rotation(kind, config.head_dim, context) for kind in kinds), strict=True)
    return AttentionShape(
        config.num_heads,
        config.head_dim,
        config.windows,
        config.norm_eps,
        torch.stack(frequencies),
        torch.stack(amplitudes),
        rotations=tuple(map(kinds.index, config.ropes)),
        scale=config.attention_scale or config.head_dim**-0.5,
        num_tables=1,
        tables=(0,) * config.num_layers,
        places=tuple(range(config.num_layers)),
    )


def cache_shape(config: ModelConfig, block_size: int, dtype: torch.dtype) -> CacheShape:
    return CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
