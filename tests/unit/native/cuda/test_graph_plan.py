"""Sizes of CUDA graphs, and the graph that a step replays."""

import pytest

from services.worker.kernels.cuda.graph_plan import MOST_PADDING, MOST_ROWS, GraphPlan, padded_rows
from services.worker.kernels.cuda.split_plan import num_splits


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 31, 100, 256, 300, 512, 5000])
def test_every_decode_step_has_a_graph_with_few_padding_rows(most: int) -> None:
    plan = GraphPlan.for_rows(most)
    assert list(plan.sizes) == sorted(set(plan.sizes))
    assert plan.sizes[-1] == min(most, MOST_ROWS)
    for rows in range(1, plan.sizes[-1] + 1):
        size = plan.size_of(rows, rows, rows)
        assert size is not None
        assert rows <= size <= padded_rows(rows, plan.sizes[-1]) <= rows + MOST_PADDING


def test_small_batches_have_no_padding_rows() -> None:
    plan = GraphPlan.for_rows(64)
    assert [plan.size_of(n, n, n) for n in (1, 2, 3, 8, 9, 12, 13, 33)] == [1, 2, 3, 8, 12, 12, 16, 40]


def test_steps_without_a_graph() -> None:
    plan = GraphPlan.for_rows(64)
    assert plan.size_of(40, 3, 3) is None, "a chunk of a prompt"
    assert plan.size_of(12, 4, 12) is None, "drafts"
    assert plan.size_of(65, 65, 65) is None, "larger than every graph"
    assert plan.size_of(0, 0, 0) is None
    assert plan.size_of(4, 4, 0) == 4, "the last chunks of prompts may have one token each and sample nothing"
    assert GraphPlan(()).size_of(1, 1, 1) is None


def test_steps_with_chunks_are_compiled_for_every_number_of_splits() -> None:
    plan = GraphPlan.for_rows(8)
    assert [plan.compiled_tiles(most) for most in (0, 1, 7, 8)] == [(), (1,), (1, 2, 4, 7), (1, 2, 4, 8)]
    for most in (6, 33, 100):
        compiled = {num_splits(tiles, 8, 132) for tiles in plan.compiled_tiles(most)}
        assert compiled == {num_splits(tiles, 8, 132) for tiles in range(1, most + 1)}


def test_graphs_share_what_the_largest_one_allocates() -> None:
    for most, rows in ((0, 0), (300, 300), (5000, MOST_ROWS)):
        plan = GraphPlan.for_rows(most)
        assert plan.num_bytes(2, 1000) - plan.num_bytes(2, 0) == 1000 * rows


def test_padding_ends_with_the_buffers() -> None:
    assert (padded_rows(3, 100), padded_rows(90, 100), padded_rows(0, 5)) == (3 + MOST_PADDING, 100, 5)
