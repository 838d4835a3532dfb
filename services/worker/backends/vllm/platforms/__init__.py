"""The device of a rank, and everything that differs between vLLM's builds.

- `interface`: the build for CPUs, where a call of vLLM returns when it is computed.
- `gpu`: the build for GPUs, where a call enqueues work, and the result of a step is on its way to the host when vLLM
  returns it.
"""
