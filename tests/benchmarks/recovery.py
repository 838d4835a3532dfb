"""Time until a lost rank is detected, and until clients get their next token.

Scheduler, ranks and a registered spare are processes. A rank is killed (SIGKILL) while 32 streams run. Times are
measured at a client of the scheduler: detection ends with the state "recovering", the pause with the next token.
"""

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from protocol.requests import EnginePhase
from protocol.sampling import SamplingParams
from tests.benchmarks.support.report import report
from tests.integration.scheduler.engine import FrontendConnection, engine

STREAMS, TOKENS = range(32), 64
LAYOUTS = {"1 rank": (1, 1), "TP=2": (2, 1), "PP=2": (1, 2)}


def kills(tp: int, pp: int, count: int, worker: dict[str, object]) -> list[dict[str, float]]:
    """Return the times of each kill."""
    scheduler = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "max_model_len": 256}
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="runahead-bench-") as directory,
        engine(Path(directory), scheduler | {"log_level": "warning"}, worker, tp * pp) as running,
    ):
        client = FrontendConnection(running.client_endpoint)
        client.wait_ready()
        for kill in range(count):
            running.add_worker()
            while client.state is None or client.state.stats.get("num_workers") != tp * pp + 1:
                client.receive()
            client.tokens.clear()
            client.finished.clear()
            rng = random.Random(kill)
            for number in STREAMS:
                prompt = [rng.randrange(300, 1000) for _ in range(32)]
                client.generate(number, prompt, SamplingParams(max_tokens=TOKENS, temperature=0.0))
            while sum(map(len, client.tokens.values())) < len(STREAMS) * TOKENS // 2:
                client.receive()
            victim = running.workers.pop(kill % (tp * pp))
            killed = time.monotonic()
            victim.kill()
            while client.state.phase is not EnginePhase.RECOVERING:
                client.receive()
            detected, received = time.monotonic(), sum(map(len, client.tokens.values()))
            while sum(map(len, client.tokens.values())) == received:
                client.receive()
            found.append({"detection_s": detected - killed, "pause_s": time.monotonic() - killed})
            victim.communicate()
            client.wait_finished(*STREAMS)
        client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--backend", choices=("native", "sim"), default="native")
    args = parser.parse_args()
    worker: dict[str, object] = {"backend": args.backend, "kv_cache_memory_bytes": 64 << 20}
    if args.backend == "native":
        worker["threads"] = 1
    rows, repeats = [], {}
    for name, (tp, pp) in LAYOUTS.items():
        repeats[name] = kills(tp, pp, args.kills, worker | {"log_level": "error"})
        row: dict[str, object] = {"layout": name}
        for figure in ("detection_s", "pause_s"):
            values = [kill[figure] for kill in repeats[name]]
            row |= {f"{figure} median": statistics.median(values), f"{figure} worst": max(values)}
        rows.append(row)
    worst = {f"worst_{f}": max(k[f] for r in repeats.values() for k in r) for f in ("detection_s", "pause_s")}
    settings = {"streams": len(STREAMS), "backend": args.backend, "model": "demo", "kills": args.kills}
    report("recovery", f"A rank is killed under {len(STREAMS)} streams", rows, worst, settings, repeats)


if __name__ == "__main__":
    main()
