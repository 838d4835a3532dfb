"""Responses in the background outlive the frontend that generates them."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI

from tests.e2e.second_frontend import second_frontend
from tests.e2e.server import SIM, serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "required": ["a", "b"]}
KINDS: list[dict[str, Any]] = [
    {
        "input": "Tell a story",
        "temperature": 1.2,
        "extra_body": {"seed": 7, "presence_penalty": 0.5, "ignore_eos": True},
    },
    {"input": "Greedy", "temperature": 0, "extra_body": {"ignore_eos": True}},
    {
        "input": "As JSON",
        "extra_body": {"seed": 3},
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}},
    },
]
CUT = 25
"""Events of each stream before its frontend is killed."""


async def test_streams_go_on_at_another_frontend_when_theirs_is_killed(tmp_path: Path) -> None:
    store = ("--response-store-dir", str(tmp_path))
    with serving(*SIM, *store) as server:
        async with server.async_client() as client, second_frontend(server, *store) as owner:
            model = (await client.models.list()).data[0].id

            async def events(at: AsyncOpenAI, fields: dict[str, Any], after: asyncio.Barrier | None) -> list[Any]:
                seen: list[Any] = []
                with contextlib.suppress(APIError, httpx.HTTPError):
                    stream = await at.responses.create(
                        model=model, max_output_tokens=80, background=True, stream=True, **fields
                    )
                    async for event in stream:
                        seen.append(event)
                        if after is not None and len(seen) == CUT:
                            await after.wait()
                return seen

            undisturbed = await asyncio.gather(*(events(client, fields, None) for fields in KINDS))
            reached = asyncio.Barrier(len(KINDS) + 1)
            async with owner.async_client() as killed:
                streams = [asyncio.create_task(events(killed, fields, reached)) for fields in KINDS]
                await asyncio.wait_for(reached.wait(), 60)
                await owner.kill()
                begun = await asyncio.gather(*streams)
            for seen, whole in zip(begun, undisturbed, strict=True):
                assert len(seen) >= CUT
                id, after = seen[0].response.id, seen[-1].sequence_number
                rest = await client.responses.retrieve(id, stream=True, starting_after=after)
                seen += [event async for event in rest]
                assert [event.sequence_number for event in seen] == list(range(len(seen)))
                assert text_of(seen) == text_of(whole) == seen[-1].response.output_text
                assert seen[-1].type == whole[-1].type
                assert seen[-1].response.usage.output_tokens == whole[-1].response.usage.output_tokens
            assert len(server.log.read_text().split("a response of a lost frontend was taken up")) == len(KINDS) + 1


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")
