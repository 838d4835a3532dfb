"""Compiles every kernel that a tiny model, its sampler and the attention of Llama 3 launch, for compute capability 9.0,
without a device.

`python -m tests.unit.native.cuda.compiled_for_hopper CHECKPOINT` prints the names of the kernels. The interpreter
accepts programs that the compiler refuses.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from protocol.steps import GrammarOutput
from services.worker.backends.native.kernels.cuda.attention import PagedAttention
from services.worker.backends.native.kernels.cuda.kernels import CudaKernels
from services.worker.backends.native.kernels.interface.attention import AttentionShape
from services.worker.backends.native.kernels.interface.kv_cache import CacheShape
from tests.unit.native.cuda.tiny_engine import TinyEngine
from tests.unit.native.interpreted import CopyingDevice

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}
SHARED = 227 * 1024
"""Bytes of shared memory that a program may use."""
compiled: set[tuple[object, ...]] = set()


def compile_launch(kernel: JITFunction[Any], *args: Any, grid: object, warmup: bool, **keywords: Any) -> None:
    """Take the place of a launch."""
    names = kernel.arg_names
    options = {name: value for name, value in keywords.items() if name not in names}
    given = inspect.signature(kernel.fn).bind(*args, **{n: v for n, v in keywords.items() if n in names})
    constants = {p.name: given.arguments[p.name] for p in kernel.params if p.is_constexpr}
    signature = {n: "constexpr" if n in constants else type_of(given.arguments[n]) for n in names}
    key = kernel.fn.__name__, *signature.values(), *constants.items(), *options.items()
    if key not in compiled:
        compiled.add(key)
        result = triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)
        assert result.metadata.shared <= SHARED, (kernel.fn.__name__, constants, result.metadata.shared)


def type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def attend(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> None:
    """Launch a step with a chunk, and a decode step of few rows."""
    network = CudaKernels(dtype, dtype, CopyingDevice()).network
    cache = network.kv_cache(CacheShape(1, kv_heads, head_dim, 16, dtype), 4)
    shape = AttentionShape(heads, head_dim, (0,), 1e-5, torch.ones(head_dim // 2))
    table, tokens = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(70, dtype=torch.int32)
    attention = PagedAttention(shape, cache, table, 70, dtype, processors=132)
    attention.begin(tokens, tokens)
    attention.write(0, torch.zeros(70, (heads + 2 * kv_heads) * head_dim, dtype=dtype))
    for rows in (70, 2):
        out = torch.zeros(rows, heads * head_dim, dtype=dtype)
        attention.attend(0, torch.zeros(2, 4, dtype=torch.int32), out)


@torch.inference_mode()
def main(model: Path) -> None:
    JITFunction.run = compile_launch
    dtype = torch.bfloat16
    engine = TinyEngine(model, CudaKernels(dtype, dtype, CopyingDevice()), dtype)
    vocab = engine.model.part.whole.vocab_size
    everything = {
        "repetition_penalty": 1.2, "logit_bias": ((3, 1.0),), "bad_words": ((2,),), "top_p": 0.9, "top_k": 5,
        "allowed_token_ids": np.arange(50, dtype=np.int32).tobytes(), "min_tokens": 9,
        "stop_token_ids": (4,),
    }  # fmt: skip
    engine.add(0, [1, 2, 3], temperature=1.0, **everything)
    engine.add(1, [1, 2, 3])
    words = np.full((1, -(-vocab // 32)), -1, np.int32)
    grammar = GrammarOutput(1, 1, np.array([0], np.int32).tobytes(), words.tobytes())
    engine.step([(0, 0, 3, True), (1, 0, 3, True)], grammar)
    engine.step([(1, 3, 1, True)])
    attend(dtype, 32, 8, 128)
    print("\n".join(sorted({str(name) for name, *_ in compiled})))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
