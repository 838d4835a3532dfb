"""Faults of steps that are configured, so that recovery can be tested with real processes."""

import logging
import os

from protocol.codec import unpack
from protocol.steps import SchedulerOutput
from services.config import WorkerConfig

log = logging.getLogger("runahead.worker")

EXIT_INJECTED = 70


class InjectedFault(Exception):
    """`--sim-fault error`."""


def inject_faults(config: WorkerConfig, step: SchedulerOutput) -> None:
    """Let a step fail if the configuration says so.

    Raises: MemoryError; InjectedFault
    """
    most, token = config.sim_max_step_tokens, config.sim_fault_token
    if most and (tokens := int(unpack(step.counts).sum())) > most:
        raise MemoryError(f"a step of {tokens} tokens does not fit (--sim-max-step-tokens {most})")
    if token is None:
        return
    if not any(token in unpack(request.token_ids)[: request.num_prompt_tokens] for request in step.new):
        return
    if config.sim_fault == "exit":
        log.error("step %d has token %d: this process exits (--sim-fault exit)", step.step_id, token)
        logging.shutdown()
        os._exit(EXIT_INJECTED)
    raise InjectedFault(f"step {step.step_id} has token {token} (--sim-fault-token)")
