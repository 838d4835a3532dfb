"""The suite of the vLLM backend; it runs in an environment that has vLLM (`make test-vllm`)."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
