"""The command line `runahead`. Modules are imported only when a command needs them."""

import signal
import sys


def main() -> int:
    """Run the command in `sys.argv`. Return the exit status; 2 means that the command line is invalid."""
    if sys.argv[1:2] == ["healthcheck"]:
        # Runs every few seconds in every container. Without the modules for options it takes a fifth of the time.
        from services.cli.healthcheck import main as healthcheck

        return healthcheck(sys.argv[2:])
    from services.process import collection_paused

    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:  # Ctrl-C during the imports ends without a traceback
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with collection_paused():
        from services.cli.app import run

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
