"""`python -m services.worker.backends.native.kernels` compiles every kernel, so that the first start need not."""

import services.worker.backends.native.kernels.ragged  # noqa: F401 - compiled when it is imported
from services.worker.backends.native.kernels.attention import attention_kernel, write_kernel
from services.worker.backends.native.kernels.draft import copy_kernel, draft_kernel
from services.worker.backends.native.kernels.likeliest import likeliest_kernel
from services.worker.backends.native.kernels.logprobs import logprobs_kernel
from services.worker.backends.native.kernels.ngram import ngram_kernel
from services.worker.backends.native.kernels.product import product_kernel
from services.worker.backends.native.kernels.rope import turn_kernel
from services.worker.backends.native.kernels.rows import gate_kernel, norm_kernel
from services.worker.backends.native.kernels.rules import mask_kernel, rules_kernel
from services.worker.backends.native.kernels.sampling import greedy_kernel, sampling_kernel

sampling_kernel()
greedy_kernel()
likeliest_kernel()
rules_kernel()
mask_kernel()
logprobs_kernel()
ngram_kernel()
draft_kernel()
turn_kernel()
for half in (False, True):
    norm_kernel(half)
    gate_kernel(half)
    product_kernel(half, inputs=1)
    copy_kernel(half)
for half, half_cache in ((False, False), (False, True), (True, True)):
    write_kernel(half, half_cache)
    attention_kernel(half, half_cache)
