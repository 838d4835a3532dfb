"""Digests of weights: every byte of a rank's share counts, and equal parts of two ranks have equal names."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.membership import Shard, Speculation
from services.checkpoint import DEMO_MODEL
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.kernels.selection import choose, create
from services.worker.weights import HashedCheckpoint, layer_contents, open_checkpoint
from services.worker.weights.safetensors_checkpoint import SafetensorsCheckpoint
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver


def contents_of(path: Path, shard: Shard, dtype: torch.dtype = torch.float32) -> dict[str, str]:
    checkpoint = HashedCheckpoint(open_checkpoint(path))
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(path), shard)
    Model(part, checkpoint, dtype, create(choose("reference", "cpu", dtype, ())), lambda *_: None)
    return {part: digest.result() for part, digest in checkpoint.contents.items()}


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_one_changed_number_of_any_tensor_changes_the_contents(
    make_family: Callable[[str], Family], tmp_path: Path, name: str
) -> None:
    shutil.copytree(make_family(name).path, tmp_path / "model")
    before = RunnerDriver(tmp_path / "model").loaded
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    for tensor in tensors:
        changed = {key: value.clone() for key, value in tensors.items()}
        changed[tensor].view(-1)[-1] += 1
        save_file(changed, file, {"format": "pt"})
        contents = contents_of(tmp_path / "model", Shard())
        different = {part.partition("[")[0] for part, digest in contents.items() if before.contents[part] != digest}
        assert different == {tensor}
    after = RunnerDriver(tmp_path / "model").loaded
    assert after.model_hash != before.model_hash, "the digest covers the last row"
    changed = {key: value.clone() for key, value in tensors.items()}
    changed[next(name for name in tensors if tensors[name].ndim == 2)][1] += 1
    save_file(changed, file, {"format": "pt"})
    after = RunnerDriver(tmp_path / "model").loaded
    assert after.model_hash == before.model_hash, "the digest covers three rows of a matrix"
    assert after.contents != before.contents


def test_ranks_name_what_they_share_alike_and_what_differs_otherwise(llama: Family) -> None:
    whole, (left, right) = (contents_of(llama.path, Shard()), (contents_of(llama.path, Shard(r, 2)) for r in (0, 1)))
    shared = set(left) & set(right)
    assert shared
    assert all(left[part] == right[part] == whole[part] for part in shared)
    assert {part.partition("[")[0] for part in shared} >= {"model.norm.weight"}
    assert set(left) - shared
    assert contents_of(llama.path, Shard(1, 2)) == right
    assert not set(contents_of(llama.path, Shard(), torch.bfloat16)) & set(whole)


def test_layers_of_a_library_that_reads_the_files_itself(llama: Family, tmp_path: Path) -> None:
    """One digest per layer bounds the message: some models have more tensors than a list may have entries."""
    shutil.copytree(llama.path, tmp_path / "model")
    before = layer_contents(SafetensorsCheckpoint(llama.path), 1)
    assert before == layer_contents(SafetensorsCheckpoint(tmp_path / "model"), 3)
    assert {"model.layers.0", "model.layers.1", "model.norm.weight"} <= before.keys()
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[-1] += 1
    save_file(tensors, file, {"format": "pt"})
    after = layer_contents(SafetensorsCheckpoint(tmp_path / "model"), 1)
    assert {layer for layer, digest in after.items() if before[layer] != digest} == {"model.layers.1"}


def test_weights_of_a_drafter_belong_to_the_contents(tmp_path: Path) -> None:
    shutil.copytree(DEMO_MODEL / "eagle", tmp_path / "eagle")
    (file,) = (tmp_path / "eagle").glob("*.safetensors")
    tensors = load_file(file)
    changed = min(name for name, values in tensors.items() if values.is_floating_point())
    tensors[changed].view(-1)[-1] += 1
    save_file(tensors, file, {"format": "pt"})
    own, other = (
        RunnerDriver(DEMO_MODEL, block_size=16, speculation=Speculation("eagle", 1, head)).loaded.contents
        for head in ("", str(tmp_path / "eagle"))
    )
    assert own.keys() == other.keys()
    different = {part.partition("[")[0] for part, digest in own.items() if other[part] != digest}
    assert different == {f"drafter/{changed}"}
    assert {part for part in own if not part.startswith("drafter/")}, "those of the model"


def test_weights_that_are_kept_keep_their_contents(llama: Family) -> None:
    driver = RunnerDriver(llama.path)
    assert driver.loaded.contents
    again = driver.runner.load(driver.assignment, lambda phase, fraction: None)
    assert again.num_loads == 1
    assert again.contents == driver.loaded.contents
