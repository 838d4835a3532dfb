"""vLLM's API server with a FAKE engine instead of a model.

The engine sends the first token of every stream, and after SIGUSR1 the others, one of each stream per step. Run it with
the Python of an environment with vLLM 0.32, the arguments of `vllm serve` and RUNAHEAD_PACED (see `Paced`).

HTTP, tokenizer, requests, detokenisation and streaming are vLLM's own. The outputs of the engine are made in the
process of the server, which costs less than decoding them from the usual socket.
"""

import asyncio
import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.entrypoints.cli.main import main
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient


@dataclass
class Paced:
    streams: int
    """Number of requests that the engine waits for before it starts."""
    pace: float
    """Time of a step, seconds."""
    token_ids: list[int]
    """Tokens of every stream, up to its `max_tokens`."""


class FakeEngine:
    """Replaces the client of vLLM's engine process."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, paced: Paced) -> None:
        self._paced = paced
        self._open: dict[str, int] = {}
        """Request id -> `max_tokens`."""
        self._all_arrived = asyncio.Event()
        self._may_continue = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._may_continue.set)
        self._step = 0
        self._due = 0.0

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._open[request.request_id] = request.sampling_params.max_tokens
        if len(self._open) == self._paced.streams:
            self._all_arrived.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if any(self._open.pop(request_id, None) for request_id in request_ids):
            raise RuntimeError("a client aborted a request")

    async def get_output_async(self) -> EngineCoreOutputs:
        await self._all_arrived.wait()
        if self._step == 1:
            await self._may_continue.wait()
            self._due = time.monotonic() + self._paced.pace
        await asyncio.sleep(self._due - time.monotonic())
        token = self._paced.token_ids[self._step]
        self._step += 1
        self._due += self._paced.pace
        outputs = []
        for request_id, max_tokens in list(self._open.items()):
            is_last = self._step == max_tokens
            outputs.append(
                EngineCoreOutput(request_id, [token], finish_reason=FinishReason.LENGTH if is_last else None)
            )
            if is_last:
                del self._open[request_id]
        if not self._open:
            self._step = 0
            self._all_arrived.clear()
            self._may_continue.clear()
        return EngineCoreOutputs(outputs=outputs)

    async def reset_mm_cache_async(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


def _fake(**_: Any) -> FakeEngine:
    return FakeEngine(msgspec.json.decode(os.environ["RUNAHEAD_PACED"], type=Paced))


if __name__ == "__main__":
    EngineCoreClient.make_async_mp_client = staticmethod(_fake)
    main()
