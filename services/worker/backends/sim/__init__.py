"""The simulator backend: it computes no model, verifies every KV position that it reads, and takes modelled time.

    device/    the simulated device, rigid shapes
    model/     the oracle: KV cache of prefix hashes, logits as a function of a hash
    sampling/  the sampler, parameters of rows, drafts and their acceptance
    output/    results: tokens and log-probabilities
    ranks/     what the ranks of a group send one another

`SimRunner` implements `ModelRunner`; `SimEpoch` is everything that lives one epoch.
"""

from services.worker.backends.sim.runner import SimRunner
