"""Proposals of tokens by compiled kernels."""

import numpy as np
import torch

from protocol.columns import I32
from protocol.steps import NO_DRAFT
from services.worker.kernels.cpu import thread_team
from services.worker.kernels.cpu.compiled import rows as compiled
from services.worker.kernels.cpu.compiled.draft import draft_kernel
from services.worker.kernels.cpu.compiled.ngram import ngram_kernel
from services.worker.kernels.cpu.recording import CpuRecording
from services.worker.kernels.interface.drafting import DraftingKernels, DraftLayout, DraftTensors
from services.worker.kernels.interface.recording import Recording


class CpuDrafting(DraftingKernels):
    """For one calling thread."""

    loops = compiled

    def __init__(self) -> None:
        self._ngram, self._draft = ngram_kernel(), draft_kernel()

    def lookup(
        self, history: torch.Tensor, slots: I32, lengths: I32, sizes: range, k: int, min_acceptance: float
    ) -> I32:
        found = np.full((len(slots), k), NO_DRAFT, np.int32)
        columns = history.data_ptr(), history.shape[1], slots.ctypes.data, lengths.ctypes.data
        numbers = sizes.start, sizes.stop - 1, k, min_acceptance
        self._ngram.run(len(slots), (*columns, *numbers, found.ctypes.data))
        return found

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
        """Both recordings must be of this package and consist of kernels only."""
        if not isinstance(places, CpuRecording) or not isinstance(rows, CpuRecording):
            raise TypeError("drafts are computed from recorded kernels")
        sequences = *places.single("places"), *rows.single("rows")
        numbers = *sequences, thread_team.helper_state(), proposed.shape[1], *layout, min_acceptance
        addresses = (tensor.data_ptr() for tensor in tensors)
        at = 0 if tokens is None else tokens.data_ptr()
        self._draft.run(1, (*numbers, *addresses, tensors.hidden.shape[1], at, proposed.ctypes.data))
