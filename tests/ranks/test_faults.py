"""A rank that dies or stops: the others notice it, leave, and continue in a new epoch with the weights in memory."""

import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from protocol.membership import Assignment, InitializeCache
from tests.integration.native.conftest import Family
from tests.integration.native.driver import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS, DrivenRequest
from tests.preloaded import INPUT, OUTPUT, PreloadedProcess
from tests.ranks.failures import RankFailure
from tests.ranks.group import GroupDriver, NativeRankProcess, RankPool, encode

Start = Callable[..., GroupDriver]
PROMPT = list(range(20, 49))


def assert_ranks_lost(rank: NativeRankProcess) -> str:
    """The rank's next answer is RanksLost. Return its text."""
    with pytest.raises(RankFailure) as raised:
        rank.receive()
    assert raised.value.kind == "RanksLost"
    return str(raised.value)


def abort(rank: NativeRankProcess) -> None:
    """Abort until the rank answers: an abort before the wait begins has no effect."""
    while not select.select([rank.stdout], [], [], 0.2)[0]:
        rank.send("abort")


def new_epoch(driver: GroupDriver, requests: list[DrivenRequest]) -> list[DrivenRequest]:
    """Join the group again, with an empty KV cache and empty slots. Return the resumed requests."""
    group = driver.runner
    group.drop_unread()
    driver.load()
    group.init_kv_cache(InitializeCache(NUM_BLOCKS, driver.max_model_len))
    driver.free_slots, driver.free_blocks = list(range(NUM_SLOTS)), list(range(NUM_BLOCKS))
    again = [driver.preempt(request) for request in requests]
    driver.released.clear()
    return again


def half_way(driver: GroupDriver) -> tuple[list[list[int]], list[DrivenRequest]]:
    """Return the expected outputs of four requests, and the same four with eight tokens each."""
    whole = [driver.add(PROMPT[i:]) for i in range(4)]
    driver.generate(whole, 16, depth=3)
    requests = [driver.add(request.prompt) for request in whole]
    driver.generate(requests, 8, depth=3)
    return [request.output for request in whole], requests


def test_a_killed_rank_ends_the_epoch_and_is_replaced(tied: Family, start: Start, pool: RankPool) -> None:
    driver = start(tied.path, 2, 2)
    expected, requests = half_way(driver)
    group = driver.runner
    first, victim, follower, last = group.ranks
    victim.signal(signal.SIGSTOP)  # so that its partner is in a sum when it dies
    group.post("execute", encode(driver.plan([(request, 1) for request in requests])))
    for request in requests:
        request.known -= 1  # this step is void
    victim.kill()
    assert_ranks_lost(first)
    text = assert_ranks_lost(last)
    assert "a connection between ranks has failed (gloo: " in text
    assert ".cc" not in text, "a place in gloo's source"
    first.send("leave")
    assert_ranks_lost(follower)  # it waited for the first rank, which was healthy until it left
    assert first.receive() is None
    for rank in (follower, last):
        rank.call("leave")
    pool.discard(victim)
    group.ranks = [first, pool.take(4)[-1], follower, last]
    group.ranks[1].call("open", group.config)
    requests = new_epoch(driver, requests)
    assert [bool(number) for number in group.progress] == [False, True, False, False]
    driver.generate(requests, 16, depth=3)
    assert [request.output for request in requests] == expected


def test_abort_frees_a_rank_whose_partner_is_stopped(tied: Family, start: Start) -> None:
    driver = start(tied.path, 2, 1)
    expected, requests = half_way(driver)
    group = driver.runner
    first, stopped = group.ranks
    stopped.signal(signal.SIGSTOP)
    group.post("execute", encode(driver.plan([(request, 1) for request in requests])))
    for request in requests:
        request.known -= 1
    abort(first)
    assert_ranks_lost(first)
    first.call("leave")  # it waits for no other rank
    stopped.signal(signal.SIGCONT)
    assert_ranks_lost(stopped)
    stopped.call("leave")
    requests = new_epoch(driver, requests)
    assert group.progress == [0, 0]
    driver.generate(requests, 16)
    assert [request.output for request in requests] == expected


def test_abort_frees_stages_that_wait_for_activations_and_for_ids(tied: Family, start: Start) -> None:
    driver = start(tied.path, 1, 4)
    expected, requests = half_way(driver)
    group = driver.runner
    first, stopped, waiting, last = group.ranks
    stopped.signal(signal.SIGSTOP)
    for _ in range(2):  # the second step needs the ids that the first one samples
        plan = driver.plan([(request, 1) for request in requests])
        for rank in group.ranks:
            rank.send("execute", encode(plan))
            rank.send("sample")
    for request in requests:
        request.known -= 2
    assert first.receive() is None
    assert first.receive() is None
    for rank in (first, waiting, last):
        abort(rank)
        assert_ranks_lost(rank)
    stopped.signal(signal.SIGCONT)
    for rank in group.ranks:
        rank.send("leave")
    for rank in group.ranks:
        while True:  # earlier commands fail too
            try:
                rank.receive()
            except RankFailure:
                continue
            break
    requests = new_epoch(driver, requests)
    assert group.progress == [0] * 4
    driver.generate(requests, 16, depth=5)
    assert [request.output for request in requests] == expected


HALF_WAY = """
import os, signal, sys, threading, torch
from protocol.membership import Assignment
from services.worker.distributed.ranks import Ranks
from services.worker.distributed.rendezvous import listen
from services.worker.distributed.messages import Tag

sys.stdin = open(0)  # multiprocessing has closed it
rank, listener = int(sys.argv[1]), listen("127.0.0.1")
print("%s:%d" % listener.getsockname(), flush=True)
ranks = Ranks(Assignment(1, rank, 2, 16, 4, 64, 0, 2, 1, input()), listener).join()
peers, x = ranks.tensor_parallel.peers, torch.zeros(16 << 20)
if rank:
    work = peers.receive(x, 0, Tag.LAYER)
    print("receiving", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
input()
work = peers.send(x, 1, Tag.LAYER)
print("sending", flush=True)
threading.Thread(target=lambda: input() or ranks.abort(), daemon=True).start()
try:
    peers.wait(work)
except Exception as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""
"""Two ranks. The second one begins to receive a message of 64 MiB, more than a connection holds, and stops."""


@pytest.fixture
def half_sent() -> Iterator[list[PreloadedProcess]]:
    with ExitStack() as stack:
        ranks = [PreloadedProcess(HALF_WAY, rank, pipes=(INPUT, OUTPUT)) for rank in "01"]
        for rank in ranks:
            stack.enter_context(rank.stdin)
            stack.enter_context(rank.stdout)
            stack.callback(rank.wait)
            stack.callback(rank.kill)
        rendezvous, _ = (rank.stdout.readline() for rank in ranks)
        for rank in ranks:
            rank.stdin.write(rendezvous)
        assert ranks[1].stdout.readline() == b"receiving\n"
        yield ranks


def test_abort_frees_a_rank_whose_partner_dies_half_way_through_a_message(half_sent: list[PreloadedProcess]) -> None:
    """gloo neither completes nor fails such a message."""
    sender, receiver = half_sent
    for word in ("sending", "RanksLost"):
        sender.stdin.write(b"\n")
        assert sender.stdout.readline() == f"{word}\n".encode()
        receiver.kill()


@pytest.mark.parametrize("missing", [0, 1])
def test_abort_frees_a_rank_whose_partner_never_joins(tied: Family, start: Start, pool: RankPool, missing: int) -> None:
    driver = start(tied.path, 2, 1)
    group, waiting = driver.runner, pool.take(2)[1 - missing]
    group.call("leave")
    rendezvous = group.call("listen")[0]
    plan = Assignment(7, 1 - missing, 2, BLOCK_SIZE, NUM_SLOTS, 64, 0, 2, 1, rendezvous)
    waiting.send("load", encode(plan))
    abort(waiting)
    assert_ranks_lost(waiting)
    request = new_epoch(driver, [driver.add(PROMPT)])[0]
    driver.generate([request], 4)
    assert len(request.output) == 4
