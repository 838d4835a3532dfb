"""Rows of a mixture of experts."""

from typing import NamedTuple, Protocol

import torch


class Routed(NamedTuple):
    """Pairs of token and expert, in ascending order of experts, then of tokens."""

    tokens: torch.Tensor
    """int64[pairs]"""
    weights: torch.Tensor
    """float32[pairs]"""
    ends: list[int]
    """int[experts + 1]: number of pairs of the experts before each one, and of all."""


class RoutingKernels(Protocol):
    """Called by the host between recorded operations. Rows are independent of one another."""

    def route(self, logits: torch.Tensor, per_token: int, normalised: bool) -> Routed:
        """Choose the experts of each token: those with the greatest logits, the lowest number among equals.

        Args:
            logits: activations[tokens, experts]
            normalised: the softmax is over the chosen experts, otherwise over all
        """
        ...

    def combine(
        self, results: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Return float32[rows, width]: the sum of weights[i] * results[i] of each token, in ascending order of i.

        Args:
            results: activations[pairs, width]
        """
        ...
