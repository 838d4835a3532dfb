"""From registration to the first step of an epoch: the worker registers, loads its shard, allocates its KV cache and
runs a canary step. An error is sent to the scheduler, and the worker ends."""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace

from protocol.codec import pack
from protocol.fields import MAX_TEXT
from protocol.membership import Assignment, InitializeCache, LoadFailed, LoadProgress, Ready, Register
from protocol.sampling import SamplingParams
from protocol.steps import NewRequest, SchedulerOutput
from protocol.transport import PeerGone, PeerSlow
from services.checkpoint import CheckpointError
from services.config import WorkerConfig
from services.process import STARTED, start_log
from services.units import size_text
from services.worker.distributed.rendezvous import address_facing, listen
from services.worker.runner import LoadError, ModelRunner, RanksLost
from services.worker.scheduler_link import SchedulerLink
from services.worker.session import Session
from services.worker.tiers.offload import Offload

log = logging.getLogger("runahead.worker")

PROGRESS_INTERVAL = 0.1
"""Seconds between two messages about loading."""


class StartUp:
    def __init__(
        self, config: WorkerConfig, runner: ModelRunner, session: Session, link: SchedulerLink, offload: Offload
    ) -> None:
        self._config, self._runner, self._session, self._link = config, runner, session, link
        self._offload = offload
        self._listener: socket.socket | None = None
        """The rendezvous that was sent with the registration, until the runner owns it."""
        self._num_groups = 1
        """Groups of KV cache of the model that was loaded last."""
        self._next_progress = 0.0
        self._phase = ""
        """Phase of the last message about loading."""

    def register(self) -> None:
        """Send this worker's model, its weights in memory, and its rendezvous.

        Raises: LoadError, after it was sent
        """
        start_log.debug("reading the model's description")
        host = self._config.host_ip or address_facing(self._config.scheduler_endpoint)
        with self._starting():
            identity, listener = self._runner.identify(), _listen(host)
        self._session.leaves_rows_out = identity.leaves_rows_out
        self._session.collects_masks = not identity.waits_for_masks
        self.close_listener()
        self._listener = listener
        self._link.client.send(
            Register(
                backend=self._config.backend_name,
                model=self._config.model,
                hostname=socket.gethostname(),
                pid=os.getpid(),
                model_hash=identity.model_hash,
                dtype=identity.dtype,
                tensor_parallel_sizes=identity.tensor_parallel_sizes,
                max_pipeline_parallel_size=identity.max_pipeline_parallel_size,
                rendezvous=f"{host}:{listener.getsockname()[1]}",
                epoch=self._session.epoch,
                shard=self._runner.shard,
                returns=self._session.returns,
                tokenizer=identity.tokenizer,
                leaves_rows_out=identity.leaves_rows_out,
                single_rank=identity.single_rank,
            )
        )
        start_log.debug(STARTED)

    def close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def load(self, assignment: Assignment) -> None:
        """Raises: LoadError, after it was sent; RanksLost"""
        listener, self._listener = self._listener, None
        self._link.results.begin_epoch(assignment.epoch, assignment.rank)
        try:
            with self._starting():
                if assignment.max_loras and not self._runner.identify().serves_loras:
                    raise LoadError("--enable-lora: only --backend vllm with --device cpu serves LoRA adapters")
                self._runner.kv_memory.expect()
                loaded = self._runner.load(assignment, self._progress, listener)
                self._offload.open(self._runner.kv_memory, loaded, assignment.rank)
        except LoadError:
            if listener is not None:  # the runner may have failed before it owned the listener
                listener.close()
            raise
        self._num_groups = max(1, len(loaded.groups))
        size = size_text(loaded.num_blocks * loaded.bytes_per_block)
        log.info("loaded: the KV cache has %s in %d blocks", size, loaded.num_blocks)
        offload = self._offload
        kept = self._runner.kv_memory
        loaded = replace(loaded, epoch=assignment.epoch, held=kept.held(), pins=kept.pins, dropped_in=kept.dropped_in)
        loaded = replace(loaded, loads_blocks=offload.has_tiers, kv_peer=offload.kv_peer)
        self._link.client.send(loaded)
        self._session.loaded()

    def _progress(self, phase: str, fraction: float) -> None:
        now = time.monotonic()
        if now >= self._next_progress or fraction >= 1 or phase != self._phase:
            self._next_progress, self._phase = now + PROGRESS_INTERVAL, phase
            self._link.client.send(LoadProgress(phase, min(1.0, max(0.0, fraction)), self._session.epoch))

    def initialize(self, init: InitializeCache) -> None:
        """Raises: LoadError, after it was sent; RanksLost"""
        with self._starting():
            self._runner.init_kv_cache(init)
            memory = self._runner.kv_memory
            if memory.names is not None:
                memory.names.drop([init.canary_block])
            if memory.dropped_in != init.dropped_in:
                memory.forget_before(init.dropped_in)
                self._offload.forget()
            _run_canary(self._runner, init.canary_block, self._num_groups)
            self._offload.begin(memory)
        self._session.ready()
        self._link.client.send(Ready(self._session.epoch))
        log.info("ready: %d KV blocks, context %d", init.num_blocks, init.max_model_len)

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Send errors of the start-up to the scheduler.

        Raises: LoadError, after it was sent; RanksLost, PeerGone and PeerSlow of the body as they are.
        """
        try:
            with self._link.results.may_wait_for_ranks():
                yield
        except (PeerGone, PeerSlow, RanksLost):
            raise
        except Exception as error:
            if self._link.is_closing:  # a callback of the compiler has dropped the exit, and the compiler fails then
                raise SystemExit(0) from None
            why = str(error)
            if not isinstance(error, LoadError | CheckpointError):
                log.exception("the model cannot be served")
                why = f"{type(error).__name__}: {error}"
            self._link.client.send(LoadFailed(" ".join(why.split())[:MAX_TEXT]))
            raise LoadError(why) from error


def _run_canary(runner: ModelRunner, block: int, num_groups: int) -> None:
    """Run one step through forward pass and sampling before the first real one.

    Afterwards its slot is empty and no step is pending (single pending state; docs/invariants.md). Its generation is 0;
    requests have generations from 1 on.
    """
    zero, one = pack([0]), pack([1])
    blocks = pack([block] * num_groups)
    request = NewRequest(0, 0, zero, 1, blocks, SamplingParams(max_tokens=1, temperature=0.0))
    runner.execute_model(SchedulerOutput(0, 0, zero, zero, zero, one, b"\1", [request]))
    runner.sample_tokens(None).get()
    runner.release(np.zeros(1, np.int32))


def _listen(host: str) -> socket.socket:
    """Raises: LoadError"""
    try:
        return listen(host)
    except OSError as error:
        raise LoadError(
            f"--host-ip {host}: cannot listen on this address: {error.strerror}; give an address of this machine"
        ) from error
    except ValueError as error:
        raise LoadError(f"--host-ip {host}: {error}; give the address of a network of the ranks' own") from None
