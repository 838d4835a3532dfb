"""The end of a service."""

from tests.preloaded import ERRORS, PreloadedProcess

CODE = """
import json, threading, time
from services.cli import logs, start
from services.config import SchedulerConfig

def run():
    for target, text in ((json.loads, "{"), (logs.log_entry, None)):
        thread = threading.Thread(target=target, args=(text,))
        thread.start()
        thread.join()
    time.sleep(60)

start._entry_point = lambda _: run
start.start(SchedulerConfig())
"""


def test_an_unexpected_error_on_a_thread_ends_the_service_with_its_traceback() -> None:
    """A worker went on without the thread that sends results: each step took a minute to be given up. The thread of a
    library may end alone."""
    service = PreloadedProcess(CODE, pipes=(ERRORS,))
    with service.stderr as stream:
        output = stream.read()
    assert service.wait() == 70
    assert "JSONDecodeError" in output
    assert "CRITICAL runahead: AttributeError: 'NoneType'" in output
    assert output.count("Traceback") == 2
