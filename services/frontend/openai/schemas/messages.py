"""Messages of a conversation, and the tools that the model may call."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from protocol.media import MediaFile
from services.frontend.json_text import json_text
from services.frontend.openai.schemas.fields import JSON, MAX_PARTS, MAX_TOOLS, MAX_URL, GivenName, Text, ToolName
from services.frontend.openai.schemas.open_object import NEUTRAL_IN_MESSAGE, Neutral, OpenObject


class TextPart(OpenObject):
    type: Literal["text"]
    text: Text


class RefusalPart(OpenObject):
    """Refusal of another model. It is text for this one."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


class AudioURL(OpenObject):
    url: Annotated[str, Field(max_length=MAX_URL)]


class ImageURL(AudioURL):
    not_served: ClassVar[Neutral] = {"detail": ("auto",)}


class InputAudio(OpenObject):
    data: Annotated[str, Field(max_length=MAX_URL)]
    """Base64."""
    format: Literal["wav", "mp3"]


class _PartWithoutText(OpenObject):
    @property
    def text(self) -> str:
        return ""


class ImagePart(_PartWithoutText):
    type: Literal["image_url"]
    image_url: ImageURL

    @property
    def file(self) -> MediaFile:
        return MediaFile("image", self.image_url.url)


class AudioURLPart(_PartWithoutText):
    """vLLM's."""

    type: Literal["audio_url"]
    audio_url: AudioURL

    @property
    def file(self) -> MediaFile:
        return MediaFile("audio", self.audio_url.url)


class InputAudioPart(_PartWithoutText):
    type: Literal["input_audio"]
    input_audio: InputAudio

    @property
    def file(self) -> MediaFile:
        return MediaFile("audio", f"data:audio/{self.input_audio.format};base64,{self.input_audio.data}")


FilePart = ImagePart | AudioURLPart | InputAudioPart
ContentPart = Annotated[TextPart | RefusalPart | FilePart, Field(discriminator="type")]


def _as_text(arguments: object) -> object:
    """Return arguments as text; clients of vLLM and of chat templates also send the object itself."""
    if arguments is None:
        return ""
    return json_text(arguments) if isinstance(arguments, dict) else arguments


class FunctionCall(OpenObject):
    name: GivenName
    arguments: Annotated[Text, BeforeValidator(_as_text)] = ""
    """The text of a JSON object."""


class ToolCall(OpenObject):
    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = Field(None, ge=0, lt=2**31)
    """Not used; present if the client joined the call from the deltas of a stream."""


class MessageParam(OpenObject):
    not_served: ClassVar[Neutral] = NEUTRAL_IN_MESSAGE
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    """Older name of `reasoning`."""
    refusal: Text | None = None
    """Refusal of another model: the text of a message without content."""

    @property
    def files(self) -> list[MediaFile]:
        """Its images and sounds."""
        parts = self.content if isinstance(self.content, list) else []
        return [part.file for part in parts if isinstance(part, FilePart)]

    def plain(self) -> dict[str, Any]:
        """Return role, text and name as chat templates expect them. Parts are lines, by vLLM's rule."""
        parts = self.content if isinstance(self.content, list) else []
        text = "\n".join(part.text for part in parts) if parts else self.content or self.refusal or ""
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class FunctionDefinition(OpenObject):
    name: ToolName
    description: Text | None = None
    parameters: JSON | None = None
    strict: bool | None = None


class Tool(OpenObject):
    type: Literal["function"] = "function"
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return the given fields as chat templates expect them."""
        known = set(FunctionDefinition.model_fields)
        return {"type": self.type, "function": self.function.model_dump(include=known, exclude_unset=True)}


class FunctionName(OpenObject):
    name: GivenName


class NamedTool(OpenObject):
    type: Literal["function"] = "function"
    function: FunctionName


class AllowedSet(OpenObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(OpenObject):
    """Some of the tools: the request is the same as one with these alone, and `mode` as `tool_choice`."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedSet
