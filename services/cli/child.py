"""A service as a child of `runahead serve`: `python -m services.cli.child SERVICE CONFIG_FILE PARENT_PID`.

The configuration comes in a private file, so that no secret stands in a process list.
"""

import os
import signal
import sys
from pathlib import Path

from services.cli.start import SERVICES, start

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when `parent` is gone, however it went: nothing is orphaned."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the kernel was asked
        os._exit(1)


def main(service: str, file: str, parent: str) -> int:
    die_with_parent(int(parent))
    return start(SERVICES[service].model_validate_json(Path(file).read_text()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
