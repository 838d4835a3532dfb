"""Base of the objects in request bodies, and their fields of OpenAI, vLLM, SGLang and llama.cpp that are not served."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from services.frontend.openai.schemas.fields import JSON

Neutral = Mapping[str, tuple[Any, ...]]
"""Known parameters that are not served, each with the values that change nothing; null is always one of them."""

NEUTRAL: Neutral = {
    "best_of": (1,),
    "suffix": ("",),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": ("",),
    "json_schema": ({},),
    "regex": ("",),
    "ebnf": ("",),
    "stop_regex": ("", []),
    "lora_path": ("",),
    "max_output_tokens": (),
    "instructions": ("",),
    "system": ("", []),
    "stop_sequences": ([],),
    "n_predict": (-1,),
    "max_new_tokens": (),
    "repeat_penalty": (1, 1.0),
    "sampling_params": ({},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "web_search_options": (),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "truncation_side": ("left",),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors", "none"),
    "return_mm_kwargs": (False, True),
    "routed_experts_prompt_start": (0,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    "repetition_detection": (),
    "padding": ("do_not_pad",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
    "task": ("embed",),
    "instruction": (),
    "max_tokens_per_query": (0,),
    "max_tokens_per_doc": (0,),
}
HINTS: Mapping[str, str] = {
    "best_of": "use n and choose among the answers",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_whitespace_pattern": "use structured_outputs.whitespace_pattern",
    "grammar": "use structured_outputs.grammar",
    "json_schema": "use structured_outputs.json",
    "regex": "use structured_outputs.regex",
    "ebnf": "use structured_outputs.grammar",
    "stop_regex": "use stop",
    "lora_path": "name the adapter as model",
    "max_completion_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "instructions": "write them as a message of the role system",
    "system": "write it as a message of the role system",
    "stop_sequences": "use stop",
    "n_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "repeat_penalty": "use repetition_penalty",
    "sampling_params": "write its fields beside the others",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logits_processors": "requests bring no code: use logit_bias, bad_words or allowed_token_ids",
    "chat_template": "start with --chat-template",
    "thread": "send the whole conversation with each request",
}
"""Replacements for parameters that are not supported."""
NEUTRAL_IN_MESSAGE: Neutral = {"function_call": (), "audio": (), "annotations": ([],)}
"""Fields of an answer that the official client sends back as part of the next conversation."""


def _add_unserved(schema: JSON, kind: type["OpenObject"]) -> None:
    """Describe the known fields that are not served, with the values that change nothing."""
    for name, values in kind.unserved().items():
        allowed = (None, *values)
        distinct = [v for i, v in enumerate(allowed) if v not in allowed[:i]]  # 1 and 1.0 are equal in JSON
        schema["properties"].setdefault(name, {"enum": distinct, "description": "Not supported."})


class OpenObject(BaseModel):
    """Object of a body with more fields than are served: the rule for them is in `parameters.body`."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_add_unserved)

    not_served: ClassVar[Neutral] = {}
    """Known fields that are not served, of this kind of object alone."""
    hints: ClassVar[Mapping[str, str]] = HINTS
    """Replacements for known fields of this kind of object."""

    @classmethod
    def unserved(cls) -> Neutral:
        """Return all known fields that are not served."""
        return cls.not_served
