"""The interface between the native runner and the kernels: the operations of a step, over torch tensors.

Model, sampler and drafters are written once, against these protocols. Two packages implement them:

- `kernels.reference`: plain torch and NumPy, run eagerly; readable code that defines every operation,
- `kernels.cpu`: kernels that numba compiles for this machine's processor, recorded and replayed.

Only `kernels.selection` chooses between them. Another kind of device needs one more package with these four groups of
operations, and nothing else.

Columns of a step's plan are NumPy arrays on the host. Operands and results of the model are tensors on the device. The
number of rows of an operation is the first dimension of the operand that its docstring names first.

**Recording.** The steps of an epoch run the same operations on the same memory; only the numbers of rows differ. So a
sequence of operations can be recorded once (`NetworkKernels.record`) and then run as a whole: the compiled
implementation replays the recorded kernels in one call, an implementation for CUDA can capture a graph, the reference
calls the function again. Recorded operations read and write `Buffers`, whose addresses do not change.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.kernels.quantized_weight import Weight
from services.worker.batch.slots import Rows

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


# -- recording ---------------------------------------------------------------------------------------------------


class Buffers:
    """Tensors whose addresses do not change. The rows of each are of one kind, such as "tokens".

    A subclass creates them with `_rows`, as attributes or in tuples.

    Args:
        capacity: maximum number of rows of each kind, at least 1.
    """

    def __init__(self, **capacity: int) -> None:
        self.capacity = capacity
        self._kinds: dict[int, str] = {}

    def _rows(self, kind: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor [capacity of `kind`, *shape], not initialised."""
        tensor = torch.empty(self.capacity[kind], *shape, dtype=dtype)
        self._kinds[tensor.data_ptr()] = kind
        return tensor

    def kind_of(self, tensor: torch.Tensor) -> str:
        """Return the kind of rows of one of these tensors, or of a view that begins where the tensor begins.

        Raises: KeyError, for any other tensor.
        """
        return self._kinds[tensor.data_ptr()]

    def holds(self, **counts: int) -> bool:
        """Return whether there is room for these numbers of rows."""
        return all(count <= self.capacity[kind] for kind, count in counts.items())

    def first(self, **counts: int) -> Self:
        """Return views of the first rows; tensors of kinds that are not named stay whole."""

        def cut(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(map(cut, value))
            if not isinstance(value, torch.Tensor):
                return value
            return value[: counts.get(self.kind_of(value))]

        views = copy.copy(self)
        vars(views).update({name: cut(value) for name, value in vars(self).items()})
        return views


B = TypeVar("B", bound=Buffers)


class Recording(Protocol[T_co]):
    """A sequence of operations over buffers."""

    def run(self, **counts: int) -> T_co:
        """Run the operations over these numbers of rows.

        Returns: the result of the recorded function. Tensors in it are buffers, of which the first rows count.
        """
        ...


class EagerRecording(Generic[T]):
    """A `Recording` that calls the function each time."""

    def __init__(self, body: Callable[[Any], T], buffers: Buffers) -> None:
        self._body, self._buffers = body, buffers

    def run(self, **counts: int) -> T:
        return self._body(self._buffers.first(**counts))


# -- the network -------------------------------------------------------------------------------------------------


class CacheShape(NamedTuple):
    """A paged KV cache."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers; layer by layer, block by block, in the layout of the implementation."""

    shape: CacheShape
    num_blocks: int
    keys: torch.Tensor
    values: torch.Tensor


class AttentionShape(NamedTuple):
    """Attention of every layer of a model."""

    heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Number of keys that a query reads in each layer, its own included; 0: all."""
    norm_eps: float
    frequencies: torch.Tensor
    """float32[head_dim / 2]: frequencies of the rotary position embedding, radians per position."""


class Linear(Protocol):
    """A product y = x W^T + b with prepared weights."""

    num_bytes: int
    """Memory of the weights."""

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Map activations[rows, in] to activations[rows, out].

        Returns: the result: `out` with float32 activations; otherwise a library may have allocated it.
        """
        ...


class EmbeddingTable(Protocol):
    """Vectors of tokens."""

    tensor: torch.Tensor | None
    """[tokens, width]; None where they are kept in another layout."""
    num_bytes: int

    def __len__(self) -> int:
        """The number of tokens."""
        ...

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = vector of token index[i] in float32; int32[rows], float32[rows, width]."""
        ...


class Attention(Protocol):
    """Rotary positions, writes to the cache and attention, layer after layer of one step."""

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Prepare data that the layers of a step share, from the tokens' positions and slots, int32[tokens] each."""
        ...

    def write(
        self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        """Rotate queries and keys; write keys and values to the cache, before any query reads (write before read).

        Args:
            qkv: activations[tokens, (heads + 2 * kv_heads) * head_dim]
            norms: float32[head_dim] weights that normalise each query head and each key head first
        """
        ...

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the attention of the queries that were written last.

        Args:
            tiles: int32[tiles, 4]: slot, first position, first token, tokens
            out: activations[tokens, heads * head_dim]
        """
        ...


class NetworkKernels(Protocol):
    """The forward pass of a model or a drafter. For one calling thread."""

    activations: torch.dtype
    """dtype that products read and write."""

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a product. Takes ownership of weight [out, in] and bias [out]."""
        ...

    def embedding(self, weight: Weight) -> EmbeddingTable:
        """Prepare the vectors of tokens, [tokens, width]."""
        ...

    def tied(self, embedding: EmbeddingTable) -> Linear:
        """A product with the embedding's vectors as weights; it reads the same memory where the layout allows it."""
        ...

    def bytes_per_block(self, shape: CacheShape) -> int: ...

    def kv_cache(self, shape: CacheShape, num_blocks: int) -> KVCache: ...

    def attention(
        self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int
    ) -> Attention:
        """`table`: int32[slots, blocks], the block table of every slot; the scheduler's plans change it in place."""
        ...

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = source[index[i]] in float32; int32[rows], [any, width], float32[rows, width]."""
        ...

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """out = source; float32[rows, width] each. `out` may be columns of a wider matrix."""
        ...

    def add(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """out += source; activations[rows, width], float32[rows, width]."""
        ...

    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        """residual += delta; out = residual / rms(residual) * weight.

        Args:
            residual: float32[rows, width]
            delta: activations[rows, width], or None: nothing is added
            weight: float32[width]
            out: activations[rows, width]
        """
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        """out = silu(gate) * up; activations[rows, 2 * width] to [rows, width]."""
        ...

    def most_likely(
        self, logits: torch.Tensor, sharpness: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor
    ) -> None:
        """Find the most likely token of each row, the lowest id among equals, and its probability.

        Args:
            logits: float32[rows, vocab]
            sharpness: float32[rows], factor of the logits
            ids, chances: int32[rows] and float32[rows], written
        """
        ...

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Call a function of the host that maps [rows, width] to the same shape, such as a sum over ranks.

        Returns: the result, in `out` or in the function's own memory.
        """
        ...

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        """Record the operations that `body` calls on `buffers`. `body` must not depend on values."""
        ...


# -- rows of a step ----------------------------------------------------------------------------------------------


class BatchTensors(NamedTuple):
    """The tokens of a step, row after row; the tensors may be longer."""

    ids: torch.Tensor
    """int32[tokens]"""
    slots: torch.Tensor
    """int32[tokens]"""
    positions: torch.Tensor
    """int32[tokens]"""
    tiles: torch.Tensor
    """int32[tiles, 4]: slot, first position, first token, tokens. The queries of a tile share their keys."""
    sampled: torch.Tensor
    """int32[sampled]: indices of the tokens whose logits are needed: one per sampling row and one per draft"""


class SlotDrafts(NamedTuple):
    """Drafts and true positions of all slots."""

    frontier: torch.Tensor
    """int32[slots]: start of the next row; EMPTY before the first"""
    proposed: torch.Tensor
    """int32[slots]: number of drafts for the next row"""
    tokens: torch.Tensor
    """int32[slots, most]: these drafts"""


class SettledRows(NamedTuple):
    """int32[rows] each."""

    starts: I32
    counts: I32
    drafts: I32


class Verified(NamedTuple):
    """int32[rows] unless stated."""

    counts: I32
    """Accepted drafts and one more token."""
    drafted: I32
    """Drafts that could have been accepted."""
    stays: NDArray[np.bool_]
    """bool[tokens]: sampled tokens that count."""


class RowKernels(Protocol):
    """The rows of a step: their positions, and the drafts that are accepted."""

    tile: int
    """Maximum number of tokens in a tile."""

    def spread(self, counts: I32) -> tuple[I32, I32]:
        """Return the row of each token and its index in the row, int32[tokens] each. `counts`: int32[rows], tokens."""
        ...

    def settle(self, rows: Rows, drafts: SlotDrafts, history: torch.Tensor) -> tuple[SettledRows | None, int]:
        """Bring rows to their true positions, each with the drafts that its slot has, and write these drafts to
        `history`, int32[slots, limit]. The slots have no drafts afterwards, and their frontiers are the rows' ends.

        Returns: the rows and -1; or None and the first row that is planned before its frontier, with nothing changed.
        """
        ...

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        """Write the tokens of all rows. Their ids are read from `history`, int32[slots, limit], if there is one.

        Returns: number of tiles and number of sampled tokens.

        Raises: RuntimeError, if the history has no token of the vocabulary at a position (valid ids).
        """
        ...

    def verify(
        self,
        slots: I32,
        firsts: I32,
        drafts: I32,
        acceptable: I32,
        ids: torch.Tensor,
        history: torch.Tensor,
    ) -> Verified:
        """Compare sampled tokens with drafts.

        Args:
            slots, firsts, drafts, acceptable: int32[rows]; at most `acceptable` drafts are accepted
            ids: int32[sum(drafts + 1)], sampled tokens
            history: int32[slots, limit], with the drafts from position `firsts` on
        """
        ...


# -- sampling ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogitRule:
    """Changes of one request's logits by its parameters, in this order; ids are in the vocabulary."""

    num_prompt: int
    allowed: I32 | None = None
    """Ascending; None: all."""
    bad_words: tuple[I32, ...] = ()
    banned: I32 | None = None
    """Not sampled below position `banned_until`."""
    banned_until: int = 0
    biased: I32 | None = None
    biases: F32 | None = None
    penalizes: bool = False
    """True: the next three have an effect."""
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


class LogitRules(Protocol):
    """The rule of every slot. Tokens are counted in the history when a row is sampled (penalty history)."""

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        """Set the rule of a slot's new request; None: no rule."""
        ...

    def changes(self, slots: I32) -> NDArray[np.bool_]:
        """Return the rows whose logits `apply` may change, bool[rows]."""
        ...

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        """Change float32[rows, vocab] in place. `positions` are those of the tokens to sample. The rows of a slot are
        adjacent and their positions consecutive: all but the first follow drafts.

        Raises: RuntimeError, if a position before them has no token (valid ids).
        """
        ...


class DrawColumns(NamedTuple):
    """Parameters of each row."""

    temperature: F32
    """Below GREEDY_BELOW, the greatest logit is chosen."""
    min_p: F32
    top_k: I32
    """0: all"""
    top_p: F32
    seed: NDArray[np.uint64]
    position: I32
    """Position of the token to sample. Seed and position determine the noise (services.worker.sampling.noise)."""


class ScoredTokens(NamedTuple):
    """Log-probabilities of each row: its token first, then the most likely tokens in descending order, the lowest id
    first among equals."""

    counts: I32
    """int32[rows]: entries of each row"""
    ids: I32
    """int32[entries]"""
    values: F32
    """float32[entries], natural logarithms"""
    token_ranks: I32
    """int32[rows]: 1 plus the number of logits greater than the token's"""


class SamplingKernels(Protocol):
    """Sampling from logits. Rows are independent of one another."""

    def logit_rules(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> LogitRules:
        """`history`: int32[slots, limit]"""
        ...

    def apply_bitmask(self, logits: torch.Tensor, rows: I32, words: I32) -> None:
        """Forbid in rows `rows` of float32[any, vocab] all tokens without a bit in `words`, int32[rows, words], least
        significant bit first. If every token with a bit is forbidden already, allow the lowest of them."""
        ...

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the greatest of each row of float32[rows, vocab] as int32[rows]; the lowest id among equals."""
        ...

    def choose(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        """Return a token of each row, int32[rows]: the greatest logit, or a draw by the row's noise after temperature,
        min-p, top-k and top-p. Tokens that tie with the last one kept are kept; among equal maxima the lowest id wins.
        The logits do not change."""
        ...

    def logprobs(self, logits: torch.Tensor, rows: I32, tokens: I32, tops: I32) -> ScoredTokens:
        """Score tokens by rows `rows` of float32[any, vocab].

        Args:
            tokens, tops: int32[rows]: the row's token, and the number of most likely tokens, at most vocab
        """
        ...


# -- drafting ----------------------------------------------------------------------------------------------------


class DraftTensors(NamedTuple):
    """Operands and results of a head that drafts one token per round, for all of its rounds."""

    # places: a token with the hidden state of the token before it
    slots: torch.Tensor
    """int32[places]"""
    positions: torch.Tensor
    """int32[places]"""
    ids: torch.Tensor
    """int32[places]"""
    hidden: torch.Tensor
    """float32[places, width]"""
    # rows that get drafts
    tiles: torch.Tensor
    """int32[rows, 4], as `BatchTensors` has them; one place each"""
    last: torch.Tensor
    """int32[rows]: place of each row"""
    yielded: torch.Tensor
    """float32[rows, width]: hidden state for the next round"""
    chosen: torch.Tensor
    """int32[rows]: draft id"""
    sure: torch.Tensor
    """float32[rows]: its probability"""
    sharpness: torch.Tensor
    """float32[rows]: for `most_likely`"""
    # per row, kept from round to round
    room: torch.Tensor
    """int32[rows]: maximum number of drafts"""
    owner: torch.Tensor
    """int32[rows]: row of the result"""
    chance: torch.Tensor
    """float32[rows]: probability of all of the row's drafts together"""


class DraftRows(NamedTuple):
    """The rows of a step whose tokens a head follows."""

    slots: I32
    starts: I32
    counts: I32
    samples: NDArray[np.bool_]
    num_blocks: I32
    """int32[slots]"""
    temperature: F32
    """float32[slots]"""
    block_size: int


class DraftLimits(NamedTuple):
    """Limits of the drafts of a step."""

    k: int
    """Maximum number of drafts of a row."""
    position: int
    """Drafts and computed places have positions below this one."""
    error: float
    """The head's own error, as a temperature."""


class DraftLayout(NamedTuple):
    """The first round of a draft."""

    places: int
    rows: int
    """Rows that get drafts."""


class DraftingKernels(Protocol):
    """Proposals of tokens."""

    def lookup(
        self, history: torch.Tensor, slots: I32, lengths: I32, sizes: range, k: int, min_acceptance: float
    ) -> I32:
        """Return the tokens that follow the longest earlier match of the sequence's end; among equally long matches the
        last one.

        If the sequence ends before k tokens are copied, the copy continues with the drafts. After a match of s
        tokens, each draft counts as accepted with probability s / (s + 1); a row ends where the product falls below
        `min_acceptance`.

        Args:
            history: int32[slots, limit]
            lengths: int32[rows], tokens of each sequence
            sizes: lengths of matches, ascending

        Returns: int32[rows, k], padded with NO_DRAFT.
        """
        ...

    def lay_out(
        self, rows: DraftRows, history: torch.Tensor, limits: DraftLimits, tensors: DraftTensors
    ) -> DraftLayout:
        """Write the places of a step's tokens without their hidden states, each with the token after it, and the rows
        that have room for drafts."""
        ...

    def draft(
        self,
        places: Recording[None],
        rows: Recording[None],
        tensors: DraftTensors,
        layout: DraftLayout,
        min_acceptance: float,
        tokens: torch.Tensor | None,
        proposed: I32,
    ) -> None:
        """Run the recordings alternately, over "places" and over "rows", once for each draft.

        Args:
            min_acceptance: a row ends where the probability of all its drafts together falls below this
            tokens: int32[draft vocabulary]: the token of each draft id; None: the same
            proposed: int32[any, k]: written where there are drafts
        """
        ...


# -- all of it ---------------------------------------------------------------------------------------------------


class Kernels(Protocol):
    """One implementation, for a model in one dtype. Each group is for one calling thread."""

    network: NetworkKernels
    """The network with the activations that the selection chose for the model's dtype."""
    rows: RowKernels
    sampling: SamplingKernels
    drafting: DraftingKernels

    def float32_network(self) -> NetworkKernels:
        """Return another network, with float32 activations over a cache in the model's dtype."""
        ...

    def use_threads(self, number: int) -> None:
        """Compute with so many threads in this process, the calling one included."""
        ...
