"""Kernels for processors: numba compiles them once per machine and stores them.

Only `kernels.selection` imports this package. No other code imports numba.
"""

import numba

from services.worker.kernels.cpu import compile_cache

numba.config.CACHE_DIR = str(compile_cache.directory())
