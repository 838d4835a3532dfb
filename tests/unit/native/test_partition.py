"""Shares of the ranks: everything once, but for KV heads where there are more ranks than these."""

from dataclasses import replace

import pytest

from protocol.membership import Shard
from services.worker.backends.native.model.config import ExpertsConfig, ModelConfig
from services.worker.backends.native.model.partition import ModelPart, stage_layers, tensor_parallel_sizes
from services.worker.backends.native.model.rope_config import Rope
from services.worker.runner import LoadError


def model(**sizes: int) -> ModelConfig:
    values = {"vocab_size": 211, "intermediate_size": 96, "num_layers": 5, "num_heads": 8, "num_kv_heads": 2}
    values.update(sizes)
    return ModelConfig(
        **values, hidden_size=64, head_dim=16, max_position=128, norm_eps=1e-6, tied=True,
        ropes=(Rope(10000.0, "default"),) * values["num_layers"], windows=tuple(range(values["num_layers"])),
        qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False, dtype="float32",
    )  # fmt: skip


def test_layers_are_dealt_out_as_equally_as_possible_sparing_the_ends() -> None:
    sizes = {
        (4, 1): [4], (4, 2): [2, 2], (4, 4): [1] * 4, (5, 2): [3, 2], (5, 4): [1, 1, 2, 1], (6, 4): [1, 2, 2, 1],
        (7, 4): [2, 2, 2, 1], (32, 5): [6, 6, 7, 7, 6],
    }  # fmt: skip
    for (layers, stages), expected in sizes.items():
        cut = [stage_layers(layers, stages, stage) for stage in range(stages)]
        assert [len(part) for part in cut] == expected
        assert [layer for part in cut for layer in part] == list(range(layers))


@pytest.mark.parametrize(
    ("sizes", "allowed"),
    [
        ({}, (1, 2, 4, 8)),
        ({"num_kv_heads": 8}, (1, 2, 3, 4, 6, 8)),  # 96 divides by 3 and 6, not by 5 and 7
        ({"num_heads": 9, "num_kv_heads": 3}, (1, 2, 3)),  # the MLP does not divide by 9
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 24}, (1, 2, 3, 4, 12)),
        ({"num_heads": 7, "num_kv_heads": 1, "intermediate_size": 7 * 16}, (1, 7)),
        ({"intermediate_size": 100}, (1, 2, 4)),
        ({"intermediate_size": 101}, (1,)),
        ({"vocab_size": 7}, (1, 2, 4)),  # of eight ranks the last would have no token id
    ],
)
def test_sizes_that_a_model_allows(sizes: dict[str, int], allowed: tuple[int, ...]) -> None:
    assert tensor_parallel_sizes(model(**sizes)) == allowed


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_ranks_together_hold_everything(size: int, kv_heads: int) -> None:
    config = model(num_kv_heads=kv_heads)
    parts = [ModelPart.from_shard(config, Shard(rank, size, 0, 1)) for rank in range(size)]
    for name, whole in (("heads", 8), ("intermediate", 96), ("vocabulary", 211)):
        held = [i for part in parts for i in range(whole)[getattr(part, name)]]
        assert held == list(range(whole)), name
    for part in parts:
        queries, keys = range(8)[part.heads], range(kv_heads)[part.kv_heads]
        assert {head * kv_heads // 8 for head in queries} == set(keys)
        assert (len(queries), len(keys)) == (part.config.num_heads, part.config.num_kv_heads)
        assert part.config.intermediate_size == 96 // size
        assert part.vocabulary_width * size >= 211
        assert part.adds_bias == (part.shard.tp_rank == 0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "expected"),
    [(9, 3, 2, [(6, 2), (3, 1)]), (4, 4, 3, [(2, 2), (1, 1), (1, 1)]), (8, 8, 3, [(3, 3), (3, 3), (2, 2)])],
)
def test_kv_heads_that_do_not_divide_are_dealt_with_their_heads(
    heads: int, kv_heads: int, size: int, expected: list[tuple[int, int]]
) -> None:
    config = model(num_heads=heads, num_kv_heads=kv_heads)
    parts = [ModelPart.from_shard(config, Shard(rank, size, 0, 1)) for rank in range(size)]
    assert [(part.config.num_heads, part.config.num_kv_heads) for part in parts] == expected
    assert [i for part in parts for i in range(kv_heads)[part.kv_heads]] == list(range(kv_heads))
    assert [i for part in parts for i in range(heads)[part.heads]] == list(range(heads))
    for part in parts:
        group = heads // kv_heads
        assert {head // group for head in range(heads)[part.heads]} == set(range(kv_heads)[part.kv_heads])


def test_stages_have_their_own_layers_and_windows() -> None:
    parts = [ModelPart.from_shard(model(), Shard(0, 1, stage, 2)) for stage in range(2)]
    assert [part.config.windows for part in parts] == [(0, 1, 2), (3, 4)]
    assert [(part.is_first, part.is_last) for part in parts] == [(True, False), (False, True)]


def test_what_cannot_be_cut_is_refused_with_what_can() -> None:
    for sizes, size, message in (
        (
            {},
            3,
            r"3 tensor-parallel ranks, only for 1, 2, 4, 8: a size above its 2 KV heads must .* its 8 attention heads",
        ),
        ({}, 9, "it has 8 attention heads"),
        ({"intermediate_size": 100}, 8, "the MLP is 100 wide"),
        ({"vocab_size": 7}, 8, "none of 7 token ids"),
    ):
        with pytest.raises(LoadError, match=message):
            ModelPart.from_shard(model(**sizes), Shard(0, size, 0, 1))
    with pytest.raises(LoadError, match="5 layers cannot be cut into 6 pipeline stages"):
        ModelPart.from_shard(model(), Shard(0, 1, 0, 6))


def test_whole_experts_are_shared_and_norms_over_all_heads_are_not() -> None:
    mixture = replace(model(num_kv_heads=8), experts=ExpertsConfig(6, 2, 40, normalised=True))
    assert tensor_parallel_sizes(mixture) == (1, 2, 3, 6)
    parts = [ModelPart.from_shard(mixture, Shard(rank, 3, 0, 1)) for rank in range(3)]
    assert [part.experts for part in parts] == [range(2), range(2, 4), range(4, 6)]
    with pytest.raises(LoadError, match="a layer has 6 experts"):
        ModelPart.from_shard(mixture, Shard(0, 4, 0, 1))
    shared = replace(mixture, experts=ExpertsConfig(6, 2, 40, False, shared_width=33, dense_layers=frozenset({0})))
    part = ModelPart.from_shard(shared, Shard(1, 3, 0, 1))
    assert (part.shared, part.config.experts.shared_width, part.intermediate) == (slice(11, 22), 11, slice(32, 64))
    with pytest.raises(LoadError, match="only for 1, 3: the MLP is 96 or 33 wide"):
        ModelPart.from_shard(shared, Shard(0, 2, 0, 1))
    with pytest.raises(LoadError, match="only for 1: the norm of queries and keys is over all heads"):
        ModelPart.from_shard(replace(model(), qk_norm_of_all_heads=True), Shard(0, 2, 0, 1))
