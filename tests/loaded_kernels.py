"""Loads the compiled kernels of the native backend when it is imported, for all processes that are forked later."""

from services.worker.kernels.cpu.__main__ import KERNELS, compile_kernel

for number in range(len(KERNELS)):
    compile_kernel(number)
