"""Compiled kernels for what torch has no single fast call for; numba compiles them once per machine and keeps them."""

import numba

from services.worker.backends.native.kernels import cache

numba.config.CACHE_DIR = str(cache.directory())
