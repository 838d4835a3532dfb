"""`python -m services.worker.backends.native.kernels.cpu` compiles every kernel, so that the first start need not."""

import services.worker.backends.native.kernels.cpu.compiled.rows  # noqa: F401 - compiled when it is imported
from services.worker.backends.native.kernels.cpu.compiled.attention import attention_kernel, write_kernel
from services.worker.backends.native.kernels.cpu.compiled.choosing import draw_kernel, greedy_kernel
from services.worker.backends.native.kernels.cpu.compiled.copying import copy_kernel
from services.worker.backends.native.kernels.cpu.compiled.draft import draft_kernel
from services.worker.backends.native.kernels.cpu.compiled.logit_rules import mask_kernel, rules_kernel
from services.worker.backends.native.kernels.cpu.compiled.logprobs import logprobs_kernel
from services.worker.backends.native.kernels.cpu.compiled.most_likely import most_likely_kernel
from services.worker.backends.native.kernels.cpu.compiled.ngram import ngram_kernel
from services.worker.backends.native.kernels.cpu.compiled.norm_and_gate import gate_kernel, norm_kernel
from services.worker.backends.native.kernels.cpu.compiled.product import product_kernel
from services.worker.backends.native.kernels.cpu.compiled.quantized import BF16, INT4, INT8, rows_kernel
from services.worker.backends.native.kernels.cpu.compiled.quantized_product import quantized_product_kernel
from services.worker.backends.native.kernels.cpu.compiled.rotary import rotary_kernel
from services.worker.backends.native.kernels.cpu.recording import replay_kernel
from services.worker.backends.native.kernels.selection import TILES, processor_features

draw_kernel()
greedy_kernel()
most_likely_kernel()
rules_kernel()
mask_kernel()
logprobs_kernel()
ngram_kernel()
draft_kernel()
rotary_kernel()
replay_kernel()
for half in (False, True):
    norm_kernel(half)
    gate_kernel(half)
    product_kernel(half, inputs=1)
    copy_kernel(half, beside_torch=False)
for kind in (INT8, INT4):
    rows_kernel(kind)
    quantized_product_kernel(kind, inputs=1)
if TILES in processor_features():
    from services.worker.backends.native.kernels.cpu.compiled.tile_product import tile_product_kernel

    rows_kernel(BF16)
    for kind in (BF16, INT8, INT4):
        tile_product_kernel(kind, inputs=1)
for half, half_cache in ((False, False), (False, True), (True, True)):
    write_kernel(half, half_cache)
    attention_kernel(half, half_cache)
