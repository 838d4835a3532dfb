"""Tokens of every layout of ranks equal those of one rank and of transformers (float32)."""

from collections.abc import Callable

import pytest
import torch

from services.checkpoint import DEMO_MODEL
from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver
from tests.ranks.group import GroupDriver
from tests.ranks.models import LAYOUTS, MODELS

TOKENS = 16
Start = Callable[..., GroupDriver]


def prompts(family: Family, number: int = 4) -> list[list[int]]:
    """Return prompts whose greatest logit exceeds the second by more than 1e-4 at every token.

    Sums in another order round differently, so closer logits may change their order.
    """
    generator = torch.Generator().manual_seed(3)
    kept: list[list[int]] = []
    for length in (37, 1, 16, 55, 9, 24, 11, 30):
        prompt = torch.randint(0, family.vocab_size, (length,), generator=generator).tolist()
        top = family.reference(prompt, TOKENS)[1].topk(2).values
        if (top[:, 0] - top[:, 1]).min() > 1e-4:
            kept.append(prompt)
    assert len(kept) >= number
    return kept[:number]


def models_and_layouts() -> list[object]:
    """Return every model with every layout, of which one model has all layouts per change."""
    others = {("untied-biased", (4, 1)), ("untied-biased", (1, 2)), ("qwen3", (2, 1)), ("qwen3", (2, 2))}
    others |= {("gemma3", (2, 2)), ("gpt-oss", (2, 2)), ("llama4", (2, 1))}
    return [
        pytest.param(
            name,
            layout,
            id=f"{name}-{layout}",
            marks=() if name == "tied" or (name, layout) in others else (pytest.mark.soak,),
        )
        for name in MODELS
        for layout in LAYOUTS
    ]


@pytest.mark.parametrize(("name", "layout"), models_and_layouts())
def test_tokens_and_logits_equal_one_rank_and_transformers(
    make_model: Callable[[str], Family], start: Start, name: str, layout: tuple[int, int]
) -> None:
    family = make_model(name)
    alone, group = RunnerDriver(family.path), start(family.path, *layout)
    for driver in (alone, group):
        requests = [driver.add(prompt) for prompt in prompts(family)]
        driver.generate(requests, TOKENS)
        for number, request in enumerate(requests):
            expected, reference = family.reference(request.prompt, TOKENS, request.output)
            assert request.output == expected
            ours = torch.stack(driver.logits)[:, number]
            torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)
    if layout[0] == 1:  # stages compute the same as one rank
        assert torch.equal(torch.stack(group.logits), torch.stack(alone.logits))


@pytest.mark.parametrize(
    ("name", "layout", "kv_heads"),
    [
        ("nine-heads", (2, 1), [2, 1]),
        ("four-heads", (3, 1), [2, 1, 1]),
        pytest.param("nine-heads", (2, 2), [2, 1], marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_unequal_shares_of_kv_heads_give_the_tokens_of_one_rank(
    make_model: Callable[[str], Family], start: Start, name: str, layout: tuple[int, int], kv_heads: list[int]
) -> None:
    """A rank's cache holds its own KV heads; chunks and steps in flight change no bit."""
    family = make_model(name)
    group = start(family.path, *layout)
    sizes = [loaded.bytes_per_block for loaded in group.runner.loaded[: layout[0]]]
    assert [size * kv_heads[0] for size in sizes] == [sizes[0] * own for own in kv_heads]
    requests = [group.add(prompt) for prompt in prompts(family)]
    group.generate(requests, TOKENS)
    for number, request in enumerate(requests):
        expected, reference = family.reference(request.prompt, TOKENS, request.output)
        assert request.output == expected
        torch.testing.assert_close(torch.stack(group.logits)[:, number], reference, atol=1e-4, rtol=0)
    again = [group.add(request.prompt) for request in requests]
    group.generate(again, TOKENS, chunk=7, depth=layout[1] + 1)
    assert [request.output for request in again] == [request.output for request in requests]


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=str)
def test_bfloat16_stays_close_to_one_rank(tied: Family, start: Start, layout: tuple[int, int]) -> None:
    """Tensor parallelism sums in another order, which rounds differently in bfloat16; stages change nothing."""
    alone, group = RunnerDriver(tied.path, dtype="bfloat16"), start(tied.path, *layout, dtype="bfloat16")
    for driver in (alone, group):
        driver.generate([driver.add(prompt) for prompt in prompts(tied)], 1, chunk=11)
    ours, reference = torch.cat(group.logits), torch.cat(alone.logits)
    assert (ours - reference).abs().mean() / reference.abs().mean() < 0.05
    assert torch.equal(ours, reference) or layout[0] > 1
    assert group.runner.loaded[0].bytes_per_block < alone.loaded.bytes_per_block


@pytest.mark.parametrize(("layout", "quantization"), [((2, 1), "int4"), ((1, 2), "int8")], ids=str)
def test_quantised_weights_give_the_tokens_of_one_rank(
    start: Start, layout: tuple[int, int], quantization: str
) -> None:
    """Groups of inputs are never cut, so every layout has the same weights; at depth 1 and 2."""
    settings = {"quantization": quantization, "dtype": "float32"}
    alone, group = RunnerDriver(DEMO_MODEL, **settings), start(DEMO_MODEL, *layout, **settings)
    texts = [[(7 * i + j) % 4000 + 3 for j in range(9 + i)] for i in range(3)]
    expected = [alone.add(text) for text in texts]
    alone.generate(expected, TOKENS)
    for depth in (1, 2):
        requests = [group.add(text) for text in texts]
        group.generate(requests, TOKENS, chunk=5, depth=depth)
        assert [request.output for request in requests] == [request.output for request in expected]
