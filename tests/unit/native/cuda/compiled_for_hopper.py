"""Compiles the kernels that a tiny model, its sampler and the sizes of Llama 3 launch, for compute capability 9.0,
without a device.

`python -m tests.unit.native.cuda.compiled_for_hopper CHECKPOINT` prints each kernel with its shared memory and its
stack. The interpreter accepts programs that the compiler refuses, and programs that a device cannot hold.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from protocol.steps import GrammarOutput
from services.worker.kernels.cuda.attention import PagedAttention
from services.worker.kernels.cuda.kernels import CudaKernels
from services.worker.kernels.interface.attention import AttentionShape
from services.worker.kernels.interface.kv_cache import CacheShape
from services.worker.kernels.interface.sampling import DrawColumns
from tests.benchmarks.gpu.shapes import SHAPES
from tests.unit.native.attention_cases import AttentionCase
from tests.unit.native.cuda.tiny_engine import TinyEngine
from tests.unit.native.interpreted import CopyingDevice

SHARED = 227 * 1024
"""Bytes of shared memory that a program may use."""
STACK = 1024
"""Bytes of a thread's stack. A product that does not fit into registers takes many kilobytes, which the driver
allocates for every thread that the device can hold."""
F32, BF16 = torch.float32, torch.bfloat16
BLOCK_SIZE, PROCESSORS = 16, 132
ATTENTION = [
    (AttentionCase(32, 8, 128, BLOCK_SIZE), BF16),
    (AttentionCase(4, 2, 64, BLOCK_SIZE, window=99, normed=True), F32),
]
"""Llama 3.1 8B, whose programs are the largest ones, and the model of the tests in float32."""
compiled: dict[int, Any] = {}
"""By identity, because Triton returns the same object for equal launches."""
launch = JITFunction.run


class Hopper:
    """Triton's driver without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launch(kernel: JITFunction[Any], *args: Any, warmup: bool, **keywords: Any) -> None:
    """Take the place of a launch. It is compiled for its arguments: for aligned pointers, and for numbers that are 1 or
    multiples of 16."""
    result = launch(kernel, *args, warmup=True, **keywords)
    if id(result) not in compiled:
        compiled[id(result)] = result
        shared, stack = result.metadata.shared, stack_of(result.asm["cubin"])
        print(kernel.fn.__name__, shared, stack)
        assert shared <= SHARED, (keywords, shared)
        assert stack <= STACK, (keywords, stack)


def stack_of(binary: bytes) -> int:
    """Return the bytes of a thread's stack."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", usage)))


def attend(case: AttentionCase, dtype: torch.dtype) -> None:
    """Launch a step with a chunk, and decode steps of few and of many rows."""
    network = CudaKernels(dtype, CopyingDevice()).network
    heads, head_dim, most = case.heads, case.head_dim, 512
    cache = network.kv_cache(CacheShape(1, case.kv_heads, head_dim, BLOCK_SIZE, dtype), 4)
    ones = torch.ones(1, head_dim // 2)
    shape = AttentionShape(heads, head_dim, (case.window,), 1e-5, ones, ones, (0,), head_dim**-0.5, 1, (0,), (0,))
    table, tokens = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(most, dtype=torch.int32)
    attention = PagedAttention(shape, cache, table, most, dtype, PROCESSORS)
    attention.begin(tokens, tokens)
    norms = (torch.ones(head_dim), torch.ones(head_dim)) if case.normed else None
    attention.write(0, torch.zeros(most, (heads + 2 * case.kv_heads) * head_dim, dtype=dtype), norms)
    for rows, tiles in ((70, 2), (2, 2), (most, most)):
        out = torch.zeros(rows, heads * head_dim, dtype=dtype)
        attention.attend(0, torch.zeros(tiles, 4, dtype=torch.int32), out)


def compute(name: str) -> None:
    """Launch what is beside products and attention in a decode step, and the choice of tokens."""
    shape, kernels = SHAPES[name], CudaKernels(BF16, CopyingDevice())
    network, hidden, mlp = kernels.network, shape.hidden_size, shape.intermediate_size
    residual, normed = torch.zeros(4, hidden), torch.zeros(4, hidden, dtype=BF16)
    network.gather(torch.zeros(4, dtype=torch.int32), normed, residual)
    for delta in (None, normed):
        network.norm(residual, delta, torch.zeros(hidden), 1e-5, normed)
    network.gate_and_multiply(torch.zeros(4, 2 * mlp, dtype=BF16), torch.zeros(4, mlp, dtype=BF16))
    one, logits = np.ones(1, np.int32), torch.zeros(1, shape.vocab_size)
    kernels.sampling.greedy(logits)
    for min_p, top_k, top_p in ((0.0, 0, 1.0), (0.1, 5, 0.9)):
        temperature, least, share = (np.full(1, value, np.float32) for value in (1.0, min_p, top_p))
        columns = temperature, least, one * top_k, share, np.zeros(1, np.uint64), one
        kernels.sampling.choose(logits, DrawColumns(*columns))


@torch.inference_mode()
def main(model: Path) -> None:
    driver.set_active(Hopper())
    JITFunction.run = compile_launch
    engine = TinyEngine(model, CudaKernels(BF16, CopyingDevice()), BF16)
    vocab = engine.model.part.whole.vocab_size
    everything = {
        "repetition_penalty": 1.2, "logit_bias": ((3, 1.0),), "bad_words": ((2,),), "top_p": 0.9, "top_k": 5,
        "allowed_token_ids": np.arange(50, dtype=np.int32).tobytes(), "min_tokens": 9,
        "stop_token_ids": (4,),
    }  # fmt: skip
    engine.add(0, [1, 2, 3], temperature=1.0, **everything)
    engine.add(1, [1, 2, 3])
    words = np.full((1, -(-vocab // 32)), -1, np.int32)
    grammar = GrammarOutput(1, 1, np.array([0], np.int32).tobytes(), memoryview(words.tobytes()))
    engine.step([(0, 0, 3, True), (1, 0, 3, True)], grammar)
    engine.step([(1, 3, 1, True)])
    for case, dtype in ATTENTION:
        attend(case, dtype)
    compute("llama-3.1-8b")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
