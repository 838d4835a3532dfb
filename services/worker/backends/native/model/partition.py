"""The part of a model on one rank: some of its layers, and a share of each layer's heads, MLP and vocabulary."""

from dataclasses import dataclass, replace

from protocol.membership import Shard
from services.worker.backends.native.model.config import ModelConfig
from services.worker.runner import LoadError


@dataclass(frozen=True)
class ModelPart:
    """The part of one rank; slices are rows or columns of the whole model."""

    shard: Shard
    whole: ModelConfig
    config: ModelConfig
    """Configuration of the part: its number of layers, heads and KV heads, and its width of the MLP."""
    layers: range
    heads: slice
    """Attention heads that read `kv_heads`; a part of them if several ranks have the same KV head."""
    kv_heads: slice
    """KV heads. If they cannot be divided equally, the first ranks have one more. With more ranks than KV heads,
    several ranks have the same one."""
    intermediate: slice
    """The MLP's intermediate dimension."""
    experts: range
    """Experts of a mixture, whole ones."""
    shared: slice
    """The intermediate dimension of the expert that all tokens share."""
    vocabulary: slice
    """Token ids. The last rank's slice may be shorter than the others'."""
    vocabulary_width: int
    """Logits that each rank computes, padding included."""

    @property
    def is_first(self) -> bool:
        """Return whether this stage has the embedding."""
        return self.shard.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Return whether this stage has the final norm and the head."""
        return self.shard.pp_rank == self.shard.pipeline_parallel_size - 1

    @property
    def adds_bias(self) -> bool:
        """Return whether this rank adds the biases of products that are summed over ranks; exactly one rank does."""
        return self.shard.tp_rank == 0

    @classmethod
    def from_shard(cls, config: ModelConfig, shard: Shard, group: int = 1) -> "ModelPart":
        """`group`: inputs that are quantised together and cannot be cut.

        Raises: LoadError, if the model cannot be divided like this; the text names the sizes that work.
        """
        size, stages = shard.tensor_parallel_size, shard.pipeline_parallel_size
        if problem := _problem(config, size, group):
            allowed = ", ".join(map(str, tensor_parallel_sizes(config, group)))
            raise LoadError(f"this model cannot be cut for {size} tensor-parallel ranks, only for {allowed}: {problem}")
        if stages > config.num_layers:
            raise LoadError(
                f"{config.num_layers} layers cannot be cut into {stages} pipeline stages; use at most one per layer"
            )
        layers = stage_layers(config.num_layers, stages, shard.pp_rank)
        heads, kv_heads = _heads(config, size, shard.tp_rank)
        width, experts = -(-config.vocab_size // size), config.experts
        shared = experts.shared_width // size if experts is not None else 0
        return cls(
            shard=shard,
            whole=config,
            config=replace(
                config,
                num_layers=len(layers),
                windows=config.windows[layers.start : layers.stop],
                ropes=config.ropes[layers.start : layers.stop],
                num_heads=heads.stop - heads.start,
                num_kv_heads=kv_heads.stop - kv_heads.start,
                intermediate_size=config.intermediate_size // size,
                experts=experts and experts._replace(shared_width=shared),
            ),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            intermediate=_share(config.intermediate_size // size, shard.tp_rank),
            experts=_experts(config, size, shard.tp_rank),
            shared=_share(shared, shard.tp_rank),
            vocabulary=slice(shard.tp_rank * width, min((shard.tp_rank + 1) * width, config.vocab_size)),
            vocabulary_width=width,
        )


def tensor_parallel_sizes(config: ModelConfig, group: int = 1) -> tuple[int, ...]:
    """Return the numbers of ranks that a layer can be divided among, in ascending order.

    Args:
        group: inputs that are quantised together and cannot be cut

    Raises: LoadError, when not even the whole layer consists of such groups.
    """
    whole = () if config.experts is None else (config.experts.width,)
    inputs = config.hidden_size, config.num_heads * config.head_dim, *config.divided_widths, *whole
    if any(size % group for size in inputs):
        raise LoadError(
            f"weights are quantised in groups of {group} inputs, but this model has products with "
            f"{', '.join(map(str, inputs))} inputs; use it without --quantization"
        )
    return tuple(size for size in range(1, config.num_heads + 1) if not _problem(config, size, group))


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """Return the layers of a stage. If they cannot be divided equally, the last stage has fewer, as it also has the
    head; then the first one."""
    each, rest = divmod(num_layers, stages)
    counts = [each + (stages - 1 - rest <= number < stages - 1) for number in range(stages)]
    start = sum(counts[:stage])
    return range(start, start + counts[stage])


def _problem(config: ModelConfig, size: int, group: int) -> str:
    """Return the reason why a layer cannot be divided among `size` ranks, or an empty text."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if size > heads:
        return f"it has {heads} attention heads"
    if size > kv_heads and (size % kv_heads or heads % size):
        return f"a size above its {kv_heads} KV heads must be a multiple of them and divide its {heads} attention heads"
    if size > 1 and config.qk_norm_of_all_heads:
        return "the norm of queries and keys is over all heads of a token"
    if config.experts is not None and config.experts.number % size:
        return f"a layer has {config.experts.number} experts"
    if any(width % size for width in config.divided_widths):
        return f"the MLP is {' or '.join(map(str, config.divided_widths))} wide"
    if problem := _divided_group(config, size, group):
        return problem
    if (size - 1) * -(-config.vocab_size // size) >= config.vocab_size:
        return f"a rank would have none of {config.vocab_size} token ids"
    return ""


def _divided_group(config: ModelConfig, size: int, group: int) -> str:
    """Return why groups of inputs would be divided, or an empty text."""
    if any(width // size % group for width in config.divided_widths):
        return f"the MLP is {' or '.join(map(str, config.divided_widths))} wide, quantised in groups of {group}"
    if any(_heads(config, size, rank)[0].stop * config.head_dim % group for rank in range(size)):
        return f"heads of size {config.head_dim} are quantised in groups of {group}"
    return ""


def _heads(config: ModelConfig, size: int, rank: int) -> tuple[slice, slice]:
    """Return a rank's attention heads and KV heads. If there is a KV head for every rank, all heads that read a KV head
    are on its rank."""
    if size > config.num_kv_heads:
        first = rank * config.num_kv_heads // size
        return _share(config.num_heads // size, rank), slice(first, first + 1)
    each, rest = divmod(config.num_kv_heads, size)
    first = rank * each + min(rank, rest)
    kv_heads = slice(first, first + each + (rank < rest))
    group = config.num_heads // config.num_kv_heads
    return slice(kv_heads.start * group, kv_heads.stop * group), kv_heads


def _experts(config: ModelConfig, size: int, rank: int) -> range:
    each = 0 if config.experts is None else config.experts.number // size
    return range(rank * each, (rank + 1) * each)


def _share(width: int, rank: int) -> slice:
    return slice(rank * width, (rank + 1) * width)
