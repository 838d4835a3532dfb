"""The architectures, by their names in `transformers`. Each family is a file that says what differs from Llama."""

from collections.abc import Mapping

from services.worker.backends.native.model.architectures import (
    gemma3,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    olmo2,
    olmoe,
    qwen,
    smollm3,
)
from services.worker.backends.native.model.config import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": llama.ARCHITECTURE,
    "MistralForCausalLM": mistral.MISTRAL,
    "Qwen2ForCausalLM": qwen.QWEN2,
    "Qwen3ForCausalLM": qwen.QWEN3,
    "SmolLM3ForCausalLM": smollm3.ARCHITECTURE,
    "GraniteForCausalLM": granite.ARCHITECTURE,
    "GraniteMoeForCausalLM": granite.WITH_EXPERTS,
    "GraniteMoeHybridForCausalLM": granite.DENSE_HYBRID,
    "Olmo2ForCausalLM": olmo2.OLMO2,
    "Olmo3ForCausalLM": olmo2.OLMO3,
    "Phi3ForCausalLM": mistral.PHI3,
    "OlmoeForCausalLM": olmoe.ARCHITECTURE,
    "Gemma3ForCausalLM": gemma3.ARCHITECTURE,
    "Qwen3MoeForCausalLM": qwen.QWEN3_MOE,
    "MixtralForCausalLM": mistral.MIXTRAL,
    "GptOssForCausalLM": gpt_oss.ARCHITECTURE,
    "Llama4ForCausalLM": llama4.ARCHITECTURE,
}
