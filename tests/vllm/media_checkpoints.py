"""Tiny random checkpoints of models that read images or sounds. Their processors need no torchvision."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from services.checkpoint import DEMO_MODEL
from tests.vllm.checkpoints import SMALL

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}{{ '<image>' }}"
    "{% elif part.type == 'audio' %}{{ '<|audio_bos|><|AUDIO|><|audio_eos|>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""As Idefics3's own, it shows only contents that are lists of parts."""
TEXT = SMALL | {"vocab_size": 4160}
VISION = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "initializer_range": 0.2,
}  # fmt: skip


def _tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL, extra_special_tokens={"image_token": "<image>"})
    places = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    marks = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *places]
    marks += ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _idefics3(tokenizer: PreTrainedTokenizerFast, image: int) -> tuple[ProcessorMixin, PreTrainedModel]:
    sides = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    config = Idefics3Config(
        vision_config={**VISION, "image_size": 64, "patch_size": 8}, text_config=LlamaConfig(**TEXT).to_dict(),
        image_token_id=image, scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**sides), tokenizer, image_seq_len=16)
    return processor, Idefics3ForConditionalGeneration(config)


def _paddleocr_vl(tokenizer: PreTrainedTokenizerFast, image: int) -> tuple[ProcessorMixin, PreTrainedModel]:
    """Positions of an image have a row and a column (M-RoPE)."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    config = PaddleOCRVLConfig(
        vision_config={**VISION, "image_size": 112, "patch_size": 14},
        text_config=TEXT | {"head_dim": 32, "rope_parameters": rope, "tie_word_embeddings": False},
        image_token_id=image, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    files = PaddleOCRVLImageProcessorPil(min_pixels=28 * 28 * 48, max_pixels=28 * 28 * 80)
    return PaddleOCRVLProcessor(files, tokenizer), PaddleOCRVLForConditionalGeneration(config)


def _qwen2_audio(tokenizer: PreTrainedTokenizerFast, _: int) -> tuple[ProcessorMixin, PreTrainedModel]:
    """25 positions for each second of a sound."""
    encoder = {"d_model": 64, "encoder_ffn_dim": 96, "encoder_layers": 2, "encoder_attention_heads": 2}
    config = Qwen2AudioConfig(
        audio_config=encoder | {"num_mel_bins": 32, "initializer_range": 0.2},
        text_config=TEXT | {"model_type": "qwen2", "tie_word_embeddings": False},
        audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"), pad_token_id=0,
    )  # fmt: skip
    processor = Qwen2AudioProcessor(WhisperFeatureExtractor(32), tokenizer, TEMPLATE)
    return processor, Qwen2AudioForConditionalGeneration(config)


_MAKERS: dict[str, Callable[[PreTrainedTokenizerFast, int], tuple[ProcessorMixin, PreTrainedModel]]] = {
    "idefics3": _idefics3,
    "paddleocr-vl": _paddleocr_vl,
    "qwen2-audio": _qwen2_audio,
}
MODELS = {"idefics3": "image", "paddleocr-vl": "image", "qwen2-audio": "audio"}
"""Names, and the kind of files that each model reads."""


def make(name: str, directory: Path) -> Path:
    """Write the checkpoint `name`, one of `MODELS`, to the new `directory`. Returns the directory."""
    torch.manual_seed(7)
    tokenizer = _tokenizer()
    processor, model = _MAKERS[name](tokenizer, tokenizer.convert_tokens_to_ids("<image>"))
    processor.save_pretrained(directory)
    model.eval().save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    # transformers saves Qwen2-Audio's text part with other names than those of the published checkpoints.
    published = {
        name.replace("language_model.model.model.", "language_model.model."): value for name, value in weights.items()
    }
    save_file(published, directory / "model.safetensors", {"format": "pt"})
    return directory
