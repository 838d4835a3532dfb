"""Rows of a mixture of experts."""

from typing import NamedTuple

import torch


class Routed(NamedTuple):
    """Pairs of token and expert, in ascending order of experts, then of tokens."""

    tokens: torch.Tensor
    """int64[pairs]"""
    weights: torch.Tensor
    """float32[pairs]"""
    ends: list[int]
    """int[experts + 1]: number of pairs of the experts before each one, and of all."""


class RoutingKernels:
    """Called by the host between recorded operations. Rows are independent of one another."""

    def route(self, logits: torch.Tensor, per_token: int, normalised: bool, sigmoid: bool = False) -> Routed:
        """Choose the experts of each token: those with the greatest logits, the lowest number among equals.

        Args:
            logits: activations[tokens, experts]
            normalised: the softmax is over the chosen experts, otherwise over all
            sigmoid: a weight is the sigmoid of its logit; there is no softmax
        """
        chances, every = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1), logits.shape[1]
        chosen = logits.float().sort(stable=True, dim=1, descending=True).indices[:, :per_token]
        weights = chances.gather(1, chosen)
        if normalised and not sigmoid:
            weights = weights / weights.sum(1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        ends = [0, *torch.bincount(chosen.flatten(), minlength=every).cumsum(0).tolist()]
        return Routed(order // per_token, weights.flatten()[order], ends)

    def combine(self, results: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, rows: int) -> torch.Tensor:
        """Return float32[rows, width]: the sum of weights[i] * results[i] of each token, in ascending order of i.

        Args:
            results: activations[pairs, width]
        """
        out = torch.zeros(rows, results.shape[1])
        return out.index_add_(0, tokens, results.float() * weights[:, None])
