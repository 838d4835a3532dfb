"""The device of a rank, and everything that differs between vLLM's builds.

- `cpu`: a call of vLLM returns when it is computed.
- `gpu`: a call enqueues work, and the result of a step is on its way to the host when vLLM returns it.
"""
