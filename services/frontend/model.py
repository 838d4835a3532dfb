"""What a frontend knows of the model it serves: names, tokenizer, chat template, defaults."""

from dataclasses import dataclass
from pathlib import Path

from services.checkpoint import resolve
from services.config import FrontendConfig
from services.frontend.chat_template import ChatTemplate, find_template
from services.frontend.openai.parameters import Defaults
from services.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    names: list[str]
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: Defaults

    @classmethod
    def load(cls, config: FrontendConfig) -> "ServedModel":
        """Raises: CheckpointError"""
        directory = resolve(config.model, config.revision)
        source = resolve(config.tokenizer, None) if config.tokenizer else directory
        tokenizer = Tokenizer(source)
        template = ChatTemplate(find_template(source, config.chat_template), tokenizer.special)
        defaults = Defaults.read(directory, tokenizer.eos_token_id, config.generation_config == "auto")
        name = config.model if config.model and not Path(config.model).is_dir() else directory.resolve().name
        return cls(config.served_model_name or [name], tokenizer, template, defaults)
