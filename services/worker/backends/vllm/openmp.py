"""Settings of OpenMP, whose threads compute vLLM's kernels. Imported before torch.

Its threads spin for milliseconds while they wait for one another. Whatever else wants a core then waits for a thread
that does nothing, and all threads wait for the one without a core: beside a busy process, and beside our own scheduler
and frontend, steps take up to ten times as long. Threads that sleep lose some microseconds at each barrier.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
