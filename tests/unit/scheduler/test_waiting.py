"""The waiting queue against a dictionary of its members."""

from random import Random

from services.scheduler.core.request import Request
from services.scheduler.core.waiting import WaitingQueue
from tests.simulation.requests import request


def test_random_use_keeps_the_order_also_while_members_leave_during_a_walk() -> None:
    rng, queue, model = Random(3), WaitingQueue(), dict[int, Request]()
    for order_key in range(2_000):
        r = request([0] * rng.randint(1, 9), rng.randrange(10**6) * 4096 + order_key)
        queue.add(r)
        model[r.order_key] = r
        for _ in range(rng.randint(0, 2)):
            if model:
                out = model.pop(rng.choice(list(model)) if rng.random() < 0.5 else min(model))
                queue.remove(out)
                if rng.random() < 0.2:
                    queue.add(out)
                    model[out.order_key] = out
        assert queue.head() is (model[min(model)] if model else None)
        assert queue.num_tokens == sum(len(r.token_ids) for r in model.values())
    ordered, walked = [model[order_key] for order_key in sorted(model)], []
    for r in queue:
        walked.append(r)
        if r.order_key % 2:
            queue.remove(r)
    assert walked == ordered
    assert list(queue) == [r for r in ordered if r.order_key % 2 == 0]


def test_members_of_equal_keys_keep_their_order_and_leave_alone() -> None:
    """Two requests of equal age, whose numbers are equal but for their upper bits."""
    queue, members = WaitingQueue(), [request(number=7) for _ in range(3)]
    for member in members:
        queue.add(member)
    queue.remove(members[1])
    assert list(queue) == members[::2]
    for member in queue:
        queue.remove(member)
    assert queue.head() is None
