"""The command line. `runahead` starts here; nothing is imported until a command needs it."""

import sys


def main() -> int:
    """Runs the command in `sys.argv`. Returns the exit status; 2 means that the command line was wrong."""
    if sys.argv[1:2] == ["healthcheck"] and "--help" not in sys.argv:
        # Runs every few seconds in every container: without the modules that options need it costs a fifth.
        from services.cli.healthcheck import main as healthcheck

        return healthcheck(sys.argv[2:])
    from services.cli.app import run

    return run()
