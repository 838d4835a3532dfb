"""GGUF files under vLLM: a file is converted once, and gives the tokens of transformers on the dequantised weights."""

import os
import sys
from pathlib import Path

from protocol.sampling import SamplingParams
from tests.integration.native import gguf_models
from tests.vllm.driver import VllmRun, VllmStream, VllmWorker
from tests.vllm.preloaded import processes

PROMPTS = ([5, 9, 250, 17, 3], [88, 101, 42, 7] * 10, [11])
TOKENS = 12


def answers(path: str, cache: str) -> list[list[int]]:
    """Return the greedy tokens of all prompts. Needs a new process, because it creates vLLM."""
    os.environ["XDG_CACHE_HOME"] = cache
    started = list[str]()
    sys.addaudithook(lambda event, given: started.append(given[0]) if event == "subprocess.Popen" else None)
    with VllmRun(VllmWorker(model=path, dtype="float32"), 2) as run:
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
        streams = run.serve(*(VllmStream(prompt, params) for prompt in PROMPTS))
    assert sys.executable not in started, "vLLM is imported once, also for a model that it has never seen"
    return [stream.tokens for stream in streams]


def test_two_workers_convert_a_file_once_and_give_the_tokens_of_its_weights(tmp_path: Path) -> None:
    family, cache = gguf_models.write(tmp_path / "model.gguf", "qwen3", "Q4_1"), tmp_path / "cache"
    with processes() as pool:
        running = [pool.submit(answers, str(family.path), str(cache)) for _ in range(2)]
        given = [future.result() for future in running]
    expected = [family.reference(prompt, TOKENS)[0] for prompt in PROMPTS]
    assert given == [expected, expected]
    (converted,) = (cache / "runahead" / "checkpoints").iterdir()
    assert (converted / "model.safetensors").is_file()
