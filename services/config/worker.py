"""Settings of a worker."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from services.config.base import CHECKPOINT, REVISION, ServiceConfig, flag, from_json
from services.config.simulator import SimulatorConfig
from services.config.sizes import Size


class BackendConfig(ServiceConfig):
    """Settings of a worker, except those of the simulator."""

    model: str = Field("", description=CHECKPOINT)
    revision: str | None = Field(None, description=REVISION)
    scheduler_endpoint: str = "ipc:///tmp/runahead/workers"
    """Endpoint of the scheduler for workers."""
    backend: Literal["native", "sim", "vllm"] = "native"
    """Implementation of the forward pass: Runahead's own (native), vLLM (vllm), or a simulator that verifies the plans
    and sleeps (sim)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and KV cache. auto: the checkpoint's; float32 for the demo model."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """native, vllm: device that computes: one NVIDIA GPU (cuda), or the processor (cpu). auto: cuda if torch has a GPU;
    with --backend vllm cpu."""
    gpu_memory_utilization: float = Field(0.9, gt=0.0, le=1.0)
    """On a GPU: share of its memory for weights, buffers and KV cache together. --kv-cache-memory-bytes sets the size
    of the KV cache instead."""
    kernels: Literal["auto", "compiled", "reference"] = "auto"
    """native: implementation of the kernels: compiled for this processor (compiled), or plain torch, slow, to check the
    others against (reference). auto: the fastest for device and processor."""
    threads: int = Field(0, ge=0)
    """Number of compute threads. 0: one per core, divided among the ranks of the group on this machine; a single rank
    of vllm uses fewer for steps that are faster so."""
    host_ip: str = ""
    """Address at which other ranks connect to this one, not that of all interfaces. Default: the address of the route
    to the scheduler."""
    kv_cache_memory_bytes: Size = Field(0, ge=0)
    """Size of the KV cache, bytes, such as 4G. 0: a share of the free memory, or what --gpu-memory-utilization leaves
    of a GPU's."""
    engines_here: int = Field(1, ge=1)
    """native, vllm: number of engines on this machine, which share the default of --kv-cache-memory-bytes."""
    kv_offload_dir: str = ""
    """native, sim: private directory for KV blocks. They outlive this process there, and are loaded again instead of
    computed where that is faster. Engines of one machine may share it. Default: none."""
    kv_offload_dir_bytes: Size = Field(10 << 30, gt=0)
    """Size of all files in --kv-offload-dir, bytes, such as 50G; those used last stay."""
    kv_offload_bytes: Size = Field(0, ge=0)
    """native, sim: memory of the worker for KV blocks that leave its cache, bytes, such as 8G. 0: none."""
    kv_peer_address: str = ""
    """native, sim: address of this machine at which workers of other engines with equal weights and settings fetch KV
    blocks, tcp://HOST:0 for a free port. This worker fetches from theirs. Default: none."""
    kv_keeper: str = ""
    """native, sim: socket of a `runahead kv-keeper` on this machine. It keeps the KV cache when this process ends, for
    the next one with the same model and settings. Default: serve keeps it for its workers."""
    weights_cache_dir: str = "auto"
    """native on the CPU: private directory for weights in the layout of the kernels, so that a worker that starts again
    does not arrange them anew; as large as the model. auto: the user's cache directory, for models of 256 MiB and more;
    none: none."""
    weights_cache_bytes: Size = Field(16 << 30, gt=0)
    """Size of all files in --weights-cache-dir, bytes, such as 50G; those used last stay."""
    quantization: str | None = None
    """native: type of the weights in memory, with groups of 32 inputs: int8, int4 (embedding and head int8), or none
    (the blocks of a GGUF file are dequantised). vllm: quantisation method of the weights. Default: the checkpoint's."""
    batch_invariant: bool = False
    """native: require kernels that compute each row with the same bits whatever other rows are in its step. Those for
    the CPU do so without this; --device cuda and --kernels reference do not."""
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    """native: which products compute quantised weights on a processor with AMX. throughput: AMX's, for more than 16
    requests at once and long prompts; else those of AVX-512, with which fewer requests decode up to three times as
    fast. vllm: passed on."""
    load_format: str = "auto"
    """vllm: file format of the weights."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """vllm: whether the model generates text (generate), or embeds, classifies or scores it (pooling). auto: as its
    files say."""
    pooler_config: Annotated[dict[str, Any], BeforeValidator(from_json)] = Field({})
    """vllm: settings of a model for pooling as JSON, such as {"task": "token_classify"} or {"pooling_type": "MEAN"}.
    Default: the checkpoint's."""
    hf_overrides: Annotated[dict[str, Any], BeforeValidator(from_json)] = Field({})
    """vllm: values in place of those of config.json, as JSON. Default: none."""
    enforce_eager: bool = False
    """vllm: do not compile the model. native on a GPU: do not record graphs. The worker starts sooner and computes more
    slowly."""


TIERS = ("kv_offload_dir", "kv_offload_bytes", "kv_peer_address")
USERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("load_format", "runner", "pooler_config", "hf_overrides"), ("vllm",)),
    **dict.fromkeys(("device", "gpu_memory_utilization", "enforce_eager", "dtype", "threads"), ("native", "vllm")),
    "performance_mode": ("native", "vllm"),
    "engines_here": ("native", "vllm"),
    **dict.fromkeys(("kernels", "batch_invariant", "weights_cache_dir", "weights_cache_bytes"), ("native",)),
    **dict.fromkeys((*TIERS, "kv_keeper"), ("native", "sim")),
    **dict.fromkeys(SimulatorConfig.model_fields, ("sim",)),
}
"""Backends that use a setting; all others of the settings are for all, or have a check of their own."""


_VLLM_TIERS = (
    ": vLLM's KV connectors load blocks within the steps of vLLM's own scheduler, and Runahead's loads run beside the "
    "steps (docs/kv-tiers.md)"
)


class WorkerConfig(SimulatorConfig, BackendConfig):
    """Settings of a worker. `--help` lists the bases from last to first."""

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        # A setting with the default value is allowed, even if the backend ignores it
        for name, backends in USERS.items():
            if self.backend not in backends and getattr(self, name) != type(self).model_fields[name].default:
                why = _VLLM_TIERS if name in TIERS and self.backend == "vllm" else ""
                yield (
                    f"{flag(name)} is a setting of --backend {' and '.join(backends)}; "
                    f"--backend {self.backend} does not use it{why}"
                )
        compiles = self.kernels != "reference" and self.device != "cuda"
        if self.weights_cache_dir not in ("auto", "none") and not compiles:
            yield "--weights-cache-dir: weights are arranged for compiled kernels of the CPU only; leave it out"
        if self.batch_invariant and self.kernels == "reference":
            yield "--batch-invariant: --kernels reference does not give this promise; use compiled"
        # Settings that the chosen device does not have; with `auto` the worker refuses them
        if self.device == "cpu" or (self.device == "auto" and self.backend == "vllm"):
            recorded = ("enforce_eager",) if self.backend == "native" else ()
            for name in ("gpu_memory_utilization", *recorded):
                if getattr(self, name) != type(self).model_fields[name].default:
                    yield f"{flag(name)} is for GPUs; --device {self.device} does not use it"
        if self.device == "cuda":
            if self.kv_offload_dir or self.kv_offload_bytes or self.kv_peer_address or self.kv_keeper:
                yield (
                    "--kv-offload-dir, --kv-offload-bytes, --kv-peer-address and --kv-keeper: with --device cuda KV "
                    "blocks stay on the GPU so far; use none of them"
                )
            if self.kernels == "reference":
                yield "--kernels reference computes on --device cpu only"
            if self.batch_invariant:
                yield "--batch-invariant is a promise of --device cpu; --device cuda does not give it"
            if self.quantization in ("int8", "int4"):
                yield (
                    f"--quantization {self.quantization}: --device cuda computes with float32 and bfloat16 weights; "
                    "use --quantization none"
                )
        method, own = self.quantization, ("int8", "int4", "none")
        if self.backend == "native" and method not in (None, *own):
            yield f"--quantization {method}: --backend native has {', '.join(own)}"
        if self.backend == "vllm" and method in own:
            yield f"--quantization {method} is a type of --backend native, not a method of vLLM"
        if self.backend == "sim" and method is not None:
            yield f"--quantization {method}: --backend sim has no weights"

    @property
    def backend_name(self) -> str:
        """Name of the backend in the capability table."""
        return "sim rigid" if self.backend == "sim" and self.sim_rigid else self.backend
