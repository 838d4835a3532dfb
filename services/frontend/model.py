"""What a frontend knows of the model it serves: names, tokenizer, chat template, defaults."""

from dataclasses import dataclass, field
from pathlib import Path

from protocol.sampling import Pooling
from services.checkpoint import resolve
from services.config import FrontendConfig
from services.frontend.openai.parameters.sampling import Defaults
from services.frontend.output_formats import AnswerForms
from services.frontend.templates.chat_template import ChatTemplate, find_template, find_tool_template, try_out
from services.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    names: list[str]
    """What the API answers to; the first is what answers say."""
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: Defaults
    pooling: Pooling = Pooling.LAST
    """What an embedding is made of."""
    forms: AnswerForms = field(default_factory=AnswerForms)

    @classmethod
    def load(cls, config: FrontendConfig) -> "ServedModel":
        """Raises: CheckpointError"""
        directory = resolve(config.model, config.revision)
        source = resolve(config.tokenizer, None) if config.tokenizer else directory
        tokenizer = Tokenizer(source)
        text = find_template(source, config.chat_template)
        defaults = Defaults.read(directory, tokenizer.eos_token_id, config.generation_config == "auto")
        if text is not None:
            try_out(
                text, tokenizer.special
            )  # before this process compiles it: that may already take for ever
        tool_use = find_tool_template(source, config.chat_template)
        if tool_use is not None:
            try_out(tool_use, tokenizer.special)
        template = ChatTemplate(text, tokenizer.special, tool_use)
        name = config.model if config.model and not Path(config.model).is_dir() else directory.resolve().name
        pooling = Pooling[config.pooling_type.upper()]
        forms = AnswerForms.of(config, tokenizer)
        return cls(config.served_model_name or [name], tokenizer, template, defaults, pooling, forms)
