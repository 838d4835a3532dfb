"""Programs that are clients."""

import subprocess

TIMEOUT = 300
"""Seconds."""


def run(*command: str) -> str:
    """Return the output. The program must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
