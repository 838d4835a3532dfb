"""A service as a child of `runahead serve`: `python -m services.cli.child SERVICE CONFIG_FILE PARENT_PID`.

The configuration is in a private file, so that no secret appears in a list of processes.
"""

import sys
from pathlib import Path

from services.cli.start import SERVICES, start
from services.process import die_with_parent


def main(service: str, file: str, parent: str) -> int:
    die_with_parent(int(parent))
    return start(SERVICES[service].model_validate_json(Path(file).read_text()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
