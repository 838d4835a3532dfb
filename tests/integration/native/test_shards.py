"""A rank reads its own share of a checkpoint and no more; together the ranks read all of it."""

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from protocol.membership import Assignment, Shard, Speculation
from services.config import WorkerConfig
from services.worker.backends.native.kept_model import KeptModel
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.model import Model, cache_shape
from services.worker.backends.native.model.partition import ModelPart
from services.worker.kernels.interface.kernels import Kernels
from services.worker.kernels.selection import choose, create
from services.worker.runner import LoadError
from services.worker.weights import open_checkpoint
from tests.integration.native.conftest import Family

HIDDEN, LAYERS = 64, 3


def kernels() -> Kernels:
    return create(choose("auto", "cpu", torch.float32, ()))


class View:
    """A tensor of a file that notes what is read of it. Whole tensors cannot be had without saying so."""

    def __init__(self, view: object, note: Callable[[torch.Tensor], None]) -> None:
        self._view, self._note = view, note
        self.get_shape, self.get_dtype = view.get_shape, view.get_dtype

    def __getitem__(self, cut: object) -> torch.Tensor:
        part = self._view[cut]
        self._note(part)
        return part


class File:
    def __init__(self, file: object, note: Callable[[str, torch.Tensor], None]) -> None:
        self._file, self._note = file, note

    def get_slice(self, name: str) -> View:
        return View(self._file.get_slice(name), lambda part: self._note(name, part))


def load(path: Path, shard: Shard) -> tuple[Model, dict[str, list[torch.Tensor]]]:
    """The model of one rank, and all that was read for it."""
    seen: dict[str, list[torch.Tensor]] = defaultdict(list)
    checkpoint = open_checkpoint(path)
    checkpoint.files = {
        name: File(file, lambda name, part: seen[name].append(part.clone())) for name, file in checkpoint.files.items()
    }
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(path), shard)
    return Model(part, checkpoint, torch.float32, kernels(), lambda phase, fraction: None), seen


def elements(seen: dict[str, list[torch.Tensor]]) -> int:
    return sum(part.numel() for parts in seen.values() for part in parts)


@pytest.mark.parametrize("name", ["llama-tied", "llama-untied-biased", "qwen2", "qwen3"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 3), (2, 2), (4, 1)])
def test_ranks_together_read_every_number_once(
    make_family: Callable[[str], Family], name: str, tp: int, pp: int
) -> None:
    """But for KV heads shared by ranks, norms and biases added once, and a tied head that is a stage of its own."""
    path = make_family(name).path
    whole = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    read: dict[str, list[torch.Tensor]] = defaultdict(list)
    for stage in range(pp):
        for rank in range(tp):
            _, seen = load(path, Shard(rank, tp, stage, pp))
            for tensor, parts in seen.items():
                assert len(parts) == 1, "nothing is read twice"
                read[tensor] += parts
    assert set(read) == set(whole)
    for tensor, parts in read.items():
        expected = whole[tensor]
        if tensor.endswith("norm.weight"):
            assert all(torch.equal(part, expected) for part in parts)
            assert len(parts) == tp
        elif tensor.endswith(("o_proj.bias", "down_proj.bias")):
            assert [part.shape for part in parts] == [expected.shape]
        elif tensor.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(torch.cat(parts, 1), expected)
        elif tp == 4 and ("k_proj" in tensor or "v_proj" in tensor):  # two KV heads
            assert torch.equal(torch.cat(parts[::2]), expected)
            assert torch.equal(torch.cat(parts[1::2]), expected)
        elif tensor == "model.embed_tokens.weight" and name == "llama-tied" and pp > 1:
            assert torch.equal(torch.cat(parts), torch.cat([expected, expected]))
        else:
            assert torch.equal(torch.cat(parts), expected)


def test_a_rank_reads_its_share_of_the_bytes(make_family: Callable[[str], Family]) -> None:
    path = make_family("llama-multi-head").path
    everything = elements(load(path, Shard())[1])
    replicated = HIDDEN * (2 * LAYERS + 1)
    for rank in range(2):
        half = elements(load(path, Shard(rank, 2, 0, 1))[1])
        odd = 2 * HIDDEN * (1 if rank == 0 else -1)  # 211 token ids, in the embedding and in the head
        assert 2 * half == everything + replicated + odd


def test_the_cache_holds_this_ranks_layers_and_heads(llama: Family) -> None:
    config = ModelConfig.from_checkpoint(llama.path)
    bytes_per_block = kernels().network.bytes_per_block
    whole = bytes_per_block(cache_shape(config, 4, torch.float32))
    for shard, share in (
        (Shard(0, 2, 0, 1), 2), (Shard(3, 4, 0, 1), 2), (Shard(0, 1, 2, 3), 3), (Shard(1, 2, 1, 3), 6),
    ):  # fmt: skip
        mine = ModelPart.from_shard(config, shard).config
        assert bytes_per_block(cache_shape(mine, 4, torch.float32)) * share == whole


def test_a_missing_tensor_is_missed_by_the_rank_that_needs_it_only(llama: Family) -> None:
    part = ModelPart.from_shard(ModelConfig.from_checkpoint(llama.path), Shard(0, 1, 0, 3))
    for gone, fails in (("model.layers.0.mlp.up_proj.weight", True), ("model.norm.weight", False)):
        checkpoint = open_checkpoint(llama.path)
        del checkpoint.files[gone]
        if fails:
            with pytest.raises(LoadError, match=gone):
                Model(part, checkpoint, torch.float32, kernels(), lambda phase, fraction: None)
        else:
            Model(part, checkpoint, torch.float32, kernels(), lambda phase, fraction: None)


def test_the_weights_of_another_shard_are_freed_before_the_next_are_read(make_family: Callable[[str], Family]) -> None:
    """Also where a drafter was loaded for them."""
    kept = KeptModel(WorkerConfig(model=str(make_family("llama-tied").path), kernels="reference"), create)
    whole = kept.weights(Shard(), lambda phase, fraction: None)
    ngrams = Speculation("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=3)
    kept.drafter(Assignment(1, 0, 1, 16, 4, 64, speculation=ngrams), whole, 64)
    before = weakref.ref(whole)
    del whole
    left: list[object] = []

    def look(phase: str, fraction: float) -> None:
        gc.collect()
        left.append(before())

    kept.weights(Shard(0, 2, 0, 1), look)
    assert left
    assert not any(left)
