"""A service as a child of `runahead serve`: `python -m services.cli.child SERVICE CONFIG_FILE PARENT_PID`.

The configuration is in a private file, so that no secret appears in a list of processes.
"""

import signal
import sys
from pathlib import Path

from services.process import collection_paused, die_with_parent, print_phases, start_log

# Without a handler of Python's there is no traceback of a KeyboardInterrupt until the service handles the signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
print_phases()
start_log.debug("importing the services")
with collection_paused():
    from services.cli.start import start
    from services.config import SERVICES


def main(service: str, file: str, parent: str) -> int:
    die_with_parent(int(parent))
    return start(SERVICES[service].model_validate_json(Path(file).read_text()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
