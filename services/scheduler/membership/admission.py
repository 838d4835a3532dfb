"""Which workers fit the group."""

from protocol.membership import Register
from services.config import SchedulerConfig
from services.scheduler.capabilities import Combination, refusal

SAME = (
    "; the workers of a group need the same files, --quantization and --batch-invariant, and with --performance-mode "
    "throughput all of them AMX, or none"
)
"""Remedy if hashes of models differ, which cover these settings."""


def objection(
    register: Register, model: Register | None, num_others: int | None, config: SchedulerConfig, tokenizer: str = ""
) -> str | None:
    """Return why a worker cannot be used, with the values that contradict one another, or None.

    Args:
        model: what the other workers registered; None: there are none.
        num_others: workers in the group, for a new worker; None: it is in the group already.
        tokenizer: digest of the tokenizer.json of the scheduler's model; "": not compared.
    """
    if model is not None and (mismatch := _mismatch(register, model)) is not None:
        return mismatch
    if tokenizer and register.tokenizer not in ("", tokenizer):
        return (
            "tokenizer mismatch: tokenizer.json of this worker's model has the digest "
            f"{register.tokenizer}, that of the scheduler's {tokenizer}; give both the same --model"
        )
    if (reason := refusal(Combination.from_config(config, register.backend))) is not None:
        return reason
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    if register.single_rank and (tp not in ("auto", 1) or pp > 1):
        return f"--tensor-parallel-size {tp} --pipeline-parallel-size {pp}: {register.single_rank}"
    sizes, most_stages = register.tensor_parallel_sizes, register.max_pipeline_parallel_size
    if tp != "auto" and tp not in sizes:
        return f"--tensor-parallel-size {tp}: the model can be cut into {', '.join(map(str, sizes))}"
    if pp > most_stages:
        return f"--pipeline-parallel-size {pp}: the model can be cut into at most {most_stages} stages"
    ranks = (max(sizes) if tp == "auto" else tp) * pp
    if num_others is not None and num_others >= ranks + config.max_spare_workers:
        return (
            f"the group has {num_others} workers: {ranks} ranks and {config.max_spare_workers} spares "
            f"(--max-spare-workers) are the maximum"
        )
    return None


def _mismatch(register: Register, model: Register) -> str | None:
    values = (
        ("backend", register.backend, model.backend),
        ("model hash", register.model_hash, model.model_hash),
        ("dtype", register.dtype, model.dtype),
    )
    for name, theirs, ours in values:
        if theirs != ours:
            return (
                f"{name} mismatch: this worker has {theirs!r}, the group {ours!r} "
                f"(model {register.model or 'demo'!r} and {model.model or 'demo'!r})"
                f"{SAME if name == 'model hash' else ''}"
            )
    return None
