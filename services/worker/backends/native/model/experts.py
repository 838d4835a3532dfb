"""A mixture of experts: each token is computed by the experts that its router chooses.

The rows of a step are sorted by expert, and each expert with rows computes one product over all of them. Products
compute row by row, and the results of a token are added in ascending order of its experts; so a row has the same bits
in any batch. A rank computes the rows of its own experts and, of an expert that all tokens share, its part of the
width; the sum over ranks completes them.
"""

from collections.abc import Sequence

import torch

from services.worker.backends.native.model.config import ExpertsConfig
from services.worker.kernels.interface.network import Activation, NetworkKernels
from services.worker.kernels.interface.products import Linear
from services.worker.runner import LoadError

Expert = tuple[Linear, Linear]
"""hidden to 2 * width, and width to hidden."""


class Experts:
    """The experts of one layer on one rank, computed by calls from the host.

    Args:
        config: that of this rank
        own: the numbers of this rank's experts, and their products
        shared: this rank's part of the expert of all tokens
    """

    def __init__(
        self,
        network: NetworkKernels,
        config: ExpertsConfig,
        router: Linear,
        own: range,
        products: Sequence[Expert],
        activation: Activation,
        shared: Expert | None = None,
    ) -> None:
        """Raises: LoadError, if the network has no kernels for it."""
        if network.routing is None:
            raise LoadError("mixtures of experts are not computed on this device; use --device cpu")
        self._network, self._routing, self._config, self._router = network, network.routing, config, router
        self._own, self._products, self._activation, self._shared = own, products, activation, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations[rows, hidden] to float32[rows, hidden], this rank's part of the result."""
        config, kind = self._config, self._network.activations
        rows, hidden = x.shape
        logits = self._router(x, torch.empty(rows, config.number, dtype=kind))
        routed = self._routing.route(logits, config.per_token, config.normalised, config.scales_input)
        first, last = routed.ends[self._own.start], routed.ends[self._own.stop]
        tokens, weights = routed.tokens[first:last], routed.weights[first:last]
        entered, left = x[tokens], torch.empty(last - first, hidden, dtype=kind)
        if config.scales_input:
            entered, weights = (entered * weights[:, None]).to(kind), torch.ones_like(weights)
        gate_up = torch.empty(last - first, 2 * config.width, dtype=kind)
        gated = torch.empty(last - first, config.width, dtype=kind)
        ends = [end - first for end in routed.ends[self._own.start : self._own.stop + 1]]
        for expert, start, end in zip(self._products, ends, ends[1:], strict=False):
            if start < end:
                own = slice(start, end)
                narrow = self._compute(expert, entered[own], gate_up[own], gated[own], left[own])
                if narrow.data_ptr() != left[own].data_ptr():
                    left[own] = narrow
        total = self._routing.combine(left, tokens, weights, rows)
        if self._shared is None:
            return total
        sizes = 2 * config.shared_width, config.shared_width, hidden
        return total.add_(self._compute(self._shared, x, *(torch.empty(rows, size, dtype=kind) for size in sizes)))

    def _compute(
        self, expert: Expert, x: torch.Tensor, gate_up: torch.Tensor, gated: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        into, out_of = expert
        self._network.gate_and_multiply(into(x, gate_up), gated, self._activation)
        return out_of(gated, out)
