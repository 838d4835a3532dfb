"""The model as the frontend sees it: names, tokenizer, chat template, defaults."""

import logging
from dataclasses import dataclass, field
from pathlib import Path

from protocol.lora import LoRAAdapter
from protocol.sampling import Pooling
from services.checkpoint import DEMO_MODEL, CheckpointError, is_local, model_name, read_json, resolve
from services.config import FrontendConfig
from services.frontend.adapters import Adapters
from services.frontend.errors import APIError
from services.frontend.openai.parameters.sampling import SamplingDefaults
from services.frontend.output_formats import OutputFormats
from services.frontend.templates.chat_template import ChatTemplate, find_template
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
    adapters: Adapters = field(default_factory=Adapters)
    directory: Path = Path()
    """The checkpoint."""
    media_domains: tuple[str, ...] = ()
    """Host names from which images and sounds are fetched."""
    max_media_bytes: int = 0
    """Bytes of all files that are fetched for one request."""
    pair_template: bool = False
    """True: `template` was given with --chat-template, so a model that scores pairs uses it, with the roles `query` and
    `document`. Templates of checkpoints are often those of the model that they were made of."""
    root: str = ""
    """Name of the model without `--served-model-name`."""

    @property
    def all_names(self) -> list[str]:
        """Names of the model and of its adapters."""
        return [*self.names, *self.adapters.names]

    def adapter(self, name: str | None) -> LoRAAdapter | None:
        """Return the adapter that a request names; None: it names the model. Raises: APIError"""
        adapter = self.adapters.get(name)
        if adapter is None and name is not None and name not in self.names:
            message = f"the model {name!r:.200} does not exist; this server has {', '.join(self.all_names)}"
            raise APIError(404, message, "model", "model_not_found", logged="the model does not exist")
        return adapter

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
        keeps_defaults, overrides = config.generation_config == "auto", config.override_generation_config
        defaults = SamplingDefaults.read(directory, tokenizer.eos_token_id, keeps_defaults, overrides)
        tool_use = find_template(source, config.chat_template, "tool_use")
        template = ChatTemplate(text, tokenizer.special, tool_use, config.default_chat_template_kwargs)
        template.try_out()
        name = config.model if config.model and not is_local(config.model) else model_name(directory)
        pooling = Pooling[config.pooling_type.upper()]
        architectures = read_json(directory, "config.json").get("architectures")
        architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
        formats = OutputFormats.from_config(config, tokenizer, tool_use or text or "", architecture)
        names = config.served_model_name or [name]
        adapters = Adapters(directory, config.max_lora_rank if config.enable_lora else 0, tuple(names))
        for module in config.lora_modules:
            adapter, separator, path = module.partition("=")
            if not separator:
                raise CheckpointError(f"--lora-modules {module}: it has the form NAME=DIRECTORY")
            adapters.load(adapter, path)
        media = tuple(config.allowed_media_domains), config.max_body_bytes
        is_given = config.chat_template is not None
        return cls(names, tokenizer, template, defaults, pooling, formats, adapters, directory, *media, is_given, name)
