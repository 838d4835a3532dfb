"""The runner's own rules: what it reports, what it refuses, and what a slot keeps."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.membership import Assignment, InitializeCache
from protocol.sampling import SamplingParams
from services.config import WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.batch.slots import EMPTY, PlanError
from services.worker.kernels import selection
from services.worker.kernels.cpu.compiled import product
from services.worker.runner import LoadError
from tests.integration.native.conftest import Family
from tests.integration.native.driver import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, RunnerDriver, ints

PROMPT = list(range(20, 49))


@pytest.fixture
def driver(llama: Family) -> RunnerDriver:
    return RunnerDriver(llama.path)


def test_loaded_tells_what_the_checkpoint_is(llama: Family) -> None:
    driver, seen = RunnerDriver(llama.path, max_model_len=100), []
    assert (driver.loaded.vocab_size, driver.loaded.max_model_len) == (llama.vocab_size, 100)
    assert driver.loaded.num_blocks == NUM_SLOTS * 100 // BLOCK_SIZE
    assert RunnerDriver(llama.path).loaded.max_model_len == 256
    NativeRunner(WorkerConfig(model=str(llama.path))).load(
        driver.assignment, lambda phase, fraction: seen.append(fraction)
    )
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_weights_stay_for_the_next_epoch(driver: RunnerDriver) -> None:
    request = driver.add(PROMPT)
    driver.generate([request], 5)
    seen: list[float] = []
    driver.runner.leave()
    with pytest.raises(RuntimeError, match="load must be called first in each epoch"):
        driver.runner.init_kv_cache(InitializeCache(8, 256))
    driver.runner.load(driver.assignment, lambda phase, fraction: seen.append(fraction))
    assert seen == []
    driver.runner.init_kv_cache(InitializeCache(NUM_BLOCKS, driver.max_model_len))
    again = driver.add(PROMPT)
    driver.generate([again], 5)
    assert again.output == request.output


def test_files_that_changed_since_registration_are_refused(llama: Family, tmp_path: Path) -> None:
    shutil.copytree(llama.path, tmp_path / "model")
    runner = NativeRunner(WorkerConfig(model=str(tmp_path / "model"), threads=1))
    runner.identify()
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(LoadError, match="have changed; start this worker again"):
        runner.load(Assignment(1, 0, 1, BLOCK_SIZE, NUM_SLOTS, 64), lambda phase, fraction: None)


def test_cache_size_follows_the_bytes_given(llama: Family) -> None:
    loaded = RunnerDriver(llama.path, kv_cache_memory_bytes=1_000_000).loaded
    assert loaded.num_blocks == 1_000_000 // loaded.bytes_per_block
    half = RunnerDriver(llama.path, dtype="bfloat16", kv_cache_memory_bytes=1_000_000).loaded
    assert half.bytes_per_block * 2 == loaded.bytes_per_block


def test_rotations_do_not_depend_on_the_context_that_fits_into_memory(
    make_family: Callable[[str], Family], tmp_path: Path
) -> None:
    """Blocks that are kept, on disk or at another engine may have been computed under another one (longrope)."""
    shutil.copytree(make_family("phi3-longrope-partial").path, tmp_path / "model")
    config, original = tmp_path / "model" / "config.json", '"original_max_position_embeddings": '
    config.write_text(config.read_text().replace(f"{original}256", f"{original}64"))
    logits = []
    for context in (256, 48):
        driver = RunnerDriver(tmp_path / "model")
        assert driver.loaded.longrope == "long"
        driver.runner.init_kv_cache(InitializeCache(NUM_BLOCKS, context))
        driver.generate([driver.add(PROMPT[:32])], 2)
        logits.append(torch.cat(driver.logits))
    assert torch.equal(*logits)


def test_equal_checkpoints_have_equal_hashes(make_family: Callable[[str], Family]) -> None:
    hashes = [
        RunnerDriver(make_family(name).path).loaded.model_hash
        for name in ("llama-tied", "llama-tied", "llama-rope-linear", "qwen2")
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_request_may_skip_steps(driver: RunnerDriver) -> None:
    """Its last token waits on the device, in its slot, however many steps run meanwhile (slot history)."""
    alone = driver.add(PROMPT)
    driver.generate([alone], 12)
    skipping, other = driver.add(PROMPT), driver.add(PROMPT[5:])
    driver.step([(skipping, len(PROMPT)), (other, len(PROMPT) - 5)])
    for number in range(60):
        rows = [(other, 1)] + [(skipping, 1)] * (number % 5 == 0 and len(skipping.output) < 12)
        driver.step(rows)
    assert skipping.output == alone.output


def test_rows_that_do_not_sample_return_nothing(driver: RunnerDriver) -> None:
    decoding, prefilling = driver.add(PROMPT[:5]), driver.add(PROMPT)
    result = driver.step([(prefilling, 10)])
    assert result.slots == result.token_ids == result.counts == b""
    result = driver.step([(prefilling, 10), (decoding, 5)])
    assert ints(result.slots) == [decoding.slot]
    assert ints(result.generations) == [decoding.generation]
    assert ints(result.counts) == [1]
    times = result.times
    assert times.sampled >= times.forward_ended >= times.forward_began >= times.prepared > 0


def test_step_that_was_not_sampled_blocks_the_next(driver: RunnerDriver) -> None:
    request = driver.add(PROMPT)
    driver.runner.execute_model(driver.plan([(request, 4)]))
    with pytest.raises(RuntimeError, match="step 1 was executed but never sampled"):
        driver.runner.execute_model(driver.plan([(request, 4)]))
    driver.runner.sample_tokens(None)
    with pytest.raises(RuntimeError, match="no step was executed"):
        driver.runner.sample_tokens(None)


def test_failed_sampling_leaves_no_pending_state(driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    request = driver.add(PROMPT)
    driver.runner.execute_model(driver.plan([(request, len(PROMPT))]))
    with monkeypatch.context() as patch:
        patch.setattr(driver.epoch.history, "append", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.runner.sample_tokens(None).get()
    driver.step([(driver.add(PROMPT), 4)])


@pytest.mark.parametrize("token", [-1, 211, 2**31 - 1])
def test_token_outside_the_vocabulary_is_refused(driver: RunnerDriver, token: int) -> None:
    request = driver.add([5, token])
    with pytest.raises(PlanError, match=f"slot {request.slot}: token {token}"):
        driver.step([(request, 2)])


def test_row_of_another_generation_is_refused(driver: RunnerDriver) -> None:
    request = driver.add(PROMPT)
    driver.step([(request, 4)])
    request.generation += 1
    with pytest.raises(PlanError, match=f"slot {request.slot}: row of generation"):
        driver.step([(request, 4)])


def test_slot_is_reset_when_it_is_given_away(driver: RunnerDriver) -> None:
    hot = SamplingParams(100, 1.5, top_k=3, seed=9, min_tokens=50, eos_token_ids=tuple(range(100)))
    first = driver.add(PROMPT, hot)
    driver.generate([first], 20)
    assert min(first.output) >= 100
    expected = driver.add(PROMPT)
    driver.generate([expected], 20)
    driver.finish(first)
    driver.step([(expected, 1)])
    assert driver.epoch.columns.generation[first.slot] == EMPTY, "no drafter keeps its states"
    driver.free_slots.insert(0, driver.free_slots.pop())
    second = driver.add(PROMPT)
    assert second.slot == first.slot
    driver.generate([second], 20)
    assert second.output == expected.output[:20]


@pytest.mark.parametrize("features", [(), (selection.WIDE,), (selection.PAIRS,), (selection.TILES,)], ids=str)
@pytest.mark.parametrize("name", ["llama-tied", "mistral-window", "qwen3"])
def test_bfloat16_stays_close_to_float32(
    make_family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, name: str, features: tuple[str, ...]
) -> None:
    """With bfloat16 arithmetic, and with the float32 arithmetic of processors that have none."""
    if not set(features) <= selection.processor_features():
        pytest.skip("this processor has no bfloat16 products")
    exact = RunnerDriver(make_family(name).path)
    monkeypatch.setattr(selection, "processor_features", lambda: features)
    rounded = RunnerDriver(make_family(name).path, dtype="bfloat16")
    for driver in (exact, rounded):
        driver.generate([driver.add(PROMPT), driver.add(PROMPT[7:])], 1, chunk=11)
    ours, reference = torch.cat(rounded.logits), torch.cat(exact.logits)
    assert 0 < (ours - reference).abs().mean() / reference.abs().mean() < 0.1
    request = rounded.add(PROMPT)
    rounded.generate([request], 30)
    assert len(set(request.output)) > 3


def test_dtype_auto_is_the_checkpoints_own(llama: Family, tmp_path: Path) -> None:
    copy.deepcopy(llama.model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    blocks = [RunnerDriver(path).loaded.bytes_per_block for path in (tmp_path, llama.path)]
    assert blocks[0] * 2 == blocks[1]


def test_old_rope_keys_mean_the_same(make_family: Callable[[str], Family], tmp_path: Path) -> None:
    """transformers 5 writes `rope_parameters`; versions before it wrote `rope_theta` and `rope_scaling`."""
    for name in ("llama-rope-llama3", "llama-rope-linear"):
        family = make_family(name)
        old = tmp_path / name
        old.mkdir()
        for file in family.path.iterdir():
            (old / file.name).write_bytes(file.read_bytes())
        config = json.loads((old / "config.json").read_text())
        values = config.pop("rope_parameters")
        config["rope_theta"] = values.pop("rope_theta")
        config["rope_scaling"] = {**values, "type": values.pop("rope_type")}
        (old / "config.json").write_text(json.dumps(config))
        outputs = []
        for path in (family.path, old):
            driver = RunnerDriver(path)
            request = driver.add(PROMPT)
            driver.generate([request], 20)
            outputs.append(request.output)
        assert outputs[0] == outputs[1]


@pytest.mark.parametrize("threads", [2, 3])
def test_number_of_threads_does_not_change_a_bit(
    make_family: Callable[[str], Family], monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(product, "WORTH", 1)  # small products are shared too
    logits = []
    for number in (1, threads):
        driver = RunnerDriver(make_family("qwen3").path, threads=number)
        requests = [driver.add(PROMPT[i:]) for i in range(6)]
        driver.generate(requests, 10)
        logits.append(torch.cat([step.flatten() for step in driver.logits]))
    assert torch.equal(*logits)
