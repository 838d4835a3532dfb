"""The command line. `runahead` starts here; nothing is imported until a command needs it."""


def main() -> int:
    """Runs the command in `sys.argv`. Returns the exit status; 2 means that the command line was wrong."""
    from services.cli.app import run

    return run()
