"""Encryption between services: seconds and CPU time of a step's messages over tcp, without keys and with CURVE."""

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

from protocol.membership import LoadFailed
from protocol.security import LOCAL, Security
from protocol.transport import Client, Server
from services.cli.transport_keys import make_keys
from tests.benchmarks.support.report import add_ints, report

RESULT_BYTES = 1024


def main(parser: argparse.ArgumentParser) -> None:
    add_ints(parser, steps=1000, repeats=5)
    parser.add_argument("--plan-bytes", type=int, nargs="*", default=[1024, 8192, 65536])
    args = parser.parse_args()
    rows: list[dict[str, float | str]] = []
    repeats: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        make_keys(Path(name) / "keys")
        secured = Security(Path(name) / "keys" / "scheduler"), Security(Path(name) / "keys" / "worker")
        for size in args.plan_bytes:
            found: dict[str, list[tuple[float, float]]] = {"tcp": [], "CURVE": []}
            for _ in range(args.repeats):  # alternating, so that both meet the same disturbances
                found["tcp"].append(_round_trips(LOCAL, LOCAL, size, args.steps))
                found["CURVE"].append(_round_trips(*secured, size, args.steps))
            repeats |= {f"{kind} {size}": runs for kind, runs in found.items()}
            for kind, runs in found.items():
                rows.append(
                    {
                        "": f"{kind}, plan of {size} bytes",
                        "round trip us": 1e6 * min(wall for wall, _ in runs),
                        "CPU us": 1e6 * min(cpu for _, cpu in runs),
                        "median CPU us": 1e6 * statistics.median(cpu for _, cpu in runs),
                    }
                )
    report(
        "encryption",
        title=f"a plan and a result of {RESULT_BYTES} bytes, per step; CPU of both sides and of libzmq's threads",
        rows=rows,
        figures={str(row[""]): row["CPU us"] for row in rows},
        settings=vars(args),
        repeats=repeats,
    )


def _round_trips(server_side: Security, client_side: Security, size: int, steps: int) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one step."""
    server = Server("tcp://127.0.0.1:0", {"worker"}, server_side)
    worker = threading.Thread(target=_answer, args=(server.endpoint, client_side, steps + 1))
    worker.start()
    plan, peer = LoadFailed("x" * min(size, 65536)), b""
    while not peer:
        server.socket.poll()
        if (received := server.receive()) is not None:
            peer = received[0]
    server.send(peer, plan)
    _wait(server)
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        server.send(peer, plan)
        _wait(server)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    worker.join()
    server.close()
    return seconds / steps, cpu / steps


def _wait(server: Server) -> None:
    while server.receive() is None:
        server.socket.poll()


def _answer(endpoint: str, security: Security, count: int) -> None:
    client, result = Client(endpoint, security), LoadFailed("y" * RESULT_BYTES)
    client.handshake("worker", "", 30)
    for _ in range(count):
        client.receive()
        client.send(result)
    client.close()
