"""The part of a model on one rank: some of its layers, and a share of each layer's heads, MLP and vocabulary."""

from dataclasses import dataclass, replace

from protocol.membership import Shard
from services.worker.backends.native.model.config import ModelConfig
from services.worker.runner import LoadError


@dataclass(frozen=True)
class Part:
    """The part of one rank; slices are rows or columns of the whole model."""

    shard: Shard
    whole: ModelConfig
    config: ModelConfig
    """The part as a model of its own: its number of layers, heads and KV heads, its width of the MLP."""
    layers: range
    heads: slice
    """Attention heads."""
    kv_heads: slice
    """KV heads. With more ranks than KV heads, several ranks have the same one."""
    intermediate: slice
    """The MLP's intermediate dimension."""
    vocabulary: slice
    """Token ids. The last rank's slice may be shorter than the others'."""
    vocabulary_width: int
    """Logits that each rank computes, padding included."""

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.shard.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the final norm and the head."""
        return self.shard.pp_rank == self.shard.pipeline_parallel_size - 1

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds the biases of products that are summed over ranks, so that they are added once."""
        return self.shard.tp_rank == 0

    @classmethod
    def from_shard(cls, config: ModelConfig, shard: Shard) -> "Part":
        """Raises: LoadError, when the model cannot be cut like this; the text names the sizes that work."""
        size, stages = shard.tensor_parallel_size, shard.pipeline_parallel_size
        if not _divides(config, size):
            allowed = ", ".join(map(str, tensor_parallel_sizes(config)))
            raise LoadError(f"this model cannot be cut for {size} tensor-parallel ranks, only for {allowed}")
        if stages > config.num_layers:
            raise LoadError(
                f"{config.num_layers} layers cannot be cut into {stages} pipeline stages; use at most one per layer"
            )
        layers = stage_layers(config.num_layers, stages, shard.pp_rank)
        kv_heads = max(1, config.num_kv_heads // size)
        first_kv_head = shard.tp_rank * config.num_kv_heads // size
        width = -(-config.vocab_size // size)
        return cls(
            shard=shard,
            whole=config,
            config=replace(
                config,
                num_layers=len(layers),
                windows=config.windows[layers.start : layers.stop],
                num_heads=config.num_heads // size,
                num_kv_heads=kv_heads,
                intermediate_size=config.intermediate_size // size,
            ),
            layers=layers,
            heads=_share(config.num_heads // size, shard.tp_rank),
            kv_heads=slice(first_kv_head, first_kv_head + kv_heads),
            intermediate=_share(config.intermediate_size // size, shard.tp_rank),
            vocabulary=slice(shard.tp_rank * width, min((shard.tp_rank + 1) * width, config.vocab_size)),
            vocabulary_width=width,
        )


def tensor_parallel_sizes(config: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of ranks that a layer can be divided among, in ascending order."""
    return tuple(size for size in range(1, config.num_heads + 1) if _divides(config, size))


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage. Where the stages cannot have equally many, the last one has fewer first, as it also
    has the head, then the first one."""
    each, rest = divmod(num_layers, stages)
    counts = [each + (stages - 1 - rest <= number < stages - 1) for number in range(stages)]
    start = sum(counts[:stage])
    return range(start, start + counts[stage])


def _divides(config: ModelConfig, size: int) -> bool:
    kv_heads = config.num_kv_heads
    return (
        config.num_heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and config.intermediate_size % size == 0
        and (size - 1) * -(-config.vocab_size // size) < config.vocab_size
    )


def _share(width: int, rank: int) -> slice:
    return slice(rank * width, (rank + 1) * width)
