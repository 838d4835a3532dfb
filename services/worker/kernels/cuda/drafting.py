"""Proposals of tokens on a CUDA device: prompt lookup."""

import numpy as np
import torch

from protocol.columns import I32
from protocol.steps import NO_DRAFT
from services.worker.device.interface import ComputeDevice
from services.worker.kernels.interface.drafting import DraftingKernels

_SEARCHED = 1 << 22
"""Tokens of the history that are searched at once, which bounds the memory that this takes."""
_SEARCHED_BYTES = 16
"""Most memory for one token of them."""


class CudaDrafting(DraftingKernels):
    """Lookups. A draft head is refused when it is loaded."""

    def __init__(self, device: ComputeDevice) -> None:
        self._device = device

    def lookup(
        self, history: torch.Tensor, slots: I32, lengths: I32, sizes: range, k: int, min_acceptance: float
    ) -> I32:
        """Waits for the device: the host plans with the number of drafts."""
        found = np.full((len(slots), k), NO_DRAFT, np.int32)
        if not len(slots) or not k:
            return found
        which, ends = self._device.upload(slots.astype(np.int64), lengths.astype(np.int64))
        begun = history[:, : int(lengths.max())]
        rows = max(1, _SEARCHED // begun.shape[1])
        parts = zip(which.split(rows), ends.split(rows), strict=True)
        drafts = [_drafts(begun.index_select(0, some), until, sizes, k, min_acceptance) for some, until in parts]
        return self._device.download(torch.cat(drafts))()[0]


def lookup_bytes(slots: int, max_model_len: int) -> int:
    """Return the most memory that a search of the histories of all slots takes."""
    return _SEARCHED_BYTES * min(slots * max_model_len, max(_SEARCHED, max_model_len))


def _drafts(tokens: torch.Tensor, ends: torch.Tensor, sizes: range, k: int, min_acceptance: float) -> torch.Tensor:
    """Return the drafts of some rows, int32[rows, k], padded with NO_DRAFT."""
    after, size = _longest_match(tokens, ends, sizes)
    copied = _continuation(tokens, after, ends, k)
    number = _likely(size, k, min_acceptance)
    return torch.where(number > torch.arange(k, device=tokens.device), copied, NO_DRAFT)


def _longest_match(tokens: torch.Tensor, ends: torch.Tensor, sizes: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the end and the size of the longest earlier occurrence of each row's last tokens, int64[rows, 1] each;
    among equally long ones the last. A size of 0: none."""
    at = torch.arange(tokens.shape[1], device=tokens.device)
    after, size = torch.zeros_like(ends[:, None]), torch.zeros_like(ends[:, None])
    for wanted in sizes:
        # `at` is the end of an occurrence, exclusive, before the sequence's own end
        fits = (at >= wanted) & (at < ends[:, None])
        for back in range(1, wanted + 1):
            last = tokens.gather(1, (ends[:, None] - back).clamp(min=0))
            fits &= tokens.roll(back, 1) == last
        best = torch.where(fits, at, 0).amax(1, keepdim=True)
        after, size = torch.where(best > 0, best, after), torch.where(best > 0, wanted, size)
    return after, size


def _continuation(tokens: torch.Tensor, after: torch.Tensor, ends: torch.Tensor, k: int) -> torch.Tensor:
    """Return the `k` tokens from `after` on, int32[rows, k]; at the sequence's end it repeats what was copied."""
    period = (ends[:, None] - after).clamp(min=1)
    offset = torch.arange(k, device=tokens.device) % period
    return tokens.gather(1, (after + offset).clamp(max=tokens.shape[1] - 1))


def _likely(size: torch.Tensor, k: int, min_acceptance: float) -> torch.Tensor:
    """Return the number of drafts whose probability together is at least `min_acceptance`, int64[rows, 1]."""
    each = size.float() / (size + 1).float()
    together = each.expand(-1, k).cumprod(1)
    return ((together >= min_acceptance) & (size > 0)).sum(1, keepdim=True)
