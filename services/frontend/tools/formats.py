"""`--tool-call-parser`, by vLLM's names."""

from services.frontend.tools.deepseek_v3 import DeepSeekV3Parser
from services.frontend.tools.glm45 import Glm45Parser
from services.frontend.tools.granite import GraniteParser
from services.frontend.tools.harmony import HarmonyParser
from services.frontend.tools.hermes import HermesParser
from services.frontend.tools.llama3_json import Llama3JSONParser
from services.frontend.tools.llama4_pythonic import Llama4PythonicParser
from services.frontend.tools.mistral import MistralParser
from services.frontend.tools.parser import ToolParser
from services.frontend.tools.phi4_mini_json import Phi4MiniParser
from services.frontend.tools.qwen3_xml import Qwen3XMLParser

FORMATS: dict[str, type[ToolParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "glm45": Glm45Parser,
    "granite": GraniteParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JSONParser,
    "llama4_pythonic": Llama4PythonicParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "phi4_mini_json": Phi4MiniParser,
    "qwen3_xml": Qwen3XMLParser,
}
