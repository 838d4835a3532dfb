"""Embeddings equal transformers' hidden states after the final norm, whatever they are computed beside (float32)."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from protocol.sampling import Pooling, SamplingParams
from tests.integration.native.conftest import Family
from tests.integration.native.driver import DrivenRequest, RunnerDriver

ONE = SamplingParams(max_tokens=1, temperature=0.0)
BOTH = [Pooling.LAST, Pooling.MEAN]
LONG, SHORT = list(range(20, 57)), list(range(100, 109))


@torch.no_grad()
def reference(family: Family, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    states = family.model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].float()
    return states[-1] if pooling is Pooling.LAST else states.mean(0)


def embedding(request: DrivenRequest) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(request.embedding, np.float32).copy())


def assert_right(family: Family, *requests: DrivenRequest) -> None:
    for request in requests:
        expected = reference(family, request.prompt, request.pooling)
        torch.testing.assert_close(embedding(request), expected, atol=1e-4, rtol=1e-4)


def test_embeddings_equal_transformers(family: Family) -> None:
    driver = RunnerDriver(family.path)
    requests = [driver.add(prompt, ONE, pooling=pooling) for prompt in (LONG, SHORT) for pooling in BOTH]
    driver.generate(requests, 1)
    assert_right(family, *requests)
    assert driver.loaded.hidden_size == family.model.config.hidden_size


@pytest.mark.parametrize("chunk", [1, 5, 16])
@pytest.mark.parametrize("depth", [1, 3])
def test_chunks_beside_generation_change_neither(llama: Family, chunk: int, depth: int) -> None:
    alone = RunnerDriver(llama.path)
    tokens = [alone.add(list(range(first, first + 11))) for first in (1, 60)]
    alone.generate(tokens, 40, chunk, depth)
    driver = RunnerDriver(llama.path)
    beside = [driver.add(request.prompt) for request in tokens]
    pooled = [driver.add(prompt, ONE, pooling=pooling) for prompt in (LONG, SHORT) for pooling in BOTH]
    driver.interleave([[beside[0], *pooled[:2]], [beside[1], *pooled[2:]]], 1, chunk, depth)
    driver.generate(beside, 40, chunk, depth)
    assert [request.output for request in beside] == [request.output for request in tokens]
    assert_right(llama, *pooled)
    whole = [alone.add(request.prompt, ONE, pooling=request.pooling) for request in pooled]
    alone.generate(whole, 1)
    assert [request.embedding for request in pooled] == [request.embedding for request in whole]


def test_mean_begins_anew_in_its_next_slot_after_a_preemption(llama: Family) -> None:
    driver = RunnerDriver(llama.path)
    first = driver.add(LONG, ONE, pooling=Pooling.MEAN)
    driver.step([(first, 30)])
    driver.free_slots.insert(0, first.slot)  # the very slot, whose sum is not zero
    again = driver.preempt(first)
    assert again.slot == first.slot
    driver.generate([again], 1, chunk=16)
    assert_right(llama, again)


def test_last_token_behind_a_cached_prefix(llama: Family) -> None:
    driver = RunnerDriver(llama.path)
    first = driver.add(LONG, ONE, pooling=Pooling.LAST)
    driver.generate([first], 1)
    second = driver.add(LONG, ONE, prefix=first, hit=36, pooling=Pooling.LAST)
    driver.generate([second], 1)
    assert second.embedding == first.embedding
    assert_right(llama, second)


def test_result_has_a_row_for_each_pooled_row_that_is_complete(llama: Family) -> None:
    driver = RunnerDriver(llama.path)
    token, mean = driver.add(SHORT), driver.add(LONG, ONE, pooling=Pooling.MEAN)
    last = driver.add(SHORT, ONE, pooling=Pooling.LAST)
    first = driver.step([(token, 9), (mean, 30), (last, 9)])
    assert np.frombuffer(first.embedding_slots, np.int32).tolist() == [last.slot]
    assert len(first.embeddings) == 4 * driver.loaded.hidden_size
    second = driver.step([(token, 1), (mean, 7)])
    assert np.frombuffer(second.embedding_slots, np.int32).tolist() == [mean.slot]
    assert driver.step([(token, 1)]).embeddings == b""


def test_bfloat16_stays_close(make_family: Callable[[str], Family]) -> None:
    family = make_family("qwen3")
    driver = RunnerDriver(family.path, dtype="bfloat16")
    requests = [driver.add(LONG, ONE, pooling=pooling) for pooling in BOTH]
    driver.generate(requests, 1, chunk=16)
    for request in requests:
        expected = reference(family, LONG, request.pooling)
        assert torch.cosine_similarity(embedding(request), expected, 0) > 0.99
