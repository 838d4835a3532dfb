"""The tools of a chat request, and whether the answer may or must call them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from protocol.sampling import MAX_GRAMMAR_CHARS, GrammarKind, StructuredOutputParams
from services.frontend.errors import invalid, unknown_tool
from services.frontend.json_text import json_text
from services.frontend.openai.parameters.structured import as_tag_format, constraint_field, structured_params
from services.frontend.openai.schemas.messages import AllowedTools, NamedTool
from services.frontend.openai.schemas.requests import ChatRequest
from services.frontend.tools import schema
from services.frontend.tools.json_calls import NamedParser, RequiredParser
from services.frontend.tools.parser import ToolParser


@dataclass(frozen=True)
class ToolChoice:
    names: frozenset[str]
    """Names of the tools that may be called."""
    max_calls: int | None
    """None: no bound."""
    grammar: StructuredOutputParams | None
    parser: type[ToolParser] | None
    parameters: Mapping[str, schema.JSON | None] = field(default_factory=dict)
    """JSON schema of each tool's arguments, for the parser."""

    @classmethod
    def from_body(cls, body: ChatRequest, model_format: type[ToolParser] | None, auto_enabled: bool) -> "ToolChoice":
        """
        Args:
            model_format: parser of the format that the model writes calls in, if one is configured.

        Raises: APIError
        """
        given = body.tool_choice
        assert not isinstance(given, AllowedTools), "they are the tools of a validated body"
        tools = _by_name(body)
        if not tools and given not in (None, "none"):
            raise invalid("tool_choice needs tools", "tool_choice")
        max_calls = 1 if body.parallel_tool_calls is False else None
        if not tools or given == "none":
            always = model_format if model_format is not None and model_format.is_for_all_answers else None
            return cls(frozenset(), 0, None, always)
        if given is None or given == "auto":
            if model_format is None or not auto_enabled:
                missing = (
                    "--tool-call-parser with the format of this model's calls, which its chat template does not show"
                    if model_format is None
                    else "a start without --no-enable-auto-tool-choice"
                )
                raise invalid(
                    f'tool_choice "auto" needs {missing}; "none", "required" and a function work without it',
                    "tool_choice",
                )
            grammar = _either(body, model_format, tools, max_calls)
            return cls(frozenset(tools), max_calls, grammar, model_format, tools)
        return cls._forced(body, given, tools, max_calls)

    @classmethod
    def _forced(
        cls, body: ChatRequest, choice: str | NamedTool, tools: dict[str, schema.JSON | None], max_calls: int | None
    ) -> "ToolChoice":
        """Ignores `response_format`, which constrains content: the answer has none."""
        if body.structured_outputs is not None:
            raise invalid("structured_outputs and a required call are two grammars; leave one out", "tool_choice")
        if body.ignore_eos:
            raise invalid("ignore_eos cannot be combined with a required call", "ignore_eos")
        if isinstance(choice, NamedTool):
            name = choice.function.name
            if name not in tools:
                raise unknown_tool(name)
            grammar = _grammar(schema.arguments_schema(tools[name]))
            return cls(frozenset({name}), 1, grammar, NamedParser)
        grammar = _grammar(schema.calls_schema(tools, max_calls))
        return cls(frozenset(tools), max_calls, grammar, RequiredParser)


def _by_name(body: ChatRequest) -> dict[str, schema.JSON | None]:
    """Return the parameters of each tool. Raises: APIError, if two have the same name"""
    tools: dict[str, schema.JSON | None] = {}
    for tool in body.tools or ():
        if tool.function.name in tools:
            message = f"two tools are named {tool.function.name!r}"
            raise invalid(message, "tools", logged="two tools have the same name")
        tools[tool.function.name] = tool.function.parameters
    return tools


def _either(
    body: ChatRequest, model_format: type[ToolParser], tools: Mapping[str, schema.JSON | None], max_calls: int | None
) -> StructuredOutputParams | None:
    """Return the grammar of an answer that is either content in the body's form, or calls; None without such a form.

    Raises: APIError
    """
    field, constraint = constraint_field(body), structured_params(body)
    if field is None or constraint is None:
        return None
    content, calls = as_tag_format(constraint), model_format.grammar(tools, max_calls)
    if content is None or calls is None:
        what = "this format of calls" if calls is None else "this form of content"
        raise invalid(
            f'{what} cannot be combined with {field} and tool_choice "auto"; use another tool_choice, or leave {field} '
            "out",
            field,
        )
    either = {"type": "structural_tag", "format": {"type": "or", "elements": [content, calls]}}
    return _grammar(either, GrammarKind.STRUCTURAL_TAG)


def _grammar(content: schema.JSON, kind: GrammarKind = GrammarKind.JSON) -> StructuredOutputParams:
    """Raises: APIError"""
    text = json_text(content)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid(
            f"tools: as a grammar they have {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are possible", "tools"
        )
    return StructuredOutputParams(kind, text)
