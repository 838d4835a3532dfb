"""The weights of an EAGLE head: names and shapes of its checkpoint's tensors. Missing ones are the target's."""

import torch

from services.worker.backends.native.drafters.base import TargetModel
from services.worker.backends.native.drafters.eagle_config import EagleConfig
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.interface.products import Linear
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint


class EagleLoader:
    """The methods raise LoadError when a tensor is missing or has another shape."""

    def __init__(
        self, config: EagleConfig, checkpoint: Checkpoint, target: TargetModel, network: NetworkKernels
    ) -> None:
        self._config, self._checkpoint, self._target = config, checkpoint, target
        self._dtype, self._network = target.model.dtype, network
        self._whole = target.model.part.whole
        self._layer = "midlayer." if "midlayer.self_attn.q_proj.weight" in checkpoint else "layers.0."
        self.target_hidden_size = self._whole.hidden_size

    def vector(self, name: str) -> torch.Tensor:
        """float32[hidden]"""
        size = self._config.layer.hidden_size
        return self._checkpoint.take(self._named(name), (size,), self._dtype).float()

    def linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """A product with the checkpoint's weight, and its bias if there is one."""
        return self._stacked({name: outputs}, inputs, self._named(f"{name}.bias") in self._checkpoint)

    def layer(self, inputs: int) -> tuple[Linear, Linear, Linear, Linear]:
        """The layer's products: queries, keys and values from `inputs`; the output of attention; gate and up; down."""
        c = self._config.layer
        heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        qkv = {f"layers.0.self_attn.{x}_proj": size for x, size in (("q", heads), ("k", kv), ("v", kv))}
        gate_up = dict.fromkeys(("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"), c.intermediate_size)
        return (
            self._stacked(qkv, inputs, c.qkv_bias),
            self._stacked({"layers.0.self_attn.o_proj": c.hidden_size}, heads, c.out_bias),
            self._stacked(gate_up, c.hidden_size, c.mlp_bias),
            self._stacked({"layers.0.mlp.down_proj": c.hidden_size}, c.intermediate_size, c.mlp_bias),
        )

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden] in the model's dtype: its own, or the target's."""
        shape = self._whole.vocab_size, self._config.layer.hidden_size
        if "embed_tokens.weight" in self._checkpoint:
            return self._checkpoint.take("embed_tokens.weight", shape, self._dtype)
        self._check_shared("embed_tokens.weight")
        embedding = self._target.model.embedding
        shared = embedding.weight if embedding is not None else None
        if isinstance(shared, torch.Tensor) and len(shared) == self._whole.vocab_size:
            return shared
        return self._target.checkpoint.take("model.embed_tokens.weight", shape, self._dtype)

    def draft_tokens(self) -> torch.Tensor | None:
        """int32[draft_vocab_size]: the token of each draft id; None: draft ids are tokens."""
        size, vocab = self._config.draft_vocab_size, self._whole.vocab_size
        if size == vocab and "d2t" not in self._checkpoint:
            return None
        offsets = self._checkpoint.integers("d2t")
        if len(offsets) != size:
            raise LoadError(f"tensor d2t has {len(offsets)} entries, but config.json says {size} draft tokens")
        tokens = offsets + torch.arange(size)
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise LoadError(f"tensor d2t names tokens outside of the vocabulary of {vocab}")
        if "t2d" in self._checkpoint:
            known = torch.zeros(vocab, dtype=torch.int64).index_fill_(0, tokens, 1)
            if not torch.equal(self._checkpoint.integers("t2d"), known):
                raise LoadError("tensors d2t and t2d do not name the same tokens; download the model again")
        return tokens.int()

    def head(self, tokens: torch.Tensor | None) -> Linear:
        """A product from hidden states to logits of the draft ids: the head's own, or the rows of the target's head."""
        hidden, size = self._config.layer.hidden_size, self._config.draft_vocab_size
        if "lm_head.weight" in self._checkpoint:
            return self._network.linear(self._weight("lm_head.weight", (size, hidden)))
        self._check_shared("lm_head.weight")
        whole = self._whole
        name = "model.embed_tokens.weight" if whole.tied else "lm_head.weight"
        weight = self._target.checkpoint.take(name, (whole.vocab_size, hidden), self._dtype)
        return self._network.linear(weight if tokens is None else weight[tokens.long()])

    def _check_shared(self, name: str) -> None:
        if self._config.layer.hidden_size != self._whole.hidden_size:
            raise LoadError(f"the checkpoint has no tensor {name}, and that of the model has another hidden size")

    def _stacked(self, sizes: dict[str, int], inputs: int, bias: bool) -> Linear:
        weights = [self._weight(f"{name}.weight", (size, inputs)) for name, size in sizes.items()]
        biases = [self._weight(f"{name}.bias", (size,)) for name, size in sizes.items() if bias]
        return self._network.linear(torch.cat(weights), torch.cat(biases) if biases else None)

    def _weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._checkpoint.take(self._named(name), shape, self._dtype)

    def _named(self, name: str) -> str:
        return name.replace("layers.0.", self._layer)
