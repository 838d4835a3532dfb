"""Recurrent states of a step's constrained rows, kept until the step is sampled.

vLLM's layers change a state in place. A row that is left out computes its position again in a later step, so its state
is taken back: recurrent state (docs/invariants.md).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.backends.vllm import vllm_api


class _Kept(NamedTuple):
    """States before a step, in one tensor of a layer."""

    tensor: Tensor
    blocks: Tensor
    """int64[rows]"""
    states: Tensor
    """[rows, ...]"""


class RecurrentStates:
    """States of the layers in groups with recurrent states.

    Args:
        layers: vLLM's layers by name, with their caches
        groups: vLLM's `KVCacheGroupSpec`
    """

    def __init__(self, layers: Mapping[str, Any], groups: Sequence[Any]) -> None:
        self._tensors: list[list[Tensor]] = [
            [tensor for name in group.layer_names for tensor in layers[name].kv_cache]
            for group in groups
            if isinstance(group.kv_cache_spec, vllm_api.MambaSpec)
        ]
        self._kept: list[_Kept] = []

    def keep(self, blocks: NDArray[Any]) -> None:
        """Copy the states before a step. `blocks`: int[rows, groups], vLLM's numbers."""
        self._kept.clear()
        if len(blocks):
            for tensors, column in zip(self._tensors, torch.from_numpy(blocks).long().T, strict=True):
                self._kept += [_Kept(tensor, column, tensor[column]) for tensor in tensors]

    def take_back(self, rows: Sequence[int]) -> None:
        """Write back the states of `rows`, which count those of `keep`."""
        for tensor, blocks, states in self._kept if rows else ():
            tensor[blocks[rows]] = states[rows]
