"""Questions, tools and forms of answers that every client uses.

Answers have few possible values, and a person no further fields: a small model would write a text without end.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ASK = "Name one colour."
MESSAGES: Any = [{"role": "user", "content": ASK}]
ABOUT_ANN: Any = [{"role": "user", "content": "Ann is seven."}]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ann", "Bob"]
    age: Literal[6, 7, 8]


class City(BaseModel):
    city: Literal["Paris", "Rome"]


WEATHER: Any = {
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "parameters": City.model_json_schema(),
}
TOOL: Any = {"type": "function", "function": WEATHER}
