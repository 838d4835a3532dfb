"""The parts of the measurement on a GPU. Each returns what its JSON file contains."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise, product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import profiler

from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput
from services.checkpoint import DEMO_MODEL
from services.config import WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.sampling.noise import gumbel
from services.worker.sampling.reference import GREEDY_BELOW
from tests.benchmarks.gpu.engine import StageEngine
from tests.benchmarks.gpu.served import served
from tests.benchmarks.gpu.shapes import SHAPES, head_parameters, kv_bytes_per_token, product_parameters
from tests.benchmarks.gpu.target import MeasuredDevice
from tests.benchmarks.gpu.waits import counted_waits
from tests.benchmarks.support.planned_batch import Params, greedy

Result = dict[str, Any]


def machine(target: MeasuredDevice) -> Result:
    """Bandwidth of a copy, bytes read and written, and the rate of a matrix product in bfloat16."""
    device = target.make(target.dtype).device
    with torch.inference_mode(), device.working():
        source = torch.empty(target.copied, dtype=torch.uint8, device=device.where)
        copy = torch.empty_like(source)
        copied = target.seconds(device, lambda: copy.copy_(source), 10)
        size = target.matrix
        a, b = (torch.randn(size, size, device=device.where).to(target.dtype) for _ in range(2))
        c = torch.empty_like(a)
        multiplied = target.seconds(device, lambda: torch.mm(a, b, out=c), 20)
    return {
        "bytes_per_second": 2 * target.copied / copied,
        "operations_per_second": 2 * size**3 / multiplied,
        **target.properties,
    }


def device(target: MeasuredDevice) -> Result:
    """Tests of copies, order and times."""
    return tested("device")


def kernels(target: MeasuredDevice) -> Result:
    """Tests of the kernels, in float32 and bfloat16 against the reference. They are compiled first, and kept."""
    return tested("kernels")


def runner(target: MeasuredDevice) -> Result:
    """Tests of the whole runner, with graphs and eagerly."""
    return tested("runner")


def tested(*names: str) -> Result:
    """Run files of tests/gpu with pytest."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/benchmarks/gpu/pytest.ini", "--rootdir", "."]
    command += ["-p", "no:cacheprovider", "-rs", "-v", "--durations=10"]
    command += [f"tests/gpu/test_{name}.py" for name in names]
    if find_spec("xdist"):  # compilation of the kernels takes most of the time
        command += ["-p", "xdist.plugin", "-n", str(min(8, os.cpu_count() or 1))]
    output: list[str] = []
    # Plugins of other packages on the machine are not loaded: nothing here needs one.
    variables = os.environ | {"TRITON_INTERPRET": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:  # a part that is killed has printed what it did
            print(line, end="", flush=True)
            output.append(line)
    return {"passed": tests.returncode == 0, "output": "".join(output)[-6000:]}


def tokens(target: MeasuredDevice) -> Result:
    """Tokens of the demo model in float32, against the reference kernels on the processor.

    `logprob_gap` is the largest difference between log-probabilities of equal tokens. Where tokens first differ,
    `divergence` is the processor's preference for its own token (`preference`): small if the two were almost equal.
    """
    found = []
    for settings, make in ((ON_PROCESSOR, NativeRunner), (target.settings, target.runner)):
        config = WorkerConfig(model=str(DEMO_MODEL), dtype="float32", **settings)
        found.append(answers(make(config), {name: (PROMPT, params) for name, params in WANTED.items()}))
    rows = []
    for name in WANTED:
        (ours, our_scores), (theirs, their_scores) = found[0][name], found[1][name]
        same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        gaps = [abs(a - b) for a, b in zip(our_scores[:same], their_scores[:same], strict=True)]
        differs = same < len(ours)
        divergence = preference(WANTED[name], ours[: same + 1], theirs[same]) if differs else 0.0
        rows.append(
            {
                "request": name,
                "equal_tokens": same,
                "of": len(ours),
                "logprob_gap": max(gaps, default=0.0),
                "divergence": divergence,
            }
        )
    within = all(row["logprob_gap"] < TOLERANCE and abs(row["divergence"]) < TOLERANCE for row in rows)
    return {"rows": rows, "within": within, "tolerance": TOLERANCE}


TOLERANCE = 1e-4
"""Largest gap of log-probabilities between devices, in float32."""
ON_PROCESSOR: Mapping[str, Any] = {"kernels": "reference", "device": "cpu"}


def preference(params: SamplingParams, tokens: list[int], other: int) -> float:
    """Return by how much the processor prefers the last of its `tokens` after PROMPT to another one: the difference of
    their log-probabilities as the sampler compares them, with its rules, temperature and noise. NaN, if it does not
    compute these tokens again."""
    from tests.integration.native.driver import RunnerDriver

    config = WorkerConfig(model=str(DEMO_MODEL), dtype="float32", **ON_PROCESSOR)
    driver = RunnerDriver(DEMO_MODEL, runner=NativeRunner(config), keeps_logits=False)
    request = driver.add(PROMPT, params)
    driver.generate([request], len(tokens), chunk=16)
    logits, columns = driver.epoch.logits, driver.epoch.columns
    driver.runner.shutdown()
    assert logits is not None, "one rank samples"
    if request.output != tokens:
        return float("nan")
    both = np.array([tokens[-1], other])
    scores = logits[-1].numpy()[both].astype(np.float64)
    slot = [request.slot]
    if (temperature := float(columns.temperature[slot[0]])) >= GREEDY_BELOW:
        position = np.array([len(PROMPT) + len(tokens) - 1], np.int32)
        scores = scores / temperature + gumbel(columns.seed[slot], position, both)[0]
    return float(scores[0] - scores[1])


WANTED = {
    "greedy": SamplingParams(max_tokens=1000, temperature=0.0, logprobs=0),
    "sampled": SamplingParams(max_tokens=1000, temperature=0.9, seed=3, top_k=40, top_p=0.9, logprobs=0),
    "penalised": SamplingParams(
        max_tokens=1000, temperature=0.7, seed=4, min_p=0.02, presence_penalty=0.5, repetition_penalty=1.2, logprobs=0
    ),
    "biased": SamplingParams(max_tokens=1000, temperature=0.0, logit_bias=((17, 3.0),), logprobs=0),
}


PROMPT = list(range(20, 61))
PLAIN = [PROMPT[start:] for start in (0, 9, 20, 31)]
"""Prompts of greedy requests."""


def answers(
    runner: NativeRunner, wanted: Mapping[str, tuple[list[int], SamplingParams]]
) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of all requests, served together at depth two."""
    from tests.integration.native.driver import RunnerDriver

    driver = RunnerDriver(DEMO_MODEL, runner=runner, keeps_logits=False)
    requests = {name: driver.add(prompt, params) for name, (prompt, params) in wanted.items()}
    driver.generate(list(requests.values()), 48, chunk=16, depth=2)
    runner.shutdown()
    return {
        name: (each.output[:48], [each.scores[at].values[0] for at in sorted(each.scores)][:48])
        for name, each in requests.items()
    }


def transformers(target: MeasuredDevice) -> Result:
    """Greedy tokens of the demo model against transformers on the same device, up to the first divergence.

    transformers computes the runner's own tokens in one pass. Where it prefers another token, the gap is the difference
    of the two tokens' log-probabilities: how undecided it is.
    """
    runner = target.runner(WorkerConfig(model=str(DEMO_MODEL), dtype=_name(target), **target.settings))
    wanted = {str(number): (prompt, WANTED["greedy"]) for number, prompt in enumerate(PLAIN)}
    where = target.make(target.dtype).device.where
    rows = []
    for name, (tokens, _) in answers(runner, wanted).items():
        prompt = wanted[name][0]
        scores = _transformers_scores([*prompt, *tokens], target.dtype, where)[len(prompt) - 1 :]
        best = scores.argmax(1).tolist()
        same = next((i for i, (a, b) in enumerate(zip(tokens, best, strict=False)) if a != b), len(tokens))
        gap = float(scores[same, best[same]] - scores[same, tokens[same]]) if same < len(tokens) else 0.0
        rows.append({"request": name, "equal_tokens": same, "of": len(tokens), "logprob_gap": gap})
    return {"dtype": _name(target), "rows": rows, "logprob_gap": max(row["logprob_gap"] for row in rows)}


def _name(target: MeasuredDevice) -> str:
    return str(target.dtype).removeprefix("torch.")


def _transformers_scores(tokens: list[int], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    """Return float32[tokens, vocab] log-probabilities of the token after each one, on the host."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=dtype).to(where).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=where)).logits[0]
    return logits.float().log_softmax(1).cpu()


def gap(target: MeasuredDevice) -> Result:
    """Time between the forward passes of decode steps, at depth one and two, in each batch."""
    rows: list[Result] = []
    for kind, params in (("greedy", greedy), ("sampled", _sampled)):
        for name, batch in product(target.shapes, target.batches):
            case = {"model": name, "batch": batch, "sampling": kind}
            rows += [case | row for row in _gaps(target, name, batch, params)]
    return {"rows": rows}


def _sampled(slot: int) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, temperature=0.8, top_k=50, top_p=0.95, seed=slot)


def _gaps(target: MeasuredDevice, name: str, batch: int, params: Params) -> list[Result]:
    context = target.prompt + target.warm + target.steps + 1
    budget = max(target.prompt * min(batch, 64), batch)
    rows: list[Result] = []
    shape, kernels = SHAPES[name], target.make(target.dtype)
    with StageEngine(shape, kernels, target.dtype, batch, context, budget) as engine:
        for depth in (1, 2):
            engine.prefill_random(target.prompt, params)
            engine.decode(target.warm, depth)
            rows.append({"depth": depth, **step_times(engine.decode(target.steps, depth))})
    rows[-1]["speedup"] = rows[0]["step"] / rows[1]["step"] if rows[1]["step"] else None
    return rows


def step_times(results: list[ModelRunnerOutput]) -> Result:
    """Medians over decode steps, in seconds: the step, its forward pass, and the pauses around it.

    Returns:
        gap: from the end of a forward pass to the next, with the sampling between them
        idle: from the end of sampling to the next forward pass
    """
    times = [result.times for result in results]
    pairs = list(pairwise(times))
    step = median(b.forward_began - a.forward_began for a, b in pairs)
    between = median(b.forward_began - a.forward_ended for a, b in pairs)
    idle = median(max(0.0, b.forward_began - a.sampled) for a, b in pairs)
    return {
        "step": step,
        "forward": median(each.forward_ended - each.forward_began for each in times),
        "gap": between,
        "idle": idle,
        "gap_share": between / step if step else None,
        "idle_share": idle / step if step else None,
    }


def floor(target: MeasuredDevice) -> Result:
    """Decode of one request against the time that reading weights and KV cache takes at the measured bandwidth."""
    bandwidth, rows = machine(target)["bytes_per_second"], []
    for name in target.shapes:
        shape = SHAPES[name]
        context = target.prompt + target.warm + target.steps + 1
        with StageEngine(shape, target.make(target.dtype), target.dtype, 1, context, target.prompt) as engine:
            engine.prefill_random(target.prompt)
            engine.decode(target.warm, 2)
            times = step_times(engine.decode(target.steps, 2))
        item = target.dtype.itemsize
        read = (product_parameters(shape) + head_parameters(shape)) * item
        read += kv_bytes_per_token(shape, item) * (target.prompt + target.warm + target.steps // 2)
        least = read / bandwidth
        rows.append({"model": name, "bytes": read, "least": least, **times, "share": least / times["step"]})
    return {"bytes_per_second": bandwidth, "rows": rows}


def prefill(target: MeasuredDevice) -> Result:
    """One prompt in one step, against the measured rate of a matrix product."""
    rate, rows, length = machine(target)["operations_per_second"], [], target.prefill
    for name in target.shapes:
        shape = SHAPES[name]
        with StageEngine(shape, target.make(target.dtype), target.dtype, 4, length + 8, length) as engine:
            results = engine.prefill_random(length)[1:]  # the first one compiles
        seconds = min(each.times.forward_ended - each.times.forward_began for each in results)
        attended = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length**2  # causal: half of 4
        operations = 2 * product_parameters(shape) * length + attended + 2 * head_parameters(shape)
        share = operations / seconds / rate
        rows.append({"model": name, "tokens": length, "seconds": seconds, "operations": operations, "share": share})
    return {"operations_per_second": rate, "rows": rows}


def profile(target: MeasuredDevice) -> Result:
    """The kernels that take the longest, of ten decode steps at depth two and of one step with a whole prompt."""
    rows = []
    for name in target.shapes:
        shape, length = SHAPES[name], target.prefill
        for batch in target.batches[:2]:
            context, budget = target.prompt + target.warm + PROFILED + 1, target.prompt * min(batch, 64)
            with StageEngine(shape, target.make(target.dtype), target.dtype, batch, context, budget) as engine:
                engine.prefill_random(target.prompt)
                engine.decode(target.warm, 2)
                longest = _longest(lambda: engine.decode(PROFILED, 2))
            rows.append({"model": name, "batch": batch, "steps": PROFILED, "kernels": longest})
        with StageEngine(shape, target.make(target.dtype), target.dtype, 1, length + 8, length) as engine:
            engine.prefill_random(length)  # compiles
            rows.append({"model": name, "prefill": length, "kernels": _longest(lambda: engine.prefill_random(length))})  # noqa: B023
    return {"rows": rows}


PROFILED = 10
"""Decode steps whose kernels are listed."""


def _longest(work: Callable[[], object]) -> list[Result]:
    """Return the fifteen kernels with the most time, in microseconds; without a GPU, the operations."""
    activity = profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
    with profiler.profile(activities=[activity.CUDA if on_gpu else activity.CPU]) as measured:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    times = [
        {
            "name": each.key[:100],
            "times": each.count,
            "us": each.self_device_time_total if on_gpu else each.self_cpu_time_total,
        }
        for each in measured.key_averages()
    ]
    return sorted(times, key=lambda each: -float(each["us"]))[:15]


def syncs(target: MeasuredDevice) -> Result:
    """Number of times that the compute thread waits for the device, in decode steps with and without drafts."""
    rows = []
    for params, kind, drafts in (
        (greedy, "greedy", 0),
        (_sampled, "sampled", 0),
        (_penalised, "penalised, log-probabilities", 0),
        (greedy, "greedy", 3),
    ):
        context = target.prompt + (target.warm + COUNTED + 8) * (1 + drafts)
        kernels = target.make(target.dtype)
        shape, budget = SHAPES[target.shapes[0]], 2 * target.prompt
        with StageEngine(shape, kernels, target.dtype, 2, context, budget, drafts) as engine:
            engine.prefill_random(target.prompt, params)
            engine.decode(target.warm, 2)
            with counted_waits(target.event) as waits:
                results = engine.decode(COUNTED, 2)
        rows.append(
            {
                "sampling": kind,
                "drafts": drafts,
                "drafted": sum(int(np.frombuffer(each.drafted, np.int32).sum()) for each in results),
                "steps": COUNTED,
                "synchronisations": waits.operations,
                "event_waits": waits.events,
            }
        )
    return {"rows": rows}


COUNTED = 32
"""Decode steps whose waits are counted."""


def _penalised(slot: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=1 << 20, temperature=0.8, seed=slot, frequency_penalty=0.3, logit_bias=((5, 1.0),), logprobs=2
    )


@dataclass(frozen=True)
class MeasuredPart:
    seconds: float
    """Estimate from an H100 with 16 cores, with the compilation of its kernels."""
    measure: Callable[[MeasuredDevice], Result]


PARTS = {
    "machine": MeasuredPart(10, machine),
    "device": MeasuredPart(30, device),
    "kernels": MeasuredPart(60, kernels),
    "runner": MeasuredPart(60, runner),
    "syncs": MeasuredPart(15, syncs),
    "tokens": MeasuredPart(15, tokens),
    "gap": MeasuredPart(60, gap),
    "floor": MeasuredPart(15, floor),
    "prefill": MeasuredPart(15, prefill),
    "profile": MeasuredPart(20, profile),
    "served": MeasuredPart(90, served),
    "transformers": MeasuredPart(45, transformers),
}
"""In the order of their value, in which they are run: whether it works, then its figures."""
IN_CI = tuple(part for part in PARTS if part not in ("device", "kernels", "runner"))
"""Parts that run on the simulated device too."""
