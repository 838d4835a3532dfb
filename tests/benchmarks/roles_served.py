"""Two engines with short streams and long prompts: prefill apart from decode, prompts in chunks, and whole prompts.

The engines are `sim`: real services that sleep as long as a device would compute, and fetch real (small) blocks. The
figures are the times between two tokens of the short streams, and the times to the first token of the long prompts.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from urllib.request import urlopen

import aiohttp
import numpy as np

from services.cli.preflight import free_port
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import started, wait_for
from tests.metrics import total
from tests.waiting import wait_until

DEVICE = (
    "--backend=sim", "--sim-step-ms=10", "--sim-prefill-token-us=100", "--sim-decode-us=200", "--log-level=warning",
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
    def __init__(self, url: str, args: argparse.Namespace) -> None:
        self._url, self._args, self._rng = url, args, random.Random(0)
        self.gaps: list[float] = []
        """Seconds between two tokens of short streams, without the first ones."""
        self.first: list[float] = []
        """Seconds to the first token of long prompts."""

    async def _times(self, http: aiohttp.ClientSession, prompt: list[int], tokens: int) -> list[float]:
        """Return when the request was sent, and when each piece of its answer came."""
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "temperature": 0,
        }  # fmt: skip
        times = [time.monotonic()]
        async with http.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                count = len(json.loads(line[6:])["choices"]) if line.startswith(b"data: {") else 0
                times += [time.monotonic()] * count
        return times

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(300, 20_000) for _ in range(length)]

    async def _short(self, http: aiohttp.ClientSession, until: float) -> None:
        while time.monotonic() < until:
            times = await self._times(http, self._prompt(12), 200)
            self.gaps += np.diff(times[2:]).tolist()

    async def _long(self, http: aiohttp.ClientSession) -> None:
        times = await self._times(http, self._prompt(PROMPT), 16)
        self.first.append(times[1] - times[0])

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            async with http.get(f"{self._url}/v1/models") as response:
                self._model = (await response.json())["data"][0]["id"]
            until = time.monotonic() + self._args.seconds
            arrivals = random.Random(0)  # the same in every mode
            tasks = [asyncio.create_task(self._short(http, until)) for _ in range(STREAMS)]
            await asyncio.sleep(1.0)
            while time.monotonic() < until:
                tasks.append(asyncio.create_task(self._long(http)))
                await asyncio.sleep(arrivals.expovariate(1.0))
            await asyncio.gather(*tasks)


def measured(mode: str, args: argparse.Namespace) -> dict[str, float | str]:
    port = free_port("127.0.0.1", 0)
    with started([sys.executable, "-m", "services.cli", "serve", f"--port={port}", *DEVICE, *MODES[mode]]) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/readyz", process)

        def page() -> str:
            with urlopen(f"{url}/metrics") as response:
                return str(response.read().decode())

        wait_until(lambda: total(page(), "runahead:engine_ready") == 2, "both engines are ready")
        load = MixedLoad(url, args)
        asyncio.run(load.run())
    return {
        "mode": mode,
        "gap p99, ms": 1e3 * float(np.percentile(load.gaps, 99)),
        "gap p99.9, ms": 1e3 * float(np.percentile(load.gaps, 99.9)),
        "long: TTFT p50, s": float(np.median(load.first)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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


if __name__ == "__main__":
    main()
