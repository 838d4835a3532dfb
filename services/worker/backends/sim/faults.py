"""Faults of steps that are configured, so that recovery can be tested with real processes."""

import ctypes
import logging
import os
import time

from protocol.codec import unpack
from protocol.steps import SchedulerOutput
from services.config import WorkerConfig

log = logging.getLogger("runahead.worker")

EXIT_INJECTED = 70
_LONG = 10**6
"""Seconds."""


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
    if config.sim_fault == "error":
        raise InjectedFault(f"step {step.step_id} has token {token} (--sim-fault-token)")
    log.error("step %d has token %d: --sim-fault %s", step.step_id, token, config.sim_fault)
    match config.sim_fault:
        case "exit":
            logging.shutdown()
            os._exit(EXIT_INJECTED)
        case "hang":
            time.sleep(_LONG)
        case "freeze":  # with the interpreter's lock, so that no other thread runs
            ctypes.PyDLL(None).sleep(_LONG)
