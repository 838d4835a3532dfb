"""The cost model: modelled seconds of steps, drafts and hops."""

from services.config import SimulatorConfig
from services.worker.batch.slots import I32, Rows


class CostModel:
    """Seconds by the `sim_` settings.

    The settings for a step are those of the whole model; each of P stages takes one P-th of it. Tensor parallelism does
    not divide them: set the costs of a step at that size. The settings for a hop are those of one hop.
    """

    def __init__(self, config: SimulatorConfig, stages: int = 1) -> None:
        self._config, self._stages = config, stages

    def step(self, rows: Rows, num_prompt: I32) -> float:
        """Return one stage's share of a step.

        A step takes a base, the longer of reading the weights and computing prompt tokens and decoding rows, and the
        context that attention reads. Planned drafts cost as much as decoded tokens; the real number of drafts is known
        on the device alone.

        Args:
            num_prompt: int32[rows], prompt tokens of each row's request.
        """
        c = self._config
        decodes = (rows.counts == 1 + rows.drafts) & (rows.starts >= num_prompt)
        decoding = int(rows.counts[decodes].sum())
        prefill = int(rows.counts.sum()) - decoding
        tokens = prefill * c.sim_prefill_token_us * 1e-6 + decoding * c.sim_decode_us * 1e-6
        context = int(rows.ends.sum()) * c.sim_context_token_ns * 1e-9
        whole = c.sim_step_ms * 1e-3 + max(c.sim_weights_ms * 1e-3, tokens) + context
        return whole / self._stages

    def drafts(self, num_speculative_tokens: int) -> float:
        """Return the time to propose this many drafts for each row, one after the other."""
        return num_speculative_tokens * self._config.sim_draft_ms * 1e-3

    def hop(self, tokens: int) -> float:
        """Return the time to send the activations of `tokens` to the next stage, or with 0 the sampled ids back."""
        return self._config.sim_hop_ms * 1e-3 + tokens * self._config.sim_hop_token_us * 1e-6
