"""`--tool-call-parser`, by vLLM's names."""

from services.frontend.tools.hermes import HermesParser
from services.frontend.tools.llama3_json import Llama3JSONParser
from services.frontend.tools.mistral import MistralParser
from services.frontend.tools.parser import ToolParser

FORMATS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JSONParser,
    "mistral": MistralParser,
}
