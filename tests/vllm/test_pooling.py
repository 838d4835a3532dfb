"""Models that embed, classify or score: numbers under this scheduler equal those of vLLM's own `LLM.encode`."""

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from protocol.membership import Speculation
from protocol.pooling import PoolingModel, PoolingParams
from protocol.sampling import Pooling, SamplingParams
from services.worker.runner import LoadError
from tests.vllm import pooling_checkpoints
from tests.vllm.driver import BLOCK, VllmRun, VllmStream, VllmWorker
from tests.vllm.pooling_checkpoints import CONTEXT, WORDS
from tests.vllm.reference import pool as pool_by_vllm

LENGTHS = (5, CONTEXT, 33, 1, 70, 64, 96, 2, CONTEXT, 40)
"""Tokens of each prompt; several prompts are longer than what others leave of a step."""
ONE = SamplingParams(max_tokens=1, temperature=0.0)


class PoolingCase(NamedTuple):
    task: str
    chunk: int = CONTEXT
    """Budget of a step, tokens."""
    fields: dict[str, Any] | None = None
    """Fields of vLLM's PoolingParams, of every second request."""


RAW = {"use_activation": False}
CASES = {
    "bert": PoolingCase("embed", fields=RAW),
    "bert-mean": PoolingCase("embed", fields={"dimensions": 32}),
    "roberta": PoolingCase("embed"),
    "modernbert": PoolingCase("embed"),
    "qwen3-embedder": PoolingCase("embed", 48),
    "bert-classifier": PoolingCase("classify", fields=RAW),
    "bert-scorer": PoolingCase("classify", fields={"extra_kwargs": {"compressed_token_type_ids": 2}}),
    "roberta-scorer": PoolingCase("classify"),
    "bert-tagger": PoolingCase("token_classify", fields=RAW),
    "qwen3-classifier": PoolingCase("classify", 48, RAW),
    "qwen3-scorer": PoolingCase("classify", 48),
}
PER_CHANGE = ("bert-mean", "bert-tagger", "qwen3-classifier")
"""`make soak` runs all. A scorer is served in test_pooling_served.py."""
ENCODERS = {name for name in CASES if not name.startswith("qwen3")}


class PooledAnswers(msgspec.Struct):
    """Numbers under this scheduler, by request."""

    together: dict[str, list[list[float]]]
    """All requests together, by depth."""
    again: list[list[float]]
    """The same requests again, with their prompts in the prefix cache."""
    preempted: list[list[float]]
    cached_tokens: float
    model: PoolingModel
    bytes_per_block: int


def prompts() -> list[list[int]]:
    return [
        [2, *((n * 389 + i * 31) % (len(WORDS) - 5) + 5 for i in range(length - 2)), 3][:length]
        for n, length in enumerate(LENGTHS)
    ]


def streams(case: PoolingCase) -> list[VllmStream]:
    found = []
    for number, prompt in enumerate(prompts()):
        stream = VllmStream(prompt, ONE, pooling=Pooling.MODEL)
        if number % 2:
            fields = dict(case.fields or {})
            second = fields.pop("extra_kwargs", {}).get("compressed_token_type_ids")
            stream.pooling_params = PoolingParams(**fields, second_text=second)
        found.append(stream)
    return found


def answer(model: str, case: PoolingCase) -> PooledAnswers:
    """Needs a new process, because it creates vLLM."""
    worker = VllmWorker(model=model, dtype="float32", context=CONTEXT, chunk=case.chunk)

    def values(run: VllmRun) -> list[list[float]]:
        served = run.serve(*streams(case))
        assert [stream.finish and stream.finish.message for stream in served] == [""] * len(LENGTHS)
        assert not any(stream.tokens for stream in served)
        return [stream.embedding for stream in served]

    together = {}
    for depth in (1, 3):
        with VllmRun(worker, depth) as run:
            together[f"{depth=}"] = values(run)
            again = values(run)
            cached = run.core.stats()["prefix_cache_hits"]
    with VllmRun(worker, 2, num_blocks=-(-CONTEXT // BLOCK) + 1) as run:
        few = values(run)
    assert worker.loaded.pooling is not None
    return PooledAnswers(together, again, few, cached, worker.loaded.pooling, worker.loaded.bytes_per_block)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in PER_CHANGE else pytest.mark.soak) for name in CASES]
)
def both(
    request: pytest.FixtureRequest, pool: ProcessPoolExecutor, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PooledAnswers, list[list[float]]]:
    """Name of a model, its answers under this scheduler, and under vLLM's."""
    name, case = request.param, CASES[request.param]
    model = str(pooling_checkpoints.make(name, tmp_path_factory.mktemp("checkpoints") / name))
    mine = pool.submit(answer, model, case)
    requests = [(prompt, dict(case.fields or {}) if n % 2 else {}) for n, prompt in enumerate(prompts())]
    vllms = pool.submit(pool_by_vllm, model, case.task, requests, max_model_len=CONTEXT)
    return name, mine.result(), vllms.result()


def test_numbers_equal_vllms(both: tuple[str, PooledAnswers, list[list[float]]]) -> None:
    name, mine, vllms = both
    assert mine.model.task == CASES[name].task
    for found in (*mine.together.values(), mine.again, mine.preempted):
        for ours, theirs in zip(found, vllms, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert len({tuple(values) for values in vllms}) == len(vllms)


def test_only_models_that_read_backwards_alone_use_the_prefix_cache(
    both: tuple[str, PooledAnswers, list[list[float]]],
) -> None:
    name, mine, _ = both
    assert (mine.model.whole_prompts, mine.cached_tokens > 0) == (name in ENCODERS, name not in ENCODERS)
    assert (mine.bytes_per_block == 0) == (name in ENCODERS)


def chosen(model: str, prompt: list[int], config: dict[str, Any]) -> tuple[PoolingModel, list[float]]:
    """Return the model and the numbers of one prompt. Needs a new process."""
    worker = VllmWorker(model=model, dtype="float32", context=CONTEXT, chunk=CONTEXT, **config)
    with VllmRun(worker, 2) as run:
        [stream] = run.serve(VllmStream(prompt, ONE, pooling=Pooling.MODEL))
    assert worker.loaded.pooling is not None
    return worker.loaded.pooling, stream.embedding


OVERRIDES = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["a", "b"],
    "is_original_qwen3_reranker": True,
}
"""As for Qwen's own rerankers: the score is made of the logits of two tokens."""


@pytest.mark.parametrize(
    ("name", "task", "config"),
    [
        pytest.param("bert", "token_embed", {"pooler_config": {"task": "token_embed"}}, marks=pytest.mark.soak),
        ("qwen3-generator", "embed", {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}),
        ("qwen3-generator", "classify", {"hf_overrides": OVERRIDES}),
    ],
)
def test_settings_of_vllm_choose_what_is_computed(
    pool: ProcessPoolExecutor, tmp_path: Path, name: str, task: str, config: dict[str, Any]
) -> None:
    model, prompt = str(pooling_checkpoints.make(name, tmp_path / name)), prompts()[2]
    mine = pool.submit(chosen, model, prompt, config)
    settings = {"runner": "pooling", **config, "max_model_len": CONTEXT}
    [expected] = pool.submit(pool_by_vllm, model, task, [(prompt, {})], **settings).result()
    served, numbers = mine.result()
    assert (served.task, numbers) == (task, pytest.approx(expected, rel=1e-4, abs=1e-5))


def refusals(model: str, settings: list[dict[str, Any]]) -> list[str]:
    """Return the error of a worker with each of the settings. Needs a new process."""
    found = []
    for config in settings:
        with pytest.raises(LoadError) as refused:
            VllmWorker(**{"model": model, "dtype": "float32", "context": CONTEXT, "chunk": CONTEXT, **config}).enter(9)
        found.append(str(refused.value))
    return found


def test_what_does_not_work_with_a_pooler_is_refused_by_name(pool: ProcessPoolExecutor, tmp_path: Path) -> None:
    bad: dict[str, dict[str, Any]] = {
        "--enable-lora": {"max_loras": 1},
        "--speculative-config": {"speculation": Speculation("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=2)},
        "max_num_batched_tokens": {"chunk": CONTEXT // 2},
        "--pooler-config: ": {"pooler_config": {"tusk": "embed"}},
        "Unsupported task: 'classify'": {"pooler_config": {"task": "classify"}},
    }
    model = str(pooling_checkpoints.make("bert", tmp_path / "bert"))
    for name, error in zip(bad, pool.submit(refusals, model, list(bad.values())).result(), strict=True):
        assert name in error
