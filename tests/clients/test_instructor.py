"""instructor: structured output through tools and through JSON schemas."""

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from tests.clients.conftest import RunningServer
from tests.clients.questions import ABOUT_ANN, Person

MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_parsed(server: RunningServer, mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(), mode=mode)
    found = client.chat.completions.create(
        model=server.model, response_model=Person, messages=ABOUT_ANN, max_tokens=256, temperature=0
    )
    assert isinstance(found, Person)


class Described(BaseModel):
    """A form whose values arrive in parts."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.mark.parametrize("mode", MODES)
def test_a_stream_is_parsed_while_it_arrives(server: RunningServer, mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(), mode=mode)
    parts = [
        *client.chat.completions.create_partial(
            model=server.model, response_model=Described, messages=ABOUT_ANN, max_tokens=256, temperature=0
        )
    ]
    assert len(parts) > 1
    Described.model_validate(parts[-1].model_dump())
