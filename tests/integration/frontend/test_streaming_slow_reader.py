"""One client that does not read, among 63 that do."""

import re
from contextlib import ExitStack

from protocol.codec import pack
from protocol.requests import RequestOutputs
from tests.integration.frontend.scripted import SMALL_BUFFERS, TOKENIZER, ended, ids_of, scripted, wait_until
from tests.integration.frontend.sse import SseClient, events_of, texts

PATCH = f"""{SMALL_BUFFERS}
import sys
connection.STALL_SECONDS = 1000
most, write = 0, connection.Connection.write_chunk
def watched(self, data):
    global most
    write(self, data)
    if self.transport.get_write_buffer_size() > most:
        most = self.transport.get_write_buffer_size()
        print(f"buffered {{most}} bytes", file=sys.stderr, flush=True)
connection.Connection.write_chunk = watched
"""
HIGH_WATER = 65_536
"""Buffered bytes at which the writer of a response waits; the event loop's default."""
NEIGHBOURS, STEPS, FLOOD = 63, 70, 500
"""`FLOOD` is the number of tokens per step for the client that does not read; the others get one."""


def test_slow_reader_delays_nobody_and_its_memory_is_bounded() -> None:
    flood = (ids_of(" international understanding of every language") * FLOOD)[:FLOOD]
    word = ids_of(" word")
    with scripted(PATCH) as (frontend, scheduler), ExitStack() as stack:
        slow = stack.enter_context(SseClient(frontend, buffer=4096))
        slow.post(prompt="slow")
        slow_number = scheduler.request().number
        others = [stack.enter_context(SseClient(frontend)) for _ in range(NEIGHBOURS)]
        for other in others:
            other.post(prompt="x")
        numbers = [scheduler.request(1 + index).number for index in range(NEIGHBOURS)]
        for step in range(STEPS):
            scheduler.send(
                RequestOutputs(
                    pack([slow_number] * FLOOD + numbers),
                    pack([*range(step * FLOOD, (step + 1) * FLOOD)] + [step] * NEIGHBOURS),
                    pack(flood + word * NEIGHBOURS),
                )
            )
            for other in others:  # each receives its token before the next step is sent
                assert len(events_of(other.read())) == 1
        for number in (slow_number, *numbers):
            scheduler.send(ended(number))
        for other in others:
            assert texts(events_of(other.read_all().body)) == {0: " word" * STEPS}
        wait_until(lambda: frontend.metric("requests_total", outcome="completed") == NEIGHBOURS, "they ended")

        said = STEPS * TOKENIZER.decode(flood)
        buffered = max(map(int, re.findall(r"buffered (\d+) bytes", frontend.log)))
        bound = HIGH_WATER + len(said) // STEPS + 1000
        assert HIGH_WATER < buffered <= bound, "at most one step beyond the mark at which the writer waits"
        assert len(said) > 2 * bound, "this test needs more text than the bound"
        events = events_of(slow.read_all().body)
        assert texts(events) == {0: said}, "it still receives everything"
        assert len(events) < STEPS, "outputs that arrived while it did not read are joined"
