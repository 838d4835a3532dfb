"""Cost of a streamed token in Runahead's frontend and in vLLM's API server, in one run.

Both serve the demo model with its tokenizer to the same clients (see `frontend_streaming`), one round each in turn.
Neither computes tokens: Runahead's frontend gets them from a scripted engine through the scheduler's socket, vLLM's
server from a FAKE engine in its process (support/vllm_paced.py), equal tokens at the same pace. The texts that the
clients read are checked for both.

Under load Runahead's frontend joins tokens in one write, so it also runs with a write for every token, as in vLLM.
"""

import argparse
import json
import signal
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from services.checkpoint import DEMO_MODEL
from services.frontend.text.tokenizer import Tokenizer
from tests.benchmarks.frontend_streaming import (
    WRITE_PER_TOKEN,
    StreamingCase,
    client_process,
    frontend,
    output_ids,
    round_of,
)
from tests.benchmarks.support.report import report
from tests.benchmarks.support.servers import vllm_process

PACED = Path(__file__).parent / "support" / "vllm_paced.py"
OURS, PER_TOKEN, PEER = "runahead", "runahead, a write per token", "vLLM, fake engine"


class _FakeEngine:
    """Control of the fake engine in vLLM's process, which sends the first tokens without a signal."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process

    def begin(self, case: StreamingCase) -> None:
        pass

    def go_on(self, case: StreamingCase) -> None:
        self._process.send_signal(signal.SIGUSR1)


@contextmanager
def vllm(case: StreamingCase) -> Iterator[tuple[psutil.Process, str, _FakeEngine]]:
    """Start vLLM's server for one case. Yield its process, its URL and its engine."""
    token_ids = output_ids(Tokenizer(DEMO_MODEL), case.tokens)
    paced = {"streams": case.streams, "pace": case.pace, "token_ids": token_ids}
    started = vllm_process(
        DEMO_MODEL, "--disable-uvicorn-access-log", run=(str(PACED),), variables={"RUNAHEAD_PACED": json.dumps(paced)}
    )
    with started as server:
        process = psutil.Process(server.session)
        yield process, server.url, _FakeEngine(process)


def rounds(case: StreamingCase, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Run `round_of` on each server in turn and return the metrics."""
    warm_up = StreamingCase("warm-up", case.streams, case.choices, min(32, case.tokens), case.pace)
    found: dict[str, list[dict[str, float]]] = {OURS: [], PER_TOKEN: [], PEER: []}
    with client_process() as clients, frontend("") as ours, frontend(WRITE_PER_TOKEN) as each, vllm(case) as peer:
        servers = dict(zip(found, (ours, each, peer), strict=True))
        for server in servers.values():
            round_of(warm_up, *server, clients)
        for _ in range(repeats):
            for name, server in servers.items():
                found[name].append(round_of(case, *server, clients))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    streams, tokens = arguments.streams, arguments.tokens
    cases = [
        StreamingCase("1 a connection, step 37.6 ms", streams, 1, tokens, streams / 6_800),
        StreamingCase("4 a connection, step 37.6 ms", streams, 4, tokens, streams / 6_800),
    ]
    rows: list[dict[str, object]] = []
    repeats: dict[str, list[dict[str, float]]] = {}
    over_vllm: dict[str, dict[str, float]] = {}
    for case in cases:
        if arguments.only not in case.name:
            continue
        per_core_s = {}
        for name, found in rounds(case, arguments.repeats).items():
            repeats[f"{case.name}, {name}"] = found
            median = {figure: statistics.median(one[figure] for one in found) for figure in found[0]}
            per_core_s[name] = median["per_core_s"]
            rows.append({"streams": case.name, "server": name, **median})
        over_vllm[case.name] = {name: per_core_s[name] / per_core_s[PEER] for name in (OURS, PER_TOKEN)}
    report(
        "vllm_streaming",
        title=f"{streams} streams of {tokens} tokens: cost of a frontend; vLLM's with a fake engine",
        rows=rows,
        figures={"over_vllm": over_vllm},
        settings={"streams": streams, "tokens": tokens, "repeats": arguments.repeats},
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
