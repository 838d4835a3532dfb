"""The device that a rank computes on, as the runner uses it.

Work is enqueued by one thread, in order, and completes later; `interface` has the rules. Two implementations:

- `cpu`: work is complete when the call returns, and memory of the host is memory of the device, so nothing is copied,
- `cuda`: a compute stream and a copy stream of torch, with pinned memory on the host.

`tests/unit/native/lazy_device.py` is a third one, which simulates the worst order that streams allow.
"""
