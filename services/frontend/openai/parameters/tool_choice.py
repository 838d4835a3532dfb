"""Which tools a chat request offers, and what it demands of the answer."""

import enum
from dataclasses import dataclass

import msgspec

from protocol.sampling import MAX_GRAMMAR_CHARS, GrammarKind, StructuredOutputParams
from services.frontend.errors import invalid
from services.frontend.openai.parameters.structured import constraint_field
from services.frontend.openai.schemas.requests import ChatRequest, NamedTool
from services.frontend.tools import schema
from services.frontend.tools.forced import NamedParser, RequiredParser
from services.frontend.tools.parser import ToolParser


class Mode(enum.Enum):
    NONE = "none"
    """Nothing in the answer counts as a call."""
    AUTO = "auto"
    """The model calls or does not, in its own format."""
    REQUIRED = "required"
    """The answer is calls, in the form that a grammar gives it."""
    NAMED = "named"
    """The answer is the arguments of one tool; a grammar sees to it."""


@dataclass(frozen=True)
class ToolChoice:
    mode: Mode
    names: frozenset[str]
    """Of the tools that may be called."""
    most: int | None
    """Calls; None: no bound."""
    grammar: StructuredOutputParams | None
    parser: type[ToolParser] | None

    @classmethod
    def of(cls, body: ChatRequest, own_format: type[ToolParser] | None, auto_enabled: bool) -> "ToolChoice":
        """`own_format` is the model's. Raises: APIError"""
        wanted = body.tool_choice
        tools = _by_name(body)
        if not tools and wanted not in (None, "none"):
            raise invalid("tool_choice needs tools to choose from", "tool_choice")
        most = 1 if body.parallel_tool_calls is False else None
        if not tools or wanted == "none":
            return cls(Mode.NONE, frozenset(), None, None, None)
        if wanted is None or wanted == "auto":
            if own_format is None or not auto_enabled:
                raise invalid(
                    '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set; '
                    'without them tool_choice can be "none", "required" or a function',
                    "tool_choice",
                )
            if (field := constraint_field(body)) is not None:
                raise invalid(
                    f"{field} leaves no room for a call; leave it out, or choose tools otherwise than by "
                    '"auto"',
                    field,
                )
            return cls(Mode.AUTO, frozenset(tools), most, None, own_format)
        return cls._forced(body, wanted, tools, most)

    @classmethod
    def _forced(
        cls,
        body: ChatRequest,
        wanted: str | NamedTool,
        tools: dict[str, schema.JSON | None],
        most: int | None,
    ) -> "ToolChoice":
        """`response_format` is of content, and there will be none."""
        if body.structured_outputs is not None:
            raise invalid(
                "structured_outputs and a demanded call are two grammars; leave one out", "tool_choice"
            )
        if body.ignore_eos:
            raise invalid("ignore_eos cannot be combined with a demanded call", "ignore_eos")
        if isinstance(wanted, NamedTool):
            name = wanted.function.name
            if name not in tools:
                raise invalid(f"tool_choice: {name!r} is not among the tools", "tool_choice")
            grammar = _grammar(schema.of_arguments(tools[name]))
            return cls(Mode.NAMED, frozenset({name}), 1, grammar, NamedParser)
        try:
            grammar = _grammar(schema.of_calls(tools, most))
        except schema.TooDeep as error:
            raise invalid(f"tools: parameters are nested too deeply: {error}", "tools") from None
        return cls(Mode.REQUIRED, frozenset(tools), most, grammar, RequiredParser)


def _by_name(body: ChatRequest) -> dict[str, schema.JSON | None]:
    """The tools' parameters. Raises: APIError"""
    tools: dict[str, schema.JSON | None] = {}
    for tool in body.tools or ():
        if tool.function.name in tools:
            raise invalid(f"two tools are named {tool.function.name!r}", "tools")
        tools[tool.function.name] = tool.function.parameters
    return tools


def _grammar(wanted: schema.JSON) -> StructuredOutputParams:
    """Raises: APIError"""
    try:
        text = msgspec.json.encode(wanted).decode()
    except RecursionError:
        raise invalid("tools: parameters are nested too deeply", "tools") from None
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(
            f"tools: as a grammar they have {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are possible",
            "tools",
        )
    return StructuredOutputParams(GrammarKind.JSON, text)
