"""Embeddings of every layout of ranks equal those of one rank, and change no generated token (float32)."""

from collections.abc import Callable

import numpy as np
import pytest

from protocol.sampling import Pooling, SamplingParams
from tests.integration.native.conftest import Family
from tests.integration.native.driver import DrivenRequest, RunnerDriver
from tests.ranks.group import GroupDriver

ONE = SamplingParams(max_tokens=1, temperature=0.0)
LONG, SHORT = list(range(20, 57)), list(range(100, 109))


def mixed(driver: RunnerDriver) -> tuple[list[DrivenRequest], list[DrivenRequest]]:
    """Run two requests that generate and four that are pooled, with prompts in chunks and two steps in flight."""
    tokens = [driver.add(LONG), driver.add(SHORT)]
    pooled = [
        driver.add(prompt, ONE, pooling=pooling) for prompt in (LONG, SHORT) for pooling in (Pooling.LAST, Pooling.MEAN)
    ]
    driver.interleave([[tokens[0], *pooled[:2]], [tokens[1], *pooled[2:]]], 1, chunk=11, depth=2)
    driver.generate(tokens, 12, depth=2)
    return tokens, pooled


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_embeddings_equal_one_rank(tied: Family, start: Callable[..., GroupDriver], layout: tuple[int, int]) -> None:
    reference = RunnerDriver(tied.path)
    undisturbed = [reference.add(LONG), reference.add(SHORT)]
    reference.generate(undisturbed, 12)
    alone, group = mixed(RunnerDriver(tied.path)), mixed(driver := start(tied.path, *layout))
    assert {loaded.hidden_size for loaded in driver.runner.loaded} == {tied.model.config.hidden_size}
    for tokens, _ in (alone, group):
        assert [request.output for request in tokens] == [request.output for request in undisturbed]
    for one, many in zip(alone[1], group[1], strict=True):
        expected, ours = (np.frombuffer(request.embedding, np.float32) for request in (one, many))
        assert len(ours) == tied.model.config.hidden_size
        np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)
        if layout[0] == 1:  # stages compute the same as one rank
            assert one.embedding == many.embedding
