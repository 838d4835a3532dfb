"""`python -m services.worker.kernels.cpu` compiles every kernel before the first start of a worker.

Each processor core compiles other kernels. The variants of one kernel share a file of numba's cache, which only one
process may write.
"""

import multiprocessing
import os
from collections.abc import Callable, Sequence

import services.worker.kernels.cpu.compiled.routing
import services.worker.kernels.cpu.compiled.rows  # noqa: F401 - both are compiled when imported
from services.worker.kernels.cpu.compiled.attention import attention_kernel, write_kernel
from services.worker.kernels.cpu.compiled.block_formats import KINDS
from services.worker.kernels.cpu.compiled.choosing import choose_kernel
from services.worker.kernels.cpu.compiled.coded_product import coded_product_kernel, format_table
from services.worker.kernels.cpu.compiled.copying import copy_kernel
from services.worker.kernels.cpu.compiled.draft import draft_kernel
from services.worker.kernels.cpu.compiled.logit_rules import mask_kernel, rules_kernel
from services.worker.kernels.cpu.compiled.logprobs import logprobs_kernel
from services.worker.kernels.cpu.compiled.most_likely import most_likely_kernel
from services.worker.kernels.cpu.compiled.ngram import ngram_kernel
from services.worker.kernels.cpu.compiled.norm_and_gate import gate_kernel, norm_kernel
from services.worker.kernels.cpu.compiled.product import product_kernel
from services.worker.kernels.cpu.compiled.quantized import float32_rows_kernel, pack_kernel, rows_kernel
from services.worker.kernels.cpu.compiled.rotary import rotary_kernel
from services.worker.kernels.cpu.recording import replay_kernel
from services.worker.kernels.selection import OWN_BFLOAT16, PAIRS, TILES, WIDE, processor_features

SINGLE = (
    *(most_likely_kernel, rules_kernel, mask_kernel, logprobs_kernel, ngram_kernel, draft_kernel),
    *(rotary_kernel, replay_kernel, pack_kernel),
)
"""Kernels without variants."""
FEATURES = processor_features()
HALVES = [(False,), (True,)] if {*OWN_BFLOAT16} & FEATURES else [(False,)]
"""Activations are bfloat16, or not."""
CACHES = [(False, False), (False, True), *([(True, True)] if (True,) in HALVES else [])]
"""The same, and whether keys and values are."""
COMMON = ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1")
"""Formats whose coders are compiled before they are needed."""
# The kernels that take longest are the first ones.
KERNELS: list[tuple[Callable[..., object], Sequence[tuple[object, ...]]]] = [
    (attention_kernel, CACHES),
    (coded_product_kernel, [(1,)]),
    *((format_table, [(KINDS.index(name),)]) for name in COMMON),
    (product_kernel, [(WIDE in FEATURES, half, 1) for half in (False, True)]),
    (rows_kernel, [(False,), (True,)]),
    (float32_rows_kernel, [(WIDE in FEATURES, half) for half in (False, True)]),
    (norm_kernel, HALVES),
    (gate_kernel, HALVES),
    (write_kernel, [*CACHES, *([(True, True, True)] if TILES in FEATURES else [])]),
    (copy_kernel, [(False,), (True,)]),
    (choose_kernel, [(1,)]),
    *((kernel, [()]) for kernel in SINGLE),
]
"""Each kernel with the arguments of its variants."""
if TILES in FEATURES:
    from services.worker.kernels.cpu.compiled.tile_attention import tile_attention_kernel
    from services.worker.kernels.cpu.compiled.tile_codes import tile_coder
    from services.worker.kernels.cpu.compiled.tile_product import decoder, tile_product_kernel

    KERNELS.insert(0, (tile_product_kernel, [(False, 1), (True, 1)]))
    KERNELS.insert(1, (tile_attention_kernel, [()]))
    KERNELS.extend((each, [(KINDS.index(name),)]) for each in (tile_coder, decoder) for name in COMMON)
elif PAIRS in FEATURES:
    from services.worker.kernels.cpu.compiled.pair_product import pair_product_kernel

    KERNELS.append((pair_product_kernel, [(1,)]))


def compile_kernel(number: int) -> None:
    kernel, variants = KERNELS[number]
    for arguments in variants:
        kernel(*arguments)


if __name__ == "__main__":
    # Forked, because importing torch takes seconds; it has no threads yet.
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        pool.map(compile_kernel, range(len(KERNELS)), chunksize=1)
        pool.close()
        pool.join()  # leaving the block kills processes that have not ended
