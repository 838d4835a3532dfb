"""The command line `runahead`. Modules are imported only when a command needs them."""

import sys


def main() -> int:
    """Run the command in `sys.argv`. Return the exit status; 2 means that the command line is invalid."""
    if sys.argv[1:2] == ["healthcheck"]:
        # Runs every few seconds in every container. Without the modules for options it takes a fifth of the time.
        from services.cli.healthcheck import main as healthcheck

        return healthcheck(sys.argv[2:])
    from services.process import collection_paused

    with collection_paused():
        from services.cli.app import run

    return run()
