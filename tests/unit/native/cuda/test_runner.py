"""The whole runner on interpreted kernels, with drafts, against the reference without."""

from pathlib import Path

import torch
from msgspec.structs import replace

from protocol.membership import Assignment, Speculation
from services.config import WorkerConfig
from services.worker.backends.native.model.forward import most_rows
from services.worker.kernels.cuda.kernels import CudaKernels
from tests.integration.native.driver import GREEDY, DrivenRequest, GarblingRunner, RunnerDriver
from tests.unit.native.cuda.tiny_engine import write_tiny_model
from tests.unit.native.interpreted import CopyingDevice

TOKENS = 8
DRAFTS = Speculation("ngram", 2, prompt_lookup_min=1, prompt_lookup_max=3)


class SeparateMemory(CopyingDevice):
    """A device as the runner sees a GPU."""

    is_host = False


def answers(driver: RunnerDriver) -> list[DrivenRequest]:
    requests = [driver.add(prompt, GREEDY) for prompt in ([5, 6, 7, 5, 6, 7, 5], [3], [9, 9, 9])]
    driver.generate(requests, TOKENS, chunk=4, depth=2)
    return requests


def test_buffers_have_room_for_every_draft() -> None:
    """Recorded graphs keep the addresses of buffers, so none is allocated again."""
    plain = Assignment(1, 0, 1, 16, num_slots=8, max_num_batched_tokens=128)
    assert most_rows(plain, 64) == {"tokens": 128, "tiles": 10, "sampled": 8}
    for drafts, sampled in ((2, 24), (15, 128), (16, 128)):
        speculation = Speculation("ngram", drafts)
        assert most_rows(replace(plain, speculation=speculation), 64)["sampled"] == sampled


def test_drafts_change_no_token(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path)
    expected = answers(RunnerDriver(model, keeps_logits=False, kernels="reference"))
    config = WorkerConfig(model=str(model), threads=1, kernels="reference")
    kernels = CudaKernels(torch.float32, SeparateMemory())
    runner = GarblingRunner(config, create_kernels=lambda _: kernels)
    driver = RunnerDriver(model, runner=runner, speculation=DRAFTS, keeps_logits=False)
    found = answers(driver)
    assert [each.output[:TOKENS] for each in found] == [each.output[:TOKENS] for each in expected]
    assert sum(each.drafted for each in found) > 0
    runner.shutdown()
