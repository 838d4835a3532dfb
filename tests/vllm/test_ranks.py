"""Scheduler and workers as processes: one rank and two give the same answers, even if a rank is lost."""

import math
import os
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from protocol.codec import encode
from protocol.kv_groups import MAX_GROUPS, ONE_GROUP
from protocol.lora import LoRAAdapter
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.requests import EnginePhase, FinishReason
from protocol.sampling import GrammarKind, Pooling, SamplingParams, StructuredOutputParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, ReleaseSlots, SchedulerOutput
from services.checkpoint import DEMO_MODEL, adapter_digest
from services.config import SchedulerConfig
from services.scheduler.policies import make_policy
from services.worker.backends.vllm.shared_memory import DIRECTORY, PREFIX
from services.worker.result_sender import EXIT_STUCK
from tests.integration.native.engine_driver import EngineDriver
from tests.integration.native.test_left_out import NGRAM, ServedAnswers, assert_equal, limits, requests
from tests.integration.scheduler.engine import FrontendConnection, engine
from tests.preloaded import PreloadedProcess
from tests.ranks.group import RankGroup, RankPool
from tests.vllm import checkpoints
from tests.vllm.parameter_cases import DEPTHS
from tests.vllm.preloaded import processes

SCHEDULER: dict[str, object] = {
    "block_size": 32,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "settle_seconds": 0,
}
WORKER: dict[str, object] = {
    "backend": "vllm", "threads": 1, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True,
}  # fmt: skip
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
DATE = StructuredOutputParams(GrammarKind.REGEX, "[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}){8}")
NGRAM_CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}
NUMBERS = range(12)
STRUCTURED = (3, 7, 11)
EMBEDDED = 50


@pytest.fixture(scope="module", autouse=True)
def preloaded() -> None:
    """Start the fork server with vLLM imported."""
    with processes():
        pass


@pytest.fixture(scope="module", autouse=True)
def before() -> set[str]:
    """Names in /dev/shm before these tests. Two names are added as a killed worker leaves them."""
    names = set(os.listdir(DIRECTORY))
    (DIRECTORY / f"{PREFIX}leftover").mkdir(mode=0o700, exist_ok=True)
    (DIRECTORY / f"{PREFIX}leftover-tp:0-[0-1]-cpushm_0").touch(mode=0o600)
    return names


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[Path]:
    """The processes' folder for temporary files, whose path is short enough for sockets, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="ranks-", dir="/tmp") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", tempfile.gettempdir())
        patch.setenv("TMPDIR", directory)
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(directory)


def submit(client: FrontendConnection, first: int = 0) -> list[int]:
    """Submit greedy, sampled and structured requests. Returns their numbers."""
    for number in NUMBERS:
        prompt = [(number * 37 + i * 11) % 4000 for i in range(5 + 17 * number)]
        params = SamplingParams(
            max_tokens=20,
            temperature=float(number % 2),
            seed=number,
            repetition_penalty=1.0 + number % 3 / 10,
            logprobs=2 if number % 4 == 2 else None,
            prompt_logprobs=1 if number == 6 else None,
        )
        structured = DATE if number in STRUCTURED else None
        client.generate(first + number, prompt, params, structured=structured)
    prompt = [(i * 13) % 4000 for i in range(100)]
    params = SamplingParams(max_tokens=1, temperature=0.0)
    client.generate(first + EMBEDDED, prompt, params, pooling=Pooling.MEAN)
    return [first + number for number in NUMBERS]


def embedding(client: FrontendConnection, first: int = 0) -> list[float]:
    client.wait_finished(first + EMBEDDED)
    return np.frombuffer(client.embeddings[first + EMBEDDED], np.float32).tolist()


Tokens = list[list[int]]


def answers(client: FrontendConnection, numbers: list[int]) -> Tokens:
    client.wait_finished(*numbers)
    assert {client.finished[number].reason for number in numbers} == {FinishReason.LENGTH}
    for number in STRUCTURED:
        text = TOKENIZER.decode(client.tokens[numbers[number]])
        assert text[:5].replace("-", "").isdigit(), text
        assert text[4] == text[7] == "-", text
    return [client.tokens[number] for number in numbers]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokens, FrontendConnection]:
    """Answers of one rank at depth one, and the client that received them."""
    with engine(tmp_path_factory.mktemp("one"), SCHEDULER | {"batch_queue_depth": 1}, WORKER) as running:
        client = running.connect()
        tokens = answers(client, submit(client))
        embedding(client)
        assert running.stop() == (0, 0)
    return tokens, client


def test_two_ranks_answer_like_one_also_after_a_rank_was_lost(
    expected: tuple[Tokens, FrontendConnection], tmp_path: Path, before: set[str]
) -> None:
    """Each rank samples and proposes drafts for itself with the same random numbers; only the output rank reports.
    After a lost rank was replaced, delivered tokens stay and the answers are the same.

    The rank that stays frees the memory that an ended epoch shared. vLLM shares memory with AVX-512 only."""
    tokens, one = expected
    settings = {"tensor_parallel_size": 2, "batch_queue_depth": 2, "speculative_config": NGRAM_CONFIG}
    settings |= {"enable_lora": True, "max_num_seqs": 8}
    with engine(tmp_path, SCHEDULER | settings, WORKER, 2) as running:
        client = running.connect()
        assert client.wait_ready().info["backend"] == "vllm"
        numbers = submit(client)
        assert answers(client, numbers) == tokens
        assert embedding(client) == pytest.approx(embedding(one), abs=1e-4)
        assert client.logprobs[2].keys() == one.logprobs[2].keys()
        assert client.logprobs[6].keys() == one.logprobs[6].keys()
        assert sum(client.finished[number].num_accepted_tokens for number in numbers) > 0

        adapter, link = checkpoints.make_adapter(tmp_path / "adapter", DEMO_MODEL, 1), tmp_path / "link"
        link.symlink_to(f"/proc/self/task/{running.workers[1].pid}/root{adapter}")  # leads nowhere in the other process
        lora = LoRAAdapter("a", str(link), adapter_digest(adapter))
        ends = []
        for number in (60, 61):  # one rank cannot load it, then both can
            client.generate(number, [5] * 70, SamplingParams(max_tokens=1, temperature=0.0), lora=lora)
            client.wait_finished(number)
            ends.append((client.finished[number].reason, len(client.tokens[number])))
            link.unlink()
            link.symlink_to(adapter)
        assert ends == [(FinishReason.ERROR, 0), (FinishReason.LENGTH, 1)]  # so no step is in flight

        first = shared_pages(running.workers[0])
        assert len(first) == torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        assert all(first.values())
        assert not created(before), "no name lasts longer than the groups take to form"
        running.workers[1].kill()
        client.wait_state(lambda state: state.phase is not EnginePhase.READY)
        running.add_worker()
        client.wait_ready()
        second = shared_pages(running.workers[0])
        assert len(second) == 2 * len(first)
        assert {name: second[name] for name in first} == dict.fromkeys(first, 0)

        numbers = submit(client, 100)
        client.read_until(lambda: client.tokens[numbers[0]])
        running.workers[2].kill()
        running.add_worker()
        running.add_worker()  # the other rank may wait in memory shared with the lost one: then it ends too
        assert answers(client, numbers) == tokens
        assert embedding(client, 100) == pytest.approx(embedding(one), abs=1e-4)
        _, left, *others = running.stop()
        assert (left in (0, EXIT_STUCK), others) == (True, [-signal.SIGKILL, -signal.SIGKILL, 0, 0])


class UnevenSteps:
    """`LaunchedSteps` on ranks that have read more or fewer messages when they continue a step: the output rank has
    read all that were sent, and the others continue after each."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._sent: list[bytes] = []

    def launch(self, plan: SchedulerOutput) -> None:
        self._sent.append(encode(plan))

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._sent.append(encode(grammar))

    def release(self, slots: bytes) -> None:
        self._sent.append(encode(ReleaseSlots(1, slots)))

    def ended(self) -> bool:
        sent, self._sent = self._sent, []
        output = self._group.ranks[self._group.output]
        pieces = {rank: [sent] if rank is output else [[each] for each in sent] for rank in self._group.ranks}
        for rank, own in pieces.items():
            for messages in own:
                rank.send("steps", messages)
        results = {rank: [rank.receive() for _ in own] for rank, own in pieces.items()}
        return results[output][-1] > 0

    def result(self) -> ModelRunnerOutput:
        return msgspec.msgpack.decode(self._group.call("result")[self._group.output], type=ModelRunnerOutput)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    assert not any(pool.close()), "a rank exited with an error"


class RankLayout(NamedTuple):
    tensor_parallel: int = 1
    stages: int = 1


def served(
    pool: RankPool,
    layout: RankLayout,
    depth: int,
    late: int,
    speculation: Speculation | None,
    model: Path = DEMO_MODEL,
    policy: str = "chunked",
) -> ServedAnswers:
    """Serve constrained and other requests with ranks of their own."""
    size = replace(limits(40, depth, speculation, layout.stages), block_size=32)
    if policy == "phased":
        size = replace(size, max_num_batched_tokens=size.block_size, leaves_rows_out=False)
    sizes = size.block_size, size.num_slots, size.max_num_batched_tokens, size.max_model_len
    settings = {"backend": "vllm", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    group = RankGroup(pool.take(math.prod(layout)), model, *layout, **settings)
    assignment = Assignment(1, 0, 1, *sizes, speculation=speculation, max_kv_groups=MAX_GROUPS)
    loaded = group.load(assignment, lambda phase, fraction: None)
    assert {each.groups for each in group.loaded} == {loaded.groups}
    size = replace(size, groups=loaded.groups or ONE_GROUP)
    group.init_kv_cache(InitializeCache(size.num_blocks, size.max_model_len))
    drafts = 0 if speculation is None else speculation.num_speculative_tokens
    steps, streams = UnevenSteps(group), requests()
    config = SchedulerConfig(
        batching_policy=policy, max_num_batched_tokens=size.max_num_batched_tokens, block_size=size.block_size
    )
    driver = EngineDriver(
        steps, size, loaded.vocab_size, depth, late, drafts, patience=0.0, policy=make_policy(config, size)
    )
    answers = driver.serve(streams)
    group.call("leave")
    return ServedAnswers(answers, [stream.scores for stream in streams], driver.core.store.counters)


@pytest.fixture(scope="module")
def wanted(pool: RankPool) -> ServedAnswers:
    """Answers of one rank at depth one."""
    return served(pool, RankLayout(), 1, 0, None)


STAGES = RankLayout(stages=2)
IN_SOAK = pytest.mark.soak
"""Cells whose faults other cells or one rank's tests (test_left_out.py) find; `make soak` runs them."""


@pytest.mark.parametrize(
    ("policy", "layout", "depth", "late", "speculation"),
    [
        ("chunked", RankLayout(2), 3, 2, NGRAM),
        ("chunked", STAGES, 2, 3, None),
        ("phased", STAGES, 3, 0, None),
        ("balanced", RankLayout(2, 2), 3, 2, NGRAM),
        pytest.param("chunked", RankLayout(2), 2, 1, None, marks=IN_SOAK),
        pytest.param("chunked", STAGES, 3, 4, NGRAM, marks=IN_SOAK),
        pytest.param("chunked", STAGES, 2, 0, NGRAM, marks=IN_SOAK),
        pytest.param("balanced", STAGES, 2, 0, None, marks=IN_SOAK),
        pytest.param("balanced", STAGES, 2, 0, NGRAM, marks=IN_SOAK),
        pytest.param("phased", STAGES, 2, 0, None, marks=IN_SOAK),
    ],
)
def test_ranks_answer_like_one_and_leave_out_the_same_rows(
    policy: str,
    layout: RankLayout,
    depth: int,
    late: int,
    speculation: Speculation | None,
    pool: RankPool,
    wanted: ServedAnswers,
) -> None:
    """The output rank decides for all of them; earlier stages receive its outcomes."""
    got = served(pool, layout, depth, late, speculation, policy=policy)
    assert_equal(got, wanted)
    assert not late or got.counters["left_out_rows_total"] > 3


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        pytest.param(name, depth, marks=() if (name, depth) == ("gemma3", 3) else IN_SOAK)
        for name in ("gemma3", "qwen3")
        for depth in DEPTHS
    ],
)
def test_stages_of_other_models_answer_like_one_rank(name: str, depth: int, pool: RankPool, tmp_path: Path) -> None:
    """Gemma 3's stages have layers of different kinds. That one rank answers like vLLM is in test_architectures.py."""
    model = checkpoints.make(name, tmp_path / name)
    answers = served(pool, RankLayout(), 1, 0, None, model)
    assert_equal(served(pool, STAGES, depth, 0, None, model), answers)


def test_two_stages_answer_like_one_also_after_each_was_killed(
    expected: tuple[Tokens, FrontendConnection], tmp_path: Path
) -> None:
    """The last stage samples, and sends tokens and drafts to the first one."""
    tokens, one = expected
    settings = {"pipeline_parallel_size": 2, "speculative_config": NGRAM_CONFIG}
    with engine(tmp_path, SCHEDULER | settings, WORKER, 2) as running:
        client = running.connect()
        numbers = submit(client)
        assert answers(client, numbers) == tokens
        assert embedding(client) == pytest.approx(embedding(one), abs=1e-4)
        assert client.logprobs[2].keys() == one.logprobs[2].keys()
        assert sum(client.finished[number].num_accepted_tokens for number in numbers) > 0
        for killed in range(2):  # the first stage, then the last one
            numbers = submit(client, 100 * (killed + 1))
            while not client.tokens[numbers[0]]:
                client.receive()
            running.workers[killed].kill()
            running.add_worker()
            assert answers(client, numbers) == tokens
        assert running.stop() == (0, -signal.SIGKILL, -signal.SIGKILL, 0, 0)


def shared_pages(process: PreloadedProcess) -> dict[str, int]:
    """KiB of each group's shared memory that `process` has mapped, by the name of the group."""
    pages: dict[str, int] = {}
    name = ""
    for line in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            name = Path(" ".join(rest[4:])).name.partition("-tp:")[0]
        elif head == "Rss:" and name.startswith(PREFIX):
            pages[name] = pages.get(name, 0) + int(rest[0])
    return pages


def created(before: set[str]) -> set[str]:
    """Names of shared memory in /dev/shm that were not there before: vLLM's and Python's own."""
    kinds = (PREFIX, "psm_")
    return {name for name in set(os.listdir(DIRECTORY)) - before if name.startswith(kinds) or "cpushm" in name}


def test_no_shared_memory_is_left(before: set[str]) -> None:
    """Neither by the groups above, some of whose ranks were killed, nor by a worker that was killed before them."""
    assert not created(before)


def test_no_sockets_are_left(scratch: Path) -> None:
    assert [path for path in scratch.rglob("*") if path.is_socket()] == []
