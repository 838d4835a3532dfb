"""The plain kernels on a simulated device (lazy_device.py): calls enqueue, and kernels run later.

Columns of the host are uploaded as the interface says, and what a kernel returns contains poison until it has run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.batch.slots import Rows
from services.worker.kernels.interface.attention import AttentionShape
from services.worker.kernels.interface.buffers import Buffers
from services.worker.kernels.interface.drafting import DraftingKernels
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.interface.kv_cache import KVCache
from services.worker.kernels.interface.logit_rules import LogitRule, LogitRules
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.kernels.interface.recording import Recording
from services.worker.kernels.interface.rows import BatchTensors, RowKernels, Verified
from services.worker.kernels.interface.sampling import DrawColumns, SamplingKernels, ScoredTokens
from services.worker.kernels.packed_weight import Packed
from tests.unit.native.lazy_device import LazyDevice, poisoned

I32 = NDArray[np.int32]
B = TypeVar("B", bound=Buffers)
T = TypeVar("T")


class LazyKernels(Kernels):
    def __init__(self, activations: torch.dtype, device: LazyDevice) -> None:
        self.device, self._lazy = device, device
        self.network, self.rows = LazyNetwork(activations, device), LazyRows(device)
        self.sampling, self.drafting = LazySampling(device), LazyDrafting(device)

    def float32_network(self) -> "LazyNetwork":
        return LazyNetwork(torch.float32, self._lazy)


def enqueued(operation: Callable[..., None]) -> Any:
    """Return an operation that the device runs later."""

    def enqueue(self: Any, *operands: Any, **more: Any) -> None:
        self._device.launch(lambda: operation(self, *operands, **more))

    return enqueue


class LazyNetwork(NetworkKernels):
    def __init__(self, activations: torch.dtype, device: LazyDevice) -> None:
        super().__init__(activations)
        self._device, self.routing = device, None

    def linear(self, weight: Packed, bias: torch.Tensor | None = None) -> Any:
        return Later(super().linear(weight, bias), self._device)

    def attention(self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int) -> Any:
        return Later(super().attention(shape, cache, table, most_tokens), self._device)

    gather, copy, add = map(enqueued, (NetworkKernels.gather, NetworkKernels.copy, NetworkKernels.add))
    norm, most_likely = enqueued(NetworkKernels.norm), enqueued(NetworkKernels.most_likely)
    gate_and_multiply = enqueued(NetworkKernels.gate_and_multiply)

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        raise AssertionError("a device has one rank")

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        return LazyRecording(body, buffers, self._device)


class LazyRecording(Recording[T]):
    """`body` returns a buffer."""

    def __init__(self, body: Callable[[Any], T], buffers: Buffers, device: LazyDevice) -> None:
        super().__init__(body, buffers)
        self._device = device
        with device.immediately():
            result = body(buffers.first(**dict.fromkeys(buffers.capacity, 0)))
        assert isinstance(result, torch.Tensor)
        tensors = [each for each in vars(buffers).values() if isinstance(each, torch.Tensor)]
        self._result: Any = next(each for each in tensors if _memory(each) == _memory(result))

    def run(self, **counts: int) -> T:
        views = self._buffers.first(**counts)
        self._device.launch(lambda: self._body(views))
        return self._result[: counts[self._buffers.kind_of(self._result)]]  # type: ignore[no-any-return]  # a tensor


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Later:
    """A `Linear` or an `Attention` whose methods the device runs later."""

    def __init__(self, inner: Any, device: LazyDevice) -> None:
        self.inner, self._device = inner, device

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        self._device.launch(lambda: self.inner(x, out))
        return out

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value
        return lambda *operands, **more: self._device.launch(lambda: value(*operands, **more))


class LazyRows(RowKernels):
    def __init__(self, device: LazyDevice) -> None:
        self._inner, self._device = RowKernels(), device

    def write_prompt(self, history: torch.Tensor, slot: int, tokens: I32) -> None:
        (uploaded,) = self._device.upload(tokens)
        self._device.launch(lambda: self._inner.write_prompt(history, slot, uploaded.numpy()))

    def write_tokens(self, history: torch.Tensor, slots: I32, positions: I32, ids: torch.Tensor) -> None:
        uploaded = self._device.upload(slots, positions)
        self._device.launch(lambda: self._inner.write_tokens(history, *(each.numpy() for each in uploaded), ids))

    def read_tokens(self, history: torch.Tensor, slots: I32, positions: I32) -> torch.Tensor:
        uploaded, ids = self._device.upload(slots, positions), poisoned(len(slots), dtype=torch.int32)
        self._device.launch(lambda: ids.copy_(self._inner.read_tokens(history, *(each.numpy() for each in uploaded))))
        return ids

    def upload(self, ids: I32) -> torch.Tensor:
        return self._device.upload(ids)[0]

    def lay_out(
        self, rows: Rows, history: torch.Tensor | None, vocab_size: int, batch: BatchTensors
    ) -> tuple[int, int]:
        host = BatchTensors(*(torch.empty_like(each) for each in batch))
        tokens = int(rows.counts.sum())
        tiles, sampled = self._inner.lay_out(rows, None, vocab_size, host)
        counts = {"slots": tokens, "positions": tokens, "tiles": tiles, "sampled": sampled}
        uploaded = self._device.upload(*(getattr(host, name)[:n].numpy() for name, n in counts.items()))

        def write() -> None:
            for (name, number), column in zip(counts.items(), uploaded, strict=True):
                getattr(batch, name)[:number] = column
            if history is not None:
                batch.ids[:tokens] = history[uploaded[0].long(), uploaded[1].long()]

        self._device.launch(write)
        return tiles, sampled

    def verify(
        self, slots: I32, firsts: I32, drafts: I32, acceptable: I32, ids: torch.Tensor, history: torch.Tensor
    ) -> Verified:
        """Waits for the device, as the host plans with the number of accepted drafts."""
        self._device.now()()
        return super().verify(slots, firsts, drafts, acceptable, ids, history)


class LazyDrafting(DraftingKernels):
    """Only lookups run on a device."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device

    def lookup(
        self, history: torch.Tensor, slots: I32, lengths: I32, sizes: range, k: int, min_acceptance: float
    ) -> I32:
        """Waits for the device, as the host plans with the number of drafts."""
        self._device.now()()
        return super().lookup(history, slots, lengths, sizes, k, min_acceptance)


class LazySampling(SamplingKernels):
    def __init__(self, device: LazyDevice) -> None:
        self._inner, self._device = SamplingKernels(), device

    def logit_rules(self, num_slots: int, vocab_size: int, history: torch.Tensor) -> LogitRules:
        sizes = num_slots, vocab_size, history
        return LazyLogitRules(self._inner.logit_rules(*sizes), self._device, *sizes)

    def apply_bitmask(self, logits: torch.Tensor, rows: I32, words: I32) -> None:
        uploaded = self._device.upload(rows, words)
        self._device.launch(lambda: self._inner.apply_bitmask(logits, *(each.numpy() for each in uploaded)))

    def greedy(self, logits: torch.Tensor) -> torch.Tensor:
        ids = poisoned(len(logits), dtype=torch.int32)
        self._device.launch(lambda: ids.copy_(self._inner.greedy(logits)))
        return ids

    def choose(self, logits: torch.Tensor, columns: DrawColumns) -> torch.Tensor:
        ids, uploaded = poisoned(len(logits), dtype=torch.int32), self._device.upload(*columns)

        def draw() -> None:
            here = DrawColumns(*(each.numpy() for each in uploaded))
            ids.copy_(self._inner.choose(logits, here._replace(seed=here.seed.view(np.uint64))))

        self._device.launch(draw)
        return ids

    def logprobs(self, logits: torch.Tensor, rows: I32, tokens: torch.Tensor, tops: I32) -> ScoredTokens:
        entries = int((tops + 1).sum())
        scored = ScoredTokens(
            tops + np.int32(1),
            poisoned(entries, dtype=torch.int32),
            poisoned(entries, dtype=torch.float32),
            poisoned(len(rows), dtype=torch.int32),
        )
        uploaded = self._device.upload(rows, tops)

        def write() -> None:
            index, most = (each.numpy() for each in uploaded)
            for target, value in zip(scored[1:], self._inner.logprobs(logits, index, tokens, most)[1:], strict=True):
                target.copy_(value)

        self._device.launch(write)
        return scored


class LazyLogitRules(LogitRules):
    def __init__(
        self, inner: LogitRules, device: LazyDevice, num_slots: int, vocab_size: int, history: torch.Tensor
    ) -> None:
        super().__init__(num_slots, vocab_size, history)
        self._inner, self._device = inner, device

    def assign(self, slot: int, rule: LogitRule | None) -> None:
        super().assign(slot, rule)
        self._device.launch(lambda: self._inner.assign(slot, rule))

    def apply(self, logits: torch.Tensor, slots: I32, positions: I32) -> None:
        uploaded = self._device.upload(slots, positions)
        self._device.launch(lambda: self._inner.apply(logits, *(each.numpy() for each in uploaded)))
