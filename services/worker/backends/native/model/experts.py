"""A mixture of experts: each token is computed by the experts that its router chooses.

The rows of a step are sorted by expert, and each expert with rows computes one product over all of them. Products
compute row by row, and the results of a token are added in ascending order of its experts; so a row has the same bits
in any batch. A rank computes the rows of its own experts; the sum over ranks completes them.
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
        own: the numbers of this rank's experts, and their products
    """

    def __init__(
        self,
        network: NetworkKernels,
        config: ExpertsConfig,
        router: Linear,
        own: range,
        products: Sequence[Expert],
        activation: Activation,
    ) -> None:
        """Raises: LoadError, if the network has no kernels for it."""
        if network.routing is None:
            raise LoadError("mixtures of experts are not computed on this device; use --device cpu")
        self._network, self._routing, self._config, self._router = network, network.routing, config, router
        self._own, self._products, self._activation = own, products, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map activations[rows, hidden] to float32[rows, hidden], this rank's part of the result."""
        network, config, kind = self._network, self._config, self._network.activations
        rows, hidden = x.shape
        logits = self._router(x, torch.empty(rows, config.number, dtype=kind))
        routed = self._routing.route(logits, config.per_token, config.normalised)
        first, last = routed.ends[self._own.start], routed.ends[self._own.stop]
        tokens = routed.tokens[first:last]
        entered, left = x[tokens], torch.empty(last - first, hidden, dtype=kind)
        gate_up = torch.empty(last - first, 2 * config.width, dtype=kind)
        gated = torch.empty(last - first, config.width, dtype=kind)
        ends = [end - first for end in routed.ends[self._own.start : self._own.stop + 1]]
        for (into, out_of), start, end in zip(self._products, ends, ends[1:], strict=False):
            if start < end:
                wide = into(entered[start:end], gate_up[start:end])
                network.gate_and_multiply(wide, gated[start:end], self._activation)
                narrow = out_of(gated[start:end], left[start:end])
                if narrow.data_ptr() != left[start:end].data_ptr():
                    left[start:end] = narrow
        return self._routing.combine(left, tokens, routed.weights[first:last], rows)
