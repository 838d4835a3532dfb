"""Kernels for processors: numba compiles them once per machine and keeps them.

Nothing outside of this package imports it but `kernels.selection`; nothing else in the tree imports numba.
"""

import numba

from services.worker.backends.native.kernels.cpu import compile_cache

numba.config.CACHE_DIR = str(compile_cache.directory())
