"""A process that renders a template once, under limits of the kernel: `python -m services.frontend.templates.trial`.

Reads {"template", "special"} as JSON from stdin. Exits with 0 if the template is usable, else with 1 and the reason in
one line. The kernel kills it if the template runs endlessly or fills the memory.
"""

import json
import resource
import sys
from typing import Any

import jinja2

from services.frontend.templates.sandbox import Sandbox, TemplateLimit

SECONDS = 2
"""Limit of processor time."""
MEGABYTES = 1024
"""Limit of address space."""

USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
CALL = {"id": "123456789", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
TOOL = {
    "type": "function",
    "function": {"name": "now", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
CONVERSATIONS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([USER], None),
    ([{"role": "system", "content": "Be brief."}, USER, ASSISTANT, USER], None),
    (
        [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "noon", "tool_call_id": "123456789", "name": "now"},
        ],
        [TOOL],
    ),
)


def main() -> int:
    job = json.load(sys.stdin)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    sandbox = Sandbox()
    try:
        template = sandbox.from_string(job["template"])
        for messages, tools in CONVERSATIONS:
            variables = {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": True,
                **job["special"],
            }
            try:
                sandbox.render(template, variables, SECONDS)
            except (TemplateLimit, MemoryError):
                raise
            except Exception:  # noqa: S112  the template may refuse these messages and accept others
                continue
    except (jinja2.TemplateError, TemplateLimit, RecursionError, MemoryError) as error:
        print(" ".join(str(error).split()) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
