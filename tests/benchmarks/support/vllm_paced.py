"""vLLM's own API server over a FAKE engine: no model; a first token of every stream, after SIGUSR1 the others, in step.

Run by the Python of an environment with vLLM 0.32, with the arguments of `vllm serve` and RUNAHEAD_PACED (see `Paced`).
All of the server is vLLM's own: HTTP, tokenizer, requests, detokenisation, streaming. The engine is not: its outputs
are made inside the server's process, which costs less than decoding them from the socket that they usually come by.
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
    """The engine waits until so many are there, then answers all of them in step."""
    pace: float
    """Seconds from step to step."""
    token_ids: list[int]
    """Of every stream, up to its `max_tokens`."""


class FakeEngine:
    """In the place of the client of vLLM's engine process."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __init__(self, paced: Paced) -> None:
        self._paced = paced
        self._open: dict[str, int] = {}
        """Tokens that a request wants."""
        self._all_there = asyncio.Event()
        self._may_go_on = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._may_go_on.set)
        self._step = 0
        self._due = 0.0

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: Any) -> None:
        self._open[request.request_id] = request.sampling_params.max_tokens
        if len(self._open) == self._paced.streams:
            self._all_there.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if any(self._open.pop(request_id, None) for request_id in request_ids):
            raise RuntimeError("a client gave up")

    async def get_output_async(self) -> EngineCoreOutputs:
        await self._all_there.wait()
        if self._step == 1:
            await self._may_go_on.wait()
            self._due = time.monotonic() + self._paced.pace
        await asyncio.sleep(self._due - time.monotonic())
        token = self._paced.token_ids[self._step]
        self._step += 1
        self._due += self._paced.pace
        outputs = []
        for request_id, wanted in list(self._open.items()):
            is_last = self._step == wanted
            outputs.append(
                EngineCoreOutput(request_id, [token], finish_reason=FinishReason.LENGTH if is_last else None)
            )
            if is_last:
                del self._open[request_id]
        if not self._open:
            self._step = 0
            self._all_there.clear()
            self._may_go_on.clear()
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
