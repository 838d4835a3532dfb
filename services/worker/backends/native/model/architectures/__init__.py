"""The architectures, by their names in `transformers`. Each is a file of its own that says what differs from Llama."""

from collections.abc import Mapping

from services.worker.backends.native.model.architectures import (
    gemma3,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from services.worker.backends.native.model.config import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": llama.ARCHITECTURE,
    "MistralForCausalLM": mistral.ARCHITECTURE,
    "Qwen2ForCausalLM": qwen2.ARCHITECTURE,
    "Qwen3ForCausalLM": qwen3.ARCHITECTURE,
    "SmolLM3ForCausalLM": smollm3.ARCHITECTURE,
    "GraniteForCausalLM": granite.ARCHITECTURE,
    "GraniteMoeForCausalLM": granite.WITH_EXPERTS,
    "GraniteMoeHybridForCausalLM": granite.DENSE_HYBRID,
    "Olmo2ForCausalLM": olmo2.OLMO2,
    "Olmo3ForCausalLM": olmo2.OLMO3,
    "Phi3ForCausalLM": phi3.ARCHITECTURE,
    "OlmoeForCausalLM": olmoe.ARCHITECTURE,
    "Gemma3ForCausalLM": gemma3.ARCHITECTURE,
    "Qwen3MoeForCausalLM": qwen3_moe.ARCHITECTURE,
    "MixtralForCausalLM": mixtral.ARCHITECTURE,
    "GptOssForCausalLM": gpt_oss.ARCHITECTURE,
}
