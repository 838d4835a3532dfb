"""EAGLE drafters against the head in plain torch, however the sequence came about: chunks, rejections, other slots."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protocol.membership import Shard
from protocol.steps import NO_DRAFT
from services.worker.runner import LoadError
from tests.unit.native.eagle_heads import BLOCK_SIZE, CONTEXT, HIDDEN, VOCAB, EagleSetup, HeadCheckpoint
from tests.unit.native.implementations import BF16, F32

K = 4
NAMED = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
HEADS = {
    "eagle": HeadCheckpoint("eagle"),
    "eagle-own-embedding-and-head": HeadCheckpoint(
        "eagle", shapes={"embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    ),
    "eagle-biased-fc": HeadCheckpoint("eagle", {"architectures": ["EagleLlamaForCausalLM"]}, {"fc.bias": (HIDDEN,)}),
    "eagle-frequent-tokens": HeadCheckpoint("eagle", draft_vocab=70),
    "eagle3": HeadCheckpoint("eagle3", NAMED),
    "eagle3-draft-vocabulary": HeadCheckpoint(
        "eagle3", NAMED | {"architectures": ["LlamaForCausalLMEagle3"]}, draft_vocab=70
    ),
    "eagle3-norm-first": HeadCheckpoint("eagle3", {"norm_before_residual": True, "eagle_config": NAMED}),
    "eagle3-two-states": HeadCheckpoint(
        "eagle3", {"eagle_aux_hidden_state_layer_ids": [3, 0]}, {"embed_tokens.weight": (VOCAB, HIDDEN)}, reads=2
    ),
}


SETUPS = [(name, "compiled") for name in HEADS] + [
    (name, "reference") for name in ("eagle", "eagle3-draft-vocabulary", "eagle3-norm-first")
]


@pytest.fixture(params=SETUPS, ids=" ".join)
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> EagleSetup:
    name, implementation = request.param
    return EagleSetup(tmp_path, HEADS[name], implementation=implementation)


@pytest.fixture
def eagle(tmp_path: Path) -> EagleSetup:
    return EagleSetup(tmp_path, HEADS["eagle"])


def sequence(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_drafts_are_those_of_the_head_in_plain_torch(setup: EagleSetup) -> None:
    tokens = sequence(40)
    assert setup.step([(1, tokens, 0, 39)], K) == [setup.reference(tokens, K)]


def test_drafts_depend_on_tokens_states_and_distance(setup: EagleSetup) -> None:
    """The reference is one that could tell."""
    tokens = sequence(40)
    drafts = {tuple(setup.reference(tokens[:20] + sequence(n, seed=n), K)) for n in (9, 10, 11, 12, 13)}
    assert len(drafts) > 2
    assert len({draft for row in drafts for draft in row}) > 3


def test_chunks_of_a_prompt_give_the_drafts_of_the_whole(setup: EagleSetup) -> None:
    """Chunks that sample nothing are computed, and nothing is drafted for them (prompt chunks, docs/invariants.md)."""
    tokens, drafts = sequence(40), None
    for start in range(0, 39, 7):
        end = min(39, start + 7)
        drafts = setup.step([(2, tokens, start, end)], K if end == 39 else 0, samples=end == 39)
        assert end == 39 or drafts == []
    assert drafts == [setup.reference(tokens, K)]


def test_rejected_drafts_leave_nothing(setup: EagleSetup) -> None:
    """Each step keeps other tokens than were drafted, of any number (rejected positions)."""
    tokens = sequence(60)
    setup.step([(0, tokens, 0, 30)], K)
    at = 30
    for kept in (1, 3, 1, 5, 2):
        drafts = setup.step([(0, tokens, at, at + kept)], K)
        at += kept
        assert drafts == [setup.reference(tokens[: at + 1], K)]


def test_rows_together_are_as_alone(setup: EagleSetup) -> None:
    one, two, three = sequence(30, 1), sequence(40, 2), sequence(20, 3)
    setup.step([(0, one, 0, 20), (2, two, 0, 35), (3, three, 0, 12)], K)
    drafts = setup.step([(3, three, 12, 16), (0, one, 20, 21), (2, two, 35, 38)], K)
    assert drafts == [setup.reference(t, K) for t in (three[:17], one[:22], two[:39])]


def test_after_a_rest_the_head_reads_what_it_got_since(setup: EagleSetup) -> None:
    tokens, other = sequence(60), sequence(60, 1)
    setup.step([(0, tokens, 0, 30), (2, other, 0, 20)], K)
    assert setup.proposer.rest()
    assert setup.step([(0, tokens, 33, 38)], K) == [setup.reference(tokens[:39], K, 33)]
    drafts = setup.step([(0, tokens, 38, 40), (2, other, 25, 26)], K)
    assert drafts == [setup.reference(tokens[:41], K, 33), setup.reference(other[:27], K, 25)]
    setup.proposer.rest()
    setup.proposer.assign(2)
    drafts = setup.step([(0, tokens, 45, 46), (2, other, 0, 26)], K)
    assert drafts == [setup.reference(tokens[:47], K, 45), setup.reference(other[:27], K)]


def test_a_cached_prefix_counts_if_the_head_has_computed_it(eagle: EagleSetup) -> None:
    """Blocks that were written while it rested are not read."""
    table, tokens = eagle.table.block_table, sequence(60)
    eagle.step([(0, tokens, 0, 30)], K)
    eagle.proposer.rest()
    for slot, writes, begin in ((1, 0, 24), (2, 30, 0)):
        if writes:
            eagle.proposer.assign(0)
            eagle.step([(0, tokens, 0, 14), (3, tokens, 0, 14)], K)
            eagle.step([(0, tokens, 14, writes)], K)
        table[slot, :6] = table[0, :6]
        eagle.proposer.assign(slot)
        assert eagle.step([(slot, tokens, 24, 29)], K) == [eagle.reference(tokens[:30], K, begin)]


def test_rows_that_sample_nothing_draft_nothing(eagle: EagleSetup) -> None:
    tokens = sequence(40)
    assert eagle.step([(0, tokens, 0, 20)], K, samples=False) == []
    assert eagle.step([(0, tokens, 20, 39)], 0) == [[]]


def test_drafts_end_with_the_context(eagle: EagleSetup) -> None:
    """Each draft stands inside the context (position bound): the sampled token is at 92, three places remain."""
    tokens = sequence(CONTEXT + 1)
    drafts = eagle.step([(0, tokens[:93], 0, 92)], K)
    assert drafts == [[*eagle.reference(tokens[:93], 3), NO_DRAFT]]
    assert eagle.step([(0, tokens[:96], 92, 95)], K) == [[NO_DRAFT] * K]
    assert eagle.step([(0, tokens[:96], 95, 96)], K) == [[NO_DRAFT] * K], "the sampled token is beyond the context"


def test_drafts_end_with_the_blocks(eagle: EagleSetup) -> None:
    """With 10 blocks of 4 the draft at 41 is the last whose computation has a place to be kept."""
    tokens = sequence(40)
    eagle.table.num_blocks[0] = 40 // BLOCK_SIZE
    drafts = eagle.step([(0, tokens, 0, 39)], K)
    assert drafts == [[*eagle.reference(tokens, 2), NO_DRAFT, NO_DRAFT]]


def test_longer_sequences_than_the_drafter_takes_get_no_drafts(tmp_path: Path) -> None:
    """None, never those of the step before (drafter limit); the other row of the batch has its own."""
    setup = EagleSetup(tmp_path, HEADS["eagle"], max_model_len=32)
    long, short = sequence(60, 1), sequence(60, 2)
    assert setup.step([(0, long, 0, 29), (1, short, 0, 10)], K) == [
        [*setup.reference(long[:30], 2), NO_DRAFT, NO_DRAFT],
        setup.reference(short[:11], K),
    ]
    assert setup.step([(0, long, 29, 34), (1, short, 10, 13)], K) == [[NO_DRAFT] * K, setup.reference(short[:14], K)]
    assert setup.step([(0, long, 34, 39)], K) == [[NO_DRAFT] * K]


def test_what_a_long_sequence_shares_is_kept_for_short_ones(tmp_path: Path) -> None:
    """The longer request's first positions are computed although it gets no drafts: others may have them as prefix."""
    setup = EagleSetup(tmp_path, HEADS["eagle"], max_model_len=32)
    long = sequence(60)
    setup.step([(0, long, 0, 50)], K)
    setup.table.block_table[1, :5] = setup.table.block_table[0, :5]
    assert setup.step([(1, long[:26], 20, 25)], K) == [setup.reference(long[:26], K)]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_drafts_are_of_the_draft_vocabulary(tmp_path: Path, dtype: torch.dtype) -> None:
    setup = EagleSetup(tmp_path, HEADS["eagle3-draft-vocabulary"], dtype)
    known = set(torch.flatten(setup.tensors["t2d"].nonzero()).tolist())
    drafts = [setup.step([(0, sequence(n, n), 0, n - 1)], K)[0] for n in range(5, 45, 4)]
    assert {token for row in drafts for token in row} <= known
    assert len({token for row in drafts for token in row}) > 5


@pytest.mark.parametrize(("name", "least"), [("eagle-frequent-tokens", 0.8), ("eagle3", 0.05)])
def test_unlikely_drafts_are_not_proposed(tmp_path: Path, name: str, least: float) -> None:
    """From where the chance that all of them are right is less than the least; each row by itself, with its own
    temperature."""
    lengths: list[set[int]] = [set(), set(), set()]
    setup = EagleSetup(tmp_path, HEADS[name], min_acceptance=least)
    heat = setup.table.temperature[:3] = [0.0, 0.8, 3.0]
    rows = [(slot, sequence(20 + slot, seed), 0, 19 + slot) for seed in range(6) for slot in range(3)]
    for three in zip(*[iter(rows)] * 3, strict=True):
        for row, (slot, tokens, _, _) in zip(setup.step(list(three), K), three, strict=True):
            expected, chance = [], 1.0
            for token, of_it in setup.chances(tokens, K, heat[slot]):
                chance *= of_it
                expected.append(token if chance >= least else NO_DRAFT)
            assert row == expected
            lengths[slot].add(row.count(NO_DRAFT))
    assert len(set.union(*lengths)) > 2
    assert min(lengths[0]) < min(lengths[2]), "what is sampled hot is hard to foresee"


def test_hidden_states_that_are_read(tmp_path: Path) -> None:
    def reads(head: HeadCheckpoint) -> tuple[int, ...]:
        return EagleSetup(tmp_path, head).drafter.reads

    assert reads(HEADS["eagle"]) == (-1,)
    assert reads(HEADS["eagle3-two-states"]) == (0, 3)


def test_states_of_another_pipeline_stage_cannot_be_read(tmp_path: Path) -> None:
    """With five layers, the last of two stages has layers 3 and 4."""
    last = Shard(pp_rank=1, pipeline_parallel_size=2)
    for name, served in (("eagle", True), ("eagle3", False), ("eagle3-two-states", False)):
        setup = EagleSetup(tmp_path, HEADS[name])
        if served:
            setup.load(tmp_path / "head", shard=last)
            continue
        with pytest.raises(LoadError, match=r"states of layers \[.*\], but only layers 3 to 4 .* fewer stages"):
            setup.load(tmp_path / "head", shard=last)
    own = HeadCheckpoint("eagle3", {"eagle_aux_hidden_state_layer_ids": [3, 4]}, reads=2)
    assert EagleSetup(tmp_path, own).load(tmp_path / "head", shard=last).reads == (3, 4)
