"""Predictions of `runahead replay DIR --SETTING VALUE` beside reruns with these settings.

Each backend serves the same load with its base settings, recorded, and with each change, recorded too. Of some repeats
the one with the highest throughput counts. The change is predicted from the base recording alone, and compared with
what the rerun measured. The load does not wait for answers: requests arrive at random times that are drawn once, a
quarter of them with a common prefix. The chance of a draft to be accepted depends on the text; for a base without
drafts it is taken from the rerun. A figure whose range is too wide is not predicted: it has no error, and is counted.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from protocol.sampling import SamplingParams
from services.cli.what_if import predict
from services.config import ReplayConfig
from services.scheduler.recording import EventRecording
from services.scheduler.what_if import History, recorded
from tests.benchmarks.support.engine_client import BenchmarkClient, engine
from tests.benchmarks.support.random_llama import random_llama
from tests.benchmarks.support.report import add_ints, report

NUM_DRAFTS = 3
DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "adaptive": False})
COMPARED = ("throughput", "TTFT, mean", "ITL, mean")
SIDES = ("base", "predicted", "measured")
Settings = Mapping[str, object]


class LoadShape(NamedTuple):
    """Requests, and the seconds within which they arrive."""

    requests: int
    seconds: float
    prompt: int
    output: int


class Served(NamedTuple):
    directory: Path
    history: History

    @property
    def figures(self) -> dict[str, float]:
        return {figure.name: figure.value for figure in recorded(self.history).figures()}

    @property
    def acceptance(self) -> float:
        """Chance of a planned draft behind accepted ones to be accepted; one that was not found counts as rejected."""
        accepted = sum(row.accepted for row in self.history.drafted)
        tried = accepted + sum(row.accepted < NUM_DRAFTS for row in self.history.drafted)
        return accepted / tried if tried else 0.0


def send(client: BenchmarkClient, shape: LoadShape) -> None:
    rng = np.random.default_rng(0)
    times = np.sort(rng.random(shape.requests)) * shape.seconds
    common = rng.integers(300, 1000, shape.prompt)
    begun = time.monotonic()
    for number, at in enumerate(times.tolist()):
        while (left := begun + at - time.monotonic()) > 0:
            client.receive(left)
        prompt = rng.integers(300, 1000, int(rng.integers(shape.prompt // 4, shape.prompt * 2)))
        if number % 4 == 0:
            prompt[: len(common) // 2] = common[: len(common) // 2][: len(prompt)]
        output = int(rng.integers(shape.output // 4, shape.output * 2))
        params = SamplingParams(output, temperature=0.0)
        client.generate(prompt.astype(np.int32), number, output, params=params)
    while client.finished < shape.requests:
        client.receive()


def serve(directory: Path, shape: LoadShape, scheduler: Settings, worker: Settings) -> Served:
    """Serve the load once and record it."""
    directory.mkdir(mode=0o700)
    with engine({**scheduler, "record": str(directory)}, worker) as client:
        send(client, shape)
        time.sleep(0.5)  # the recording is complete
    return Served(directory, History.read(EventRecording(directory)))


def best_of(repeats: int, directory: Path, shape: LoadShape, scheduler: Settings, worker: Settings) -> Served:
    """Serve the load several times. Return the run with the highest throughput: others were disturbed."""
    directory.mkdir()
    runs = [serve(directory / str(index), shape, scheduler, worker) for index in range(repeats)]
    return max(runs, key=lambda run: run.figures["throughput"])


def rows_of(
    name: str, directory: Path, repeats: int, shape: LoadShape, scheduler: Settings, worker: Settings, changes: Settings
) -> list[dict[str, object]]:
    """Return a row for each change."""
    bases: dict[bool, Served] = {}
    rows = []
    for index, (change, values) in enumerate(changes.items()):
        assert isinstance(values, dict)
        from_drafts = values == {"speculative_config": "none"}
        before = {**scheduler, **({"speculative_config": DRAFTS} if from_drafts else {})}
        if from_drafts not in bases:
            place = directory / f"{name}-base-{from_drafts}"
            bases[from_drafts] = best_of(repeats, place, shape, before, worker)
        base = bases[from_drafts]
        after = {key: value for key, value in {**before, **values}.items() if value != "none"}
        if "num_blocks" in after:
            after["num_gpu_blocks_override"] = after.pop("num_blocks")
        rerun = best_of(repeats, directory / f"{name}-{index}", shape, after, worker)
        acceptance = rerun.acceptance if "speculative_config" in values and not from_drafts else None
        config = ReplayConfig.model_validate({**values, "draft_acceptance": acceptance})
        header = EventRecording(base.directory).header
        prediction = predict(config, header, base.history)
        predicted = {sides[0].name: sides[2] for sides in prediction.table}
        row: dict[str, object] = {"backend": name, "change": change, "factor": prediction.model.factor}
        for figure in (*COMPARED, "preemptions"):
            value, low, high = predicted[figure]
            sides = (base.figures[figure], value, rerun.figures[figure])
            row |= dict(zip((f"{figure}: {side}" for side in SIDES), sides, strict=True))
            row |= {f"{figure}: from": low, f"{figure}: to": high, f"{figure}: known": predicted[figure].is_known}
        rows.append(row)
        print(shown(row), flush=True)
    return rows


def error(row: Mapping[str, object], figure: str) -> float:
    """Return the relative error of a prediction."""
    predicted, measured = (float(str(row[f"{figure}: {side}"])) for side in SIDES[1:])
    return predicted / measured - 1


def shown(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of the printed table: base, predicted and measured value, and the error."""
    cells = {"backend": row["backend"], "change": row["change"]}
    for figure in COMPARED:
        sides = " / ".join(f"{row[f'{figure}: {side}']:,.1f}" for side in SIDES)
        known = f"{100 * error(row, figure):+.0f} %" if row[f"{figure}: known"] else "not predicted"
        cells[figure] = f"{sides} ({known})"
    cells["preemptions"] = " / ".join(f"{row[f'preemptions: {side}']:.0f}" for side in SIDES)
    return cells


def figures_of(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """Return the largest error of what was predicted, and the share that was."""
    figures = {}
    for figure in COMPARED:
        errors = [abs(error(row, figure)) for row in rows if row[f"{figure}: known"]]
        if errors:
            figures[f"largest error of {figure}"] = max(errors)
        figures[f"predicted share of {figure}"] = len(errors) / len(rows)
    return figures


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="+", default=["sim", "m4", "m155"])
    parser.add_argument("--changes", nargs="+", default=["depth", "budget", "blocks", "drafts on", "drafts off"])
    add_ints(parser, repeats=3, threads=1)
    parser.add_argument("--scale", type=float, default=1.0, help="size of the load")
    args = parser.parse_args()
    n = args.scale
    sim = {"backend": "sim", "sim_vocab_size": 4096, "sim_step_ms": 5.0, "sim_decode_us": 50.0}
    sim |= {"sim_prefill_token_us": 20.0, "kv_cache_memory_bytes": 64 << 20}
    cases: dict[str, tuple[LoadShape, dict[str, object]]] = {"sim": (LoadShape(int(160 * n), 4.0 * n, 192, 64), sim)}
    for model, count in (("m4", 240), ("m155", 32)):
        native = {"backend": "native", "model": str(random_llama(model)), "threads": args.threads}
        cases[model] = (LoadShape(int(count * n), 4.0 * n, 192, 64), native | {"kv_cache_memory_bytes": 1 << 30})
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for name in args.backends:
            shape, worker = cases[name]
            model = {} if name == "sim" else {"model": worker["model"]}
            scheduler = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_model_len": 1024, **model}
            scheduler |= {"num_gpu_blocks_override": 1024}
            changes = {
                "depth": {"batch_queue_depth": 1},
                "budget": {"max_num_batched_tokens": 128},
                "blocks": {"num_blocks": 240},
                "drafts on": {"speculative_config": DRAFTS},
                "drafts off": {"speculative_config": "none"},
            }
            chosen = {change: values for change, values in changes.items() if change in args.changes}
            rows += rows_of(name, Path(directory), args.repeats, shape, scheduler, worker, chosen)
    report(
        "what_if",
        title="base / predicted / measured; tokens/s and ms",
        rows=[shown(row) for row in rows],
        figures=figures_of(rows),
        settings=vars(args),
        repeats=rows,
    )
