"""How long things take, by the flags of the cost model."""

from services.config import WorkerConfig
from services.worker.batch.slots import I32, Rows


class CostModel:
    """Seconds of steps and hops.

    Costs of a step are those of the whole model; one of P stages takes a P-th of them. Tensor parallelism divides
    nothing: say what a step costs at that size. Costs of a hop are those of one hop.
    """

    def __init__(self, config: WorkerConfig, stages: int = 1) -> None:
        self._config, self._stages = config, stages

    def step(self, rows: Rows, num_prompt: I32) -> float:
        """One stage's share of a step: a base, then the longer of reading the weights and computing prompt tokens and
        decoding rows, then the context that attention reads. Drafts cost what decoding them would: as planned, for
        how many there are only the device knows.

        Args:
            num_prompt: prompt tokens of each row's request.
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
        """Of proposing so many for each row, one after the other."""
        return num_speculative_tokens * self._config.sim_draft_ms * 1e-3

    def hop(self, tokens: int) -> float:
        """Activations of `tokens` from one stage to the next; sampled ids weigh nothing: 0 tokens."""
        return self._config.sim_hop_ms * 1e-3 + tokens * self._config.sim_hop_token_us * 1e-6
