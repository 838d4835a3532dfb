"""The model as the frontend sees it: names, tokenizer, chat template, defaults."""

import logging
from dataclasses import dataclass, field

from protocol.sampling import Pooling
from services.checkpoint import DEMO_MODEL, is_local, model_name, read_json, resolve
from services.config import FrontendConfig
from services.frontend.openai.parameters.sampling import SamplingDefaults
from services.frontend.output_formats import OutputFormats
from services.frontend.templates.chat_template import ChatTemplate, find_template, find_tool_template, try_out
from services.frontend.text.tokenizer import Tokenizer

log = logging.getLogger("runahead.frontend")


@dataclass(frozen=True)
class ServedModel:
    names: list[str]
    """Names that requests may use; responses have the first one."""
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    pooling: Pooling = Pooling.LAST
    """The computation of an embedding from the positions' hidden states."""
    formats: OutputFormats = field(default_factory=OutputFormats)

    @classmethod
    def load(cls, config: FrontendConfig) -> "ServedModel":
        """Raises: CheckpointError"""
        directory = resolve(config.model, config.revision)
        if not config.model and directory == DEMO_MODEL:
            log.warning(
                "the default model is not installed, so the demo model is served, which is only good for tests; "
                "run `make setup`, or name a model"
            )
        source = resolve(config.tokenizer, None) if config.tokenizer else directory
        tokenizer = Tokenizer(source)
        text = find_template(source, config.chat_template)
        defaults = SamplingDefaults.read(
            directory, tokenizer.eos_token_id, config.generation_config == "auto"
        )
        if text is not None:
            try_out(text, tokenizer.special)  # before this process compiles it, which may never end
        tool_use = find_tool_template(source, config.chat_template)
        if tool_use is not None:
            try_out(tool_use, tokenizer.special)
        template = ChatTemplate(text, tokenizer.special, tool_use)
        name = config.model if config.model and not is_local(config.model) else model_name(directory)
        pooling = Pooling[config.pooling_type.upper()]
        architectures = read_json(directory, "config.json").get("architectures")
        architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        formats = OutputFormats.from_config(config, tokenizer, tool_use or text or "", architecture)
        return cls(config.served_model_name or [name], tokenizer, template, defaults, pooling, formats)
