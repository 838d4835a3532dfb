"""Metrics for Prometheus: vLLM's names, labels and buckets, with the prefix "runahead:" and once more with "vllm:"."""

from services.frontend.metrics.metrics import Metrics, outcome_of
from services.frontend.metrics.vllm_names import VLLM_NAMES
