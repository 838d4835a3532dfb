"""Two engines with short streams and long prompts: prefill apart from decode, prompts in chunks, and whole prompts.

The engines are `sim`: real services that sleep as long as a device would compute, and fetch real (small) blocks. The
figures are the times between two tokens of the short streams, and the times to the first token of the long prompts.
"""

import argparse
import asyncio
import random
import time

import aiohttp
import numpy as np

from services.cli.ask import ServerAddress, first_model
from services.cli.bench.load import LoadClient, SentRequest
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import metrics, runahead_process
from tests.metrics import total
from tests.waiting import wait_until

DEVICE = (
    "--backend=sim", "--sim-step-ms=10", "--sim-prefill-token-us=100", "--sim-decode-us=200",
    "--num-gpu-blocks-override=6000", "--max-model-len=8192", "--max-num-seqs=64", "--data-parallel-size=2",
)  # fmt: skip
"""A device that computes 10,000 prompt tokens/s."""
MODES = {
    "apart": ("--prefill-engines=1", "--kv-peer-address=tcp://127.0.0.1:0", "--max-num-batched-tokens=8192"),
    "chunked": ("--max-num-batched-tokens=512",),
    "mixed": ("--max-num-batched-tokens=8192",),
}


STREAMS, PROMPT = 16, 4000
"""Short streams that are always open; tokens of a long prompt, of which one comes per second."""


class MixedLoad:
    def __init__(self, seconds: float) -> None:
        self._seconds, self._rng = seconds, random.Random(0)
        self.gaps: list[float] = []
        """Seconds between two tokens of short streams, without the first ones."""
        self.first: list[float] = []
        """Seconds to the first token of long prompts."""

    async def _answered(self, client: LoadClient, length: int) -> SentRequest:
        """Return a request with a prompt of so many tokens and the times of its answer. Raises: SystemExit"""
        request = SentRequest([self._rng.randrange(300, 20_000) for _ in range(length)])
        await client.send(request)
        if request.error:
            raise SystemExit(request.error)
        return request

    async def _short(self, client: LoadClient, until: float) -> None:
        while time.monotonic() < until:
            request = await self._answered(client, 12)
            self.gaps += np.diff(request.arrivals[1:]).tolist()

    async def _long(self, client: LoadClient) -> None:
        request = await self._answered(client, PROMPT)
        self.first.append(request.arrivals[0] - request.started)

    async def run(self, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            model = await asyncio.to_thread(first_model, ServerAddress(url))
            body: dict[str, object] = {"model": model, "ignore_eos": True, "stream": True, "temperature": 0}
            short, long = (LoadClient(http, body | {"max_tokens": tokens}, 1000) for tokens in (200, 16))
            until = time.monotonic() + self._seconds
            arrivals = random.Random(0)  # the same in every mode
            tasks = [asyncio.create_task(self._short(short, until)) for _ in range(STREAMS)]
            await asyncio.sleep(1.0)
            while time.monotonic() < until:
                tasks.append(asyncio.create_task(self._long(long)))
                await asyncio.sleep(arrivals.expovariate(1.0))
            await asyncio.gather(*tasks)


def measured(mode: str, args: argparse.Namespace) -> dict[str, float | str]:
    load = MixedLoad(args.seconds)
    with runahead_process("", *DEVICE, *MODES[mode]) as server:
        wait_until(lambda: total(metrics(server.url), "runahead:engine_ready") == 2, "both engines are ready")
        asyncio.run(load.run(server.url))
    return {
        "mode": mode,
        "gap p99, ms": 1e3 * float(np.percentile(load.gaps, 99)),
        "gap p99.9, ms": 1e3 * float(np.percentile(load.gaps, 99.9)),
        "long: TTFT p50, s": float(np.median(load.first)),
    }


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=40)
    args = parser.parse_args()
    rows = {mode: measured(mode, args) for mode in MODES}

    def ratio(mode: str, column: str) -> float:
        return float(rows[mode][column]) / float(rows["apart"][column])

    report(
        "roles_served",
        title="short streams beside long prompts, two engines",
        rows=list(rows.values()),
        figures={
            f"{mode} / apart, {column}": ratio(mode, column)
            for mode in ("chunked", "mixed")
            for column in ("gap p99, ms", "gap p99.9, ms", "long: TTFT p50, s")
        },
        settings={**vars(args), "device": DEVICE, "modes": MODES},
        repeats=list(rows.values()),
    )
