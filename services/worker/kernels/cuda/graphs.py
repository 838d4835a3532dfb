"""Capture of work on the device, so that one call enqueues all of it."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class CudaGraphs:
    """CUDA graphs that share one pool of memory. Their results are overwritten by the next replay of any of them.

    Made once for each epoch: torch refuses to capture into a pool whose graphs were all dropped.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], T]) -> Callable[[], T]:
        """Record the work of a function without running it, and return a function that runs it.

        Every operation of the function has run before, because compilation and workspaces cannot be captured. Other
        threads may use the device during the capture. It is made on the current stream: products have their workspace
        there already, so that no memory of the pool is kept by a library.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        with _without_collection(), torch.cuda.graph(graph, self._pool, stream, capture_error_mode="thread_local"):
            result = function()

        def replay() -> T:
            graph.replay()
            return result

        return replay

    def free_memory(self) -> int:
        """Bytes that are free on the device."""
        free, _ = torch.cuda.mem_get_info()
        return free


@contextmanager
def _without_collection() -> Iterator[None]:
    """Graphs of an epoch before that a collection frees invalidate a capture on the same thread."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
