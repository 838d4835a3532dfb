"""A worker that starts again takes packed weights from a file: the same tokens and digests, nothing packed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from protocol.membership import Shard
from services.checkpoint.gguf import read_header
from services.config import WorkerConfig
from services.worker.backends.native.kept_model import KeptModel
from services.worker.kernels import selection
from services.worker.kernels.cpu.network import CpuNetwork
from services.worker.weights import HashedCheckpoint
from tests.integration.native import gguf_models
from tests.integration.native.conftest import SMALL, Family, save
from tests.integration.native.driver import RunnerDriver

PROMPT = [5, 9, 201, 17, 3, 3, 88, 101, 42, 7]


def start(path: Path, directory: Path | str, **config: object) -> tuple[RunnerDriver, list[int], list[torch.Tensor]]:
    """Return a runner that has left, and with it written its file, and the tokens and logits of a request."""
    driver = RunnerDriver(path, weights_cache_dir=str(directory), **config)
    request = driver.add(PROMPT)
    driver.generate([request], 8)
    driver.runner.shutdown()
    return driver, request.output, driver.logits


@pytest.fixture
def even(tmp_path: Path) -> Path:
    """A checkpoint whose products have multiples of 32 inputs, as groups of quantised weights need."""
    torch.manual_seed(7)
    return save(LlamaForCausalLM(LlamaConfig(**{**SMALL, "intermediate_size": 96})), tmp_path / "model").path


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the weights that are packed."""
    seen: list[tuple[int, ...]] = []
    pack = CpuNetwork.pack

    def noted(network: CpuNetwork, weight: torch.Tensor, is_table: bool = False) -> object:
        made = pack(network, weight, is_table)
        if isinstance(made, tuple):
            seen.append(tuple(weight.shape))
        return made

    monkeypatch.setattr(CpuNetwork, "pack", noted)
    return seen


def check_both_starts(
    path: Path, directory: Path, packs: list[tuple[int, ...]], **config: object
) -> tuple[RunnerDriver, RunnerDriver]:
    _, tokens, logits = start(path, "none", **config)
    first, *one = start(path, directory, **config)
    packs.clear()
    second, *two = start(path, directory, **config)
    assert not packs, "the second start packs nothing"
    assert one[0] == two[0] == tokens
    for other in (one[1], two[1]):
        assert all(map(torch.equal, logits, other)), "the same bits"
    assert first.loaded.contents == second.loaded.contents
    assert first.loaded.model_hash == second.loaded.model_hash
    return first, second


def test_every_architecture_starts_with_the_same_bits(
    family: Family, tmp_path: Path, packs: list[tuple[int, ...]]
) -> None:
    check_both_starts(family.path, tmp_path / "weights", packs)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Q8_0", "llama"),
        ("Q4_K", "llama-wide"),
        ("Q8_0", "qwen3moe"),
        ("Q8_0", "llama4"),
        ("MXFP4", "gpt-oss"),
        ("F16", "llama-biased"),
    ],
)
@pytest.mark.parametrize("quantization", [None, "none"])
def test_gguf_files(
    tmp_path: Path, kind: str, name: str, quantization: str | None, packs: list[tuple[int, ...]]
) -> None:
    path = gguf_models.write(tmp_path / "model.gguf", name, kind).path
    check_both_starts(path, tmp_path / "weights", packs, quantization=quantization)


@pytest.mark.parametrize(
    "config",
    [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16", "batch_invariant": True}],
    ids=str,
)
def test_rounded_weights(even: Path, tmp_path: Path, packs: list[tuple[int, ...]], config: dict[str, str]) -> None:
    check_both_starts(even, tmp_path / "weights", packs, **config)


def test_the_second_start_reads_no_product_of_the_checkpoint(
    even: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[tuple[int, ...]]()
    start(even, tmp_path / "weights", quantization="int8")
    take = HashedCheckpoint.take

    def noted(*args: object) -> torch.Tensor:
        values = take(*args)
        read.append(tuple(values.shape))
        return values

    monkeypatch.setattr(HashedCheckpoint, "take", noted)
    hashed = list[object]()
    monkeypatch.setattr("services.worker.weights.contents.raw_bytes", hashed.append)
    start(even, tmp_path / "weights", quantization="int8")
    assert {len(shape) for shape in read} == {1}, "norms only"
    assert not hashed


def test_files_of_the_same_size_with_other_weights_are_packed_anew(
    tmp_path: Path, packs: list[tuple[int, ...]]
) -> None:
    """A number that the model's digest does not cover, and the old time: the inode has changed at another time."""
    path = gguf_models.write(tmp_path / "model.gguf", "llama", "Q8_0").path
    before, _, logits = start(path, tmp_path / "weights")
    status, data = path.stat(), bytearray(path.read_bytes())
    kept = [each.name for each in (tmp_path / "weights").iterdir()]
    tensor = read_header(path).tensors["blk.1.ffn_up.weight"]
    data[tensor.begin + tensor.row_bytes + 5] ^= 0x40  # a number of the second row
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    packs.clear()
    after, _, changed = start(path, tmp_path / "weights")
    assert packs
    assert before.loaded.model_hash == after.loaded.model_hash
    assert before.loaded.contents != after.loaded.contents
    assert not all(map(torch.equal, logits, changed))
    assert [each.name for each in (tmp_path / "weights").iterdir()] == kept, "the file is replaced"


def test_other_kernels_or_settings_have_files_of_their_own(
    even: Path, tmp_path: Path, packs: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, config in enumerate(({}, {"quantization": "int8"}, {"dtype": "bfloat16", "batch_invariant": True}), 1):
        packs.clear()
        start(even, tmp_path / "weights", **config)
        assert packs
        assert len(list((tmp_path / "weights").iterdir())) == number
    packs.clear()
    monkeypatch.setattr("services.worker.backends.native.kept_model.packing_digest", lambda: "another version")
    start(even, tmp_path / "weights")
    assert packs, "another version of the code packs anew"


def test_ranks_and_stages_have_files_of_their_own(
    make_family: Callable[[str], Family], tmp_path: Path, packs: list[tuple[int, ...]]
) -> None:
    path = make_family("llama-tied").path
    config = WorkerConfig(model=str(path), weights_cache_dir=str(tmp_path / "weights"), threads=1)
    shards = [Shard(rank, 2, stage, 2) for rank in range(2) for stage in range(2)]

    def load(shard: Shard, config: WorkerConfig) -> dict[str, str]:
        kept = KeptModel(config, selection.create)
        kept.weights(shard, lambda phase, fraction: None)
        kept.drop(60.0)
        return kept.contents(None)

    plain = [load(shard, config.model_copy(update={"weights_cache_dir": "none"})) for shard in shards]
    assert [load(shard, config) for shard in shards] == plain
    assert len(list((tmp_path / "weights").iterdir())) == len(shards)
    packs.clear()
    assert [load(shard, config) for shard in shards] == plain
    assert not packs


def test_small_models_are_not_kept_by_default(llama: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start(llama.path, "auto")
    assert not (tmp_path / "runahead" / "weights").exists()
    monkeypatch.setattr("services.worker.backends.native.kept_model.WORTH_A_FILE", 1000)
    start(llama.path, "auto")
    assert len(list((tmp_path / "runahead" / "weights").iterdir())) == 1
