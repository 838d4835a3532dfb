"""The runner prepares step N+1 while step N computes: equal tokens at every depth, and what happens when a step fails.

The driver fills buffers with garbage when a step has ended, and overwrites the host's columns after each prepared step.
"""

import gc
import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from protocol.membership import InitializeCache, Speculation
from protocol.sampling import Pooling, SamplingParams
from services.checkpoint import DEMO_MODEL
from services.worker.backends.native.compute_thread import ComputeThread
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.model.forward import ForwardPass
from services.worker.backends.native.step import PreparedStep
from services.worker.runner import RanksLost
from tests.integration.native.conftest import Family
from tests.integration.native.driver import GREEDY, NUM_BLOCKS, DrivenRequest, Launched, RunnerDriver, Score
from tests.matrix import covering
from tests.waiting import wait_until

PROMPT = [5, 9, 31, 5, 9, 31, 5, 9, 31, 5, 9, 44, 7, 5, 9, 31, 5]
WARM = {"max_tokens": 100, "temperature": 0.9}
REQUESTS = [
    (PROMPT, GREEDY),
    (PROMPT[3:], SamplingParams(**WARM, seed=3, top_k=20)),
    (PROMPT[5:], SamplingParams(**WARM, seed=4, presence_penalty=0.9, repetition_penalty=1.3, logprobs=3)),
    (PROMPT[1:9], SamplingParams(**WARM, seed=5, top_p=0.7, min_p=0.05, bad_words=((9, 31),))),
    (PROMPT * 2, SamplingParams(100, 0.0, prompt_logprobs=2, logprobs=0)),
    (PROMPT[2:], SamplingParams(**WARM, seed=6, frequency_penalty=0.5, min_tokens=4, stop_token_ids=(9, 31, 5))),
    (PROMPT[:4], SamplingParams(**WARM, seed=7, logit_bias=((17, 4.0),))),
    (PROMPT[4:], GREEDY),
]
TOKENS = 12


def serve(driver: RunnerDriver, depth: int) -> list[DrivenRequest]:
    """Serve all requests in three slots, `depth` steps in flight: they join, leave, are preempted, and skip steps."""
    driver.free_slots = [0, 1, 2]
    waiting, running, done = deque(enumerate(REQUESTS)), {}, {}
    flying: deque[Launched] = deque()
    preempted = False
    number = 0
    while waiting or running:
        number += 1
        while waiting and driver.free_slots:
            name, (prompt, params) = waiting.popleft()
            running[name] = driver.add(list(prompt), params)
        in_flight = {request.slot for launched in flying for request, _ in launched.rows}
        for name, request in list(running.items()):
            if len(request.output) >= TOKENS and request.slot not in in_flight:
                done[name] = running.pop(name)
                driver.finish(request)
            elif name == 1 and len(request.output) >= 4 and request.slot not in in_flight and not preempted:
                driver.free_slots.append(request.slot)
                running[name], preempted = driver.preempt(request), True
        rows = [
            (request, min(6, request.known - request.computed))
            for name, request in running.items()
            if request.promised < TOKENS and (number + name) % 5
        ]
        if rows:
            flying.append(driver.launch(rows))
        while flying and (len(flying) == depth or not rows):
            driver.collect(flying.popleft())
    return [done[name] for name in sorted(done)]


SPECULATIONS = {"none": None, "ngram": Speculation("ngram", 3, prompt_lookup_min=1, prompt_lookup_max=4)}
CONFIGS: dict[str, dict[str, Any]] = {
    "float32": {},
    "two threads": {"threads": 2},
    "bfloat16": {"dtype": "bfloat16", "batch_invariant": True},
    "int8": {"quantization": "int8"},
    "reference": {"kernels": "reference"},
}


def scores_of(request: DrivenRequest, config: str) -> dict[int, Score]:
    """Log-probabilities up to the last token; the bits of the reference depend on the batch."""
    end = 0 if config == "reference" else len(request.prompt) + TOKENS
    return {at: score for at, score in request.scores.items() if at < end}


@pytest.mark.parametrize(("config", "speculation"), covering(list(CONFIGS), list(SPECULATIONS), strength=1))
def test_tokens_are_equal_at_every_depth(make_family: Callable[[str], Family], config: str, speculation: str) -> None:
    answers = []
    for depth in (1, 3):
        driver = RunnerDriver(
            DEMO_MODEL if config == "int8" else make_family("llama-tied").path,
            speculation=SPECULATIONS[speculation],
            keeps_logits=False,
            **CONFIGS[config],
        )
        requests = serve(driver, depth)
        answers.append([(request.output[:TOKENS], scores_of(request, config)) for request in requests])
    assert answers[0] == answers[1]
    assert [len(output) for output, _ in answers[0]] == [TOKENS] * len(REQUESTS)
    if speculation != "none":
        assert sum(request.drafted for request in requests) > 0
        assert config == "reference" or sum(request.accepted for request in requests) > 0


def test_embeddings_are_equal_at_every_depth(llama: Family) -> None:
    found = []
    for depth in (1, 2, 3):
        driver = RunnerDriver(llama.path, keeps_logits=False)
        requests = [driver.add(PROMPT, pooling=kind) for kind in (Pooling.MEAN, Pooling.LAST)]
        requests.append(driver.add(PROMPT))
        driver.generate(requests, 1, chunk=5, depth=depth)
        found.append([request.embedding for request in requests])
    assert found[0] == found[1] == found[2]
    assert found[0][0] != found[0][1]


class HeldForward:
    """Forward passes that wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let_go = threading.Semaphore(0), threading.Semaphore(0)
        run = ForwardPass.run

        def held(*args: Any) -> Any:
            self.begun.release()
            self.let_go.acquire()
            return run(*args)

        monkeypatch.setattr(ForwardPass, "run", held)

    def let_all_go(self) -> None:
        self.let_go.release(1000)


def test_steps_are_prepared_while_one_computes(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = RunnerDriver(llama.path)
    alone = expected.add(PROMPT)
    expected.generate([alone], 3)
    prepared: list[PreparedStep] = []
    execute = NativeEpoch.execute
    monkeypatch.setattr(NativeEpoch, "execute", lambda self, step: (prepared.append(step), execute(self, step))[1])
    held = HeldForward(monkeypatch)
    driver = RunnerDriver(llama.path, keeps_logits=False)
    request = driver.add(PROMPT)
    flying = [driver.launch([(request, len(PROMPT))])]
    held.begun.acquire()
    # Returns at once: two steps are ready while the first computes
    flying += [driver.launch([(request, 1)]) for _ in range(2)]
    assert not held.begun.acquire(blocking=False)
    held.let_all_go()
    for launched in flying:
        driver.collect(launched)
    assert request.output == alone.output
    for step in prepared:
        arrays = [*step.plan[1:], *vars(step.plan.rows).values()]
        assert not any(array.flags.writeable for array in arrays)


def test_a_failed_step_fails_alone_and_in_its_turn(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = RunnerDriver(llama.path, keeps_logits=False)
    expected = alone.add(PROMPT)
    alone.generate([expected], 2)
    driver = RunnerDriver(llama.path, keeps_logits=False)
    run, forwards = ForwardPass.run, itertools.count(1)

    def run_or_fail(self: ForwardPass, *args: Any) -> Any:
        if next(forwards) == 2:
            raise RuntimeError("broken")
        return run(self, *args)

    monkeypatch.setattr(ForwardPass, "run", run_or_fail)
    good, bad = driver.add(PROMPT), driver.add(PROMPT[2:])
    first = driver.launch([(good, len(PROMPT))])
    second = driver.launch([(bad, len(PROMPT) - 2)])
    third = driver.launch([(good, 1)])
    driver.collect(first)
    with pytest.raises(RuntimeError, match="broken"):
        second.output.get()
    driver.collect(third)
    assert good.output == expected.output


def test_the_end_of_an_epoch_with_steps_in_flight(llama: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = RunnerDriver(llama.path, keeps_logits=False)
    request = driver.add(PROMPT)
    driver.generate([request], 5)
    expected = request.output
    with monkeypatch.context() as patch:
        held = HeldForward(patch)
        used, submit = list[ComputeThread](), ComputeThread.submit
        patch.setattr(ComputeThread, "submit", lambda thread, job: (used.append(thread), submit(thread, job))[1])
        request = driver.add(PROMPT)
        first = driver.launch([(request, len(PROMPT))])
        held.begun.acquire()
        second = driver.launch([(request, 1)])
        leaving = threading.Thread(target=driver.runner.leave)
        leaving.start()
        wait_until(lambda: used[0].closing)
        held.let_all_go()
        leaving.join()
        first_error = None
        try:
            first.output.get()
        except RanksLost as error:
            first_error = error
        assert first_error is None or "the epoch has ended" in str(first_error)
        with pytest.raises(RanksLost, match="the epoch has ended"):
            second.output.get()
    with pytest.raises(RuntimeError, match="init_kv_cache must be called first"):
        driver.runner.release(np.zeros(0, np.int32))
    driver.load()
    driver.runner.init_kv_cache(InitializeCache(NUM_BLOCKS, driver.max_model_len))
    again = driver.add(PROMPT)
    driver.generate([again], 5, depth=2)
    assert again.output == expected


def test_a_step_before_its_grammar_does_not_keep_an_epoch(llama: Family) -> None:
    driver = RunnerDriver(llama.path, keeps_logits=False)
    driver.runner.execute_model(driver.plan([(driver.add(PROMPT), len(PROMPT))]))
    driver.runner.leave()
    driver.runner.shutdown()


def test_the_compute_thread_ends_with_its_runner(llama: Family) -> None:
    gc.collect()
    driver = RunnerDriver(llama.path, keeps_logits=False)
    driver.generate([driver.add(PROMPT)], 2, depth=2)
    mine = [each for each in threading.enumerate() if each.name == "compute"]
    driver.runner.shutdown()
    assert sum(each.is_alive() for each in mine) == len(mine) - 1
