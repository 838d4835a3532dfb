"""The device that a rank computes on, as the runner uses it.

Work is enqueued by one thread, in order, and completes later. Two implementations:

- `interface`: the rules, and the host as a device, whose memory is the host's, so nothing is copied,
- `cuda`: a compute stream and a copy stream of torch, with pinned memory on the host.

`tests/unit/native/lazy_device.py` is a third one, which simulates the worst order that streams allow.
"""
