"""Speed at which this machine reads memory: the limit of decoding, which reads every weight for each token."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from services.worker import machine

_PER_CORE, _MOST = 128 << 20, 512 << 20
"""Bytes that are read; more than the caches of a core, and little of a machine's memory."""
_SECONDS = 0.2


def read_bandwidth() -> float:
    """Return bytes per second, the best of some passes of all cores of this process. Takes 0.2 to 0.5 s."""
    cores = machine.cores()
    array = np.ones(min(_PER_CORE * cores, _MOST, max(1 << 20, machine.free_memory() // 4)) // 8, np.int64)
    parts, best, end = np.array_split(array, cores), 0.0, time.monotonic() + _SECONDS
    with ThreadPoolExecutor(cores) as pool:  # the reduction releases the interpreter's lock
        while time.monotonic() < end or not best:
            started = time.monotonic()
            list(pool.map(np.bitwise_or.reduce, parts))
            best = max(best, array.nbytes / (time.monotonic() - started))
    return best
