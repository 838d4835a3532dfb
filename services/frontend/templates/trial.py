"""A process that renders a template once, under limits the kernel keeps: `python -m services.frontend.templates.trial`.

Reads {"template", "special"} as JSON. Ends with 0 when the template is usable, or with 1 and a line that says why not;
a template that would run for ever or fill the memory is killed.
"""

import json
import resource
import sys
from typing import Any

import jinja2

from services.frontend.templates.sandbox import Sandbox, TemplateLimit

SECONDS = 2
"""Of processor time."""
MEGABYTES = 1024

USER, ASSISTANT = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}
CALL = {"id": "123456789", "type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "now",
        "description": "The time.",
        "parameters": {"type": "object", "properties": {}},
    },
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
            except Exception:  # noqa: S112  it may refuse these messages and take others
                continue
    except (jinja2.TemplateError, TemplateLimit, RecursionError, MemoryError) as error:
        print(" ".join(str(error).split()) or type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
