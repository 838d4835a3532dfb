"""The measurements on a GPU run on a tiny SIMULATED device, so that their code does not rot."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import warnings
import weakref
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.checkpoint import DEMO_MODEL
from services.cli.bench.load import LoadResult, SentRequest
from services.config import WorkerConfig
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.weights import open_checkpoint
from tests.benchmarks.gpu import parts
from tests.benchmarks.gpu.__main__ import LIMIT, main
from tests.benchmarks.gpu.engine import StageEngine
from tests.benchmarks.gpu.parts import IN_CI, ON_PROCESSOR, PARTS, PROMPT, WANTED, MeasuredPart, answers, preference
from tests.benchmarks.gpu.processes import kill_tree, run_within
from tests.benchmarks.gpu.served import rates, write_checkpoint
from tests.benchmarks.gpu.shapes import SHAPES, TINY
from tests.benchmarks.gpu.target import tiny
from tests.benchmarks.gpu.waits import counted_waits
from tests.unit.native.lazy_device import LazyEvent, LazyStream

TESTS = ["device", "kernels", "runner"]
"""Parts that run tests of tests/gpu."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PROFILED", 1)  # torch's profiler takes long for each operation
        assert main(["--tiny", "--out", str(directory)]) == 0
    return {file.stem: json.loads(file.read_text()) for file in directory.iterdir()}


def test_every_part_writes_a_file_that_says_what_it_measured_on(results: dict[str, Any]) -> None:
    assert list(PARTS) == [*IN_CI[:1], *TESTS, *IN_CI[1:]]
    assert sorted(results) == sorted(IN_CI)
    assert {result["device"] for result in results.values()} == {"SIMULATED"}


def test_all_parts_fit_in_half_an_hour() -> None:
    assert sum(part.seconds for part in PARTS.values()) <= 1700
    assert all(part.seconds < LIMIT for part in PARTS.values())


def test_parts_that_do_not_fit_into_the_budget_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernels.json").write_text("{}")
    assert main(["kernels", "tokens", "--budget", "1", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "kernels.json exists" in told
    assert "tokens: left out" in told
    assert "failed or left out: tokens\n" in told


def test_a_part_that_fails_leaves_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["machine", "--out", str(tmp_path)]) == 1
    assert "torch finds no GPU" in capsys.readouterr().out
    assert "torch finds no GPU" in (tmp_path / "machine.log").read_text()


def test_a_process_that_takes_too_long_is_killed_and_its_output_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-uc", "import time; print('begun'); time.sleep(1000)"]
    log = tmp_path / "log"
    limit = 1.0
    while run_within(command, limit, log) is None and "begun" not in log.read_text():
        limit *= 2  # a busy machine
    assert "begun" in log.read_text()


def test_nothing_that_a_process_has_started_survives_it() -> None:
    """Not a grandchild either, in a session of its own."""
    sleeps = "import subprocess, sys; p = subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    inner = f"{sleeps}; print(p.pid, flush=True); p.wait()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True) as process:
        sleeper = Path("/proc") / process.stdout.readline().strip()
        assert sleeper.is_dir()
        kill_tree(process.pid)
        process.stdout.read()  # ends when all writers have
    while sleeper.is_dir() and ") Z " not in (sleeper / "stat").read_text():
        pass


def test_http_and_bare_stages_are_compared_in_both_rates(results: dict[str, Any]) -> None:
    served = results["served"]
    for name in ("decode", "whole"):
        assert served[f"{name}_ratio"] == pytest.approx(served["http"][name] / served["bare"][name])
        assert served[f"{name}_ratio"] > 0


def test_rates_of_a_wave() -> None:
    """The decode phase of a request begins with its first token."""
    first = SentRequest([1], started=0.0, ended=3.0, arrivals=[1.0, 3.0], output_tokens=5)
    second = SentRequest([1], started=0.0, ended=4.0, arrivals=[2.0, 4.0], output_tokens=5)
    assert rates(LoadResult("m", [first, second], 4.0, 2)) == {"decode": 4.0, "whole": 2.5}
    second.error = "HTTP 500"
    with pytest.raises(RuntimeError, match="1 of 2 requests failed: HTTP 500"):
        rates(LoadResult("m", [first, second], 4.0, 2))


def test_a_part_whose_tests_fail_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = MeasuredPart(1.0, lambda _: {"passed": False, "output": "1 failed"})
    monkeypatch.setitem(PARTS, "kernels", failed)
    assert main(["kernels", "--tiny", "--out", str(tmp_path)]) == 1
    assert json.loads((tmp_path / "kernels.json").read_text())["output"] == "1 failed"


def test_tokens_of_the_device_equal_those_of_the_processor(results: dict[str, Any]) -> None:
    assert results["tokens"]["within"]
    rows = results["tokens"]["rows"]
    assert [(row["equal_tokens"], row["of"], row["divergence"]) for row in rows] == [(48, 48, 0.0)] * 4
    assert all(row["logprob_gap"] < 1e-4 for row in rows)


def test_the_gap_where_tokens_differ_is_that_of_what_the_sampler_compares() -> None:
    """Without filters, the sampled token is the one with the highest score."""
    wanted = {name: msgspec.structs.replace(each, top_k=0, top_p=1.0, min_p=0.0) for name, each in WANTED.items()}
    runner = NativeRunner(WorkerConfig(model=str(DEMO_MODEL), dtype="float32", **ON_PROCESSOR))
    found = answers(runner, {name: (PROMPT, params) for name, params in wanted.items()})
    for name, (tokens, _) in found.items():
        gaps = [preference(wanted[name], tokens[:6], other) for other in (tokens[5], 300, 301)]
        assert gaps[0] == 0.0, name
        assert min(gaps[1:]) > 0.0, name
    assert math.isnan(preference(wanted["greedy"], [tokens[0] + 1, tokens[1]], 300))


def test_the_first_divergence_from_transformers_is_stated(results: dict[str, Any]) -> None:
    """In float32 there is none."""
    rows = results["transformers"]["rows"]
    assert [(row["equal_tokens"], row["of"], row["logprob_gap"]) for row in rows] == [(48, 48, 0.0)] * 4
    assert results["transformers"]["dtype"] == "float32"


def test_gaps_are_stated_for_each_batch_and_depth(results: dict[str, Any]) -> None:
    rows = results["gap"]["rows"]
    assert {(row["batch"], row["depth"], row["sampling"]) for row in rows} == {
        (batch, depth, kind) for batch in (1, 3) for depth in (1, 2) for kind in ("greedy", "sampled")
    }
    assert all(row["step"] > 0 and row["forward"] > 0 and row["gap"] >= row["idle"] >= 0 for row in rows)


def test_an_engine_frees_its_model_for_the_next_one() -> None:
    target = tiny()
    with StageEngine(SHAPES[TINY], target.make(target.dtype), target.dtype, 2, 40, 16) as engine:
        engine.prefill_random(8)
        engine.decode(3, 2)
        model = weakref.ref(engine.model)
    assert model() is None


def test_waits_are_counted_with_and_without_drafts(results: dict[str, Any]) -> None:
    """With drafts a step waits for the number of accepted ones and for the next ones."""
    rows = results["syncs"]["rows"]
    assert [row["drafts"] for row in rows] == [0, 0, 0, 3]
    assert [row["event_waits"] for row in rows] == [0, 0, 0, 2 * rows[-1]["steps"]]
    assert [row["synchronisations"] for row in rows] == [0] * 4
    assert rows[-1]["drafted"] > 0


def test_every_synchronisation_is_counted_and_the_note_on_the_mode_is_not() -> None:
    with counted_waits(LazyEvent) as waits:
        for _ in range(3):
            warnings.warn(
                "called a synchronizing CUDA operation (Triggered internally at "
                "/pytorch/c10/cuda/CUDAFunctions.cpp:304.)",
                stacklevel=1,
            )
        warnings.warn(
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
            stacklevel=1,
        )
    assert (waits.operations, waits.events) == (3, 0)


def test_only_events_that_have_not_passed_are_counted_on_the_compute_thread() -> None:
    stream = LazyStream(threading.RLock(), eager=False)
    first, second, third = (stream.put(lambda: None) for _ in range(3))

    def compute() -> None:
        second.synchronize()
        first.synchronize()

    thread = threading.Thread(target=compute, name="compute")
    with counted_waits(LazyEvent) as waits:
        thread.start()
        thread.join()
        third.synchronize()
    assert waits.events == 1


@pytest.mark.parametrize(
    "names", [TESTS, pytest.param(TESTS[:1], marks=pytest.mark.soak)], ids=["without xdist", "with xdist"]
)
def test_the_tests_for_a_gpu_are_collected_by_a_pytest_without_plugins(
    monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Here each is skipped with its reason."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    if names == TESTS:
        monkeypatch.setattr(parts, "find_spec", lambda _: None)
    result = parts.tested(*names)
    assert result["passed"], result["output"]
    assert "torch" in result["output"]
    assert re.search(r"\b\d{1,3} skipped", result["output"])


def test_a_random_checkpoint_can_be_served(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHAPES[TINY], torch.bfloat16)
    config = ModelConfig.from_checkpoint(tmp_path)
    assert (config.num_layers, config.vocab_size) == (2, 64)
    embedding = open_checkpoint(tmp_path).take("model.embed_tokens.weight", (64, 32), torch.float32)
    assert 0 < embedding.abs().max() < 1


def test_packages_that_travel_have_the_versions_of_the_project() -> None:
    def pinned(file: str) -> set[str]:
        lines = Path(file).read_text().splitlines()
        return {line for line in lines if line and not line.startswith("#")}

    packages = pinned("tests/benchmarks/gpu/packages.txt")
    assert packages <= pinned("deploy/constraints.txt")
    assert len(packages) > 5


def test_every_package_of_the_measurement_travels_or_is_on_a_gpu_machine() -> None:
    """A GPU machine has torch, transformers and pytest with what they require, no network, and a version of NumPy that
    numba may refuse."""
    present = _required({"torch", "triton", "transformers", "numpy", "safetensors", "pytest"})
    lines = Path("tests/benchmarks/gpu/packages.txt").read_text().splitlines()
    travel = {canonicalize_name(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    modules = (
        "tests.benchmarks.gpu.__main__", "tests.benchmarks.support.random_llama", "services.cli.serve",
        "services.cli.bench.load", "services.frontend.service", "services.scheduler.service",
        "services.worker.device.cuda", "services.worker.service", "tests.integration.native.driver",
    )  # fmt: skip
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    owners = metadata.packages_distributions()
    used = {canonicalize_name(owner) for name in result.stdout.split() for owner in owners.get(name, ())}
    assert used - present - travel <= {"runahead-engine", "setuptools"}


def _required(names: set[str]) -> set[str]:
    """Return installed distributions and all that they require."""
    found: set[str] = set()
    waiting = {canonicalize_name(name) for name in names}
    while waiting:
        found.add(name := waiting.pop())
        with suppress(metadata.PackageNotFoundError):
            wanted = [Requirement(text) for text in metadata.requires(name) or ()]
            here = (each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""}))
            waiting |= {canonicalize_name(each.name) for each in here} - found
    return found
