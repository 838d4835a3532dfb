"""Greedy answers of every family equal transformers', however the work is cut into steps (float32)."""

from collections.abc import Callable

import torch

from tests.integration.native.conftest import Family
from tests.integration.native.driver import RunnerDriver

TOKENS = 20


def prompts(family: Family, number: int = 4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, family.vocab_size, (length,), generator=generator).tolist()
        for length in (37, 1, 16, 55, 9, 24)[:number]
    ]


def check(family: Family, prompt: list[int], output: list[int], logits: torch.Tensor) -> None:
    expected, reference = family.reference(prompt, TOKENS, output)
    top = reference.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-4, "the reference itself is undecided; choose another prompt"
    assert output == expected
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=0)


def test_batched(family: Family) -> None:
    driver = RunnerDriver(family.path)
    requests = [driver.add(prompt) for prompt in prompts(family)]
    driver.generate(requests, TOKENS)
    stacked = torch.stack(driver.logits, 1)
    for request, logits in zip(requests, stacked, strict=True):
        check(family, request.prompt, request.output, logits)
    again = [driver.add(request.prompt) for request in requests]
    driver.generate(again, TOKENS, chunk=7, depth=2)
    assert [request.output for request in again] == [request.output for request in requests]


def test_chunks_and_a_prefix_hit_give_the_same_bits(family: Family) -> None:
    driver = RunnerDriver(family.path)
    prompt = prompts(family)[3]
    whole = driver.add(prompt)
    driver.generate([whole], TOKENS)
    expected = torch.cat(driver.logits)
    check(family, prompt, whole.output, expected)
    hit = driver.add(prompt, prefix=whole, hit=len(prompt) // driver.block_size * driver.block_size)
    for pieces, chunk in ((hit, 64), (driver.add(prompt), 1), (driver.add(prompt), 7), (driver.add(prompt), 16)):
        driver.logits.clear()
        driver.generate([pieces], TOKENS, chunk)
        assert pieces.output == whole.output
        assert torch.equal(torch.cat(driver.logits), expected)


def test_two_equal_prompts_share_blocks_within_one_step(family: Family) -> None:
    """The second row starts inside blocks that the first row writes in this very step (write before read)."""
    driver = RunnerDriver(family.path)
    prompt = prompts(family)[3]
    hit = 52
    first = driver.add(prompt)
    second = driver.add(prompt, hit=0)
    first.blocks = [int(driver.free_blocks.pop()) for _ in range(-(-len(prompt) // driver.block_size))]
    second.blocks, second.computed = first.blocks[: hit // driver.block_size], hit
    driver.step([(second, len(prompt) - hit), (first, len(prompt))])
    driver.generate([first, second], TOKENS)
    expected, _ = family.reference(prompt, TOKENS, first.output)
    assert first.output == second.output == expected


def test_the_context_chooses_the_factors_of_longrope_even_if_its_last_block_is_not_full(
    make_family: Callable[[str], Family],
) -> None:
    family = make_family("phi3-longrope-partial")
    driver = RunnerDriver(family.path, block_size=48, max_model_len=256, kernels="reference")
    [prompt, *_] = prompts(family)
    request = driver.add(prompt)
    driver.generate([request], TOKENS)
    check(family, prompt, request.output, torch.cat(driver.logits))
