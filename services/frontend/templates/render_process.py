"""The process that renders chat templates: `python -m services.frontend.templates.render_process FD PARENT_PID`.

A template is a program of the checkpoint. jinja's sandbox denies access to Python's internals, but one expression can
still take any amount of memory (`'%9000000000d' | format(1)`), even while the template is compiled. Therefore templates
are compiled and rendered here, under limits of the kernel, and never in the frontend.
"""

import contextlib
import gc
import resource
import sys
from multiprocessing.connection import Connection
from typing import Any

import jinja2
import msgspec
from jinja2 import meta

from services.frontend.templates import jobs
from services.frontend.templates.sandbox import Sandbox, TemplateException, TemplateLimit
from services.process import die_with_parent

MEGABYTES = 512
"""Limit of address space. A prompt of the maximum size takes about 200."""
COMPILE_SECONDS = 30
"""Limit of processor time to compile the templates."""
_NO_MEMORY = jobs.LimitReached("rendering it takes too much memory")


class _CompiledTemplate:
    def __init__(self, sandbox: Sandbox, text: str) -> None:
        self.template = sandbox.from_string(text)
        self.variables = meta.find_undeclared_variables(sandbox.parse(text))


class CompiledTemplates:
    """Raises: jinja2.TemplateError, MemoryError or RecursionError, if a template cannot be compiled"""

    def __init__(self, sources: jobs.TemplateSources) -> None:
        self._special = sources.special
        self._sandbox = Sandbox()
        self._default, self._tool_use = (
            _CompiledTemplate(self._sandbox, text) if text is not None else None
            for text in (sources.default, sources.tool_use)
        )

    def render(self, job: jobs.Conversation) -> jobs.Outcome:
        compiled = self._tool_use if job.tools is not None and self._tool_use is not None else self._default
        if compiled is None:
            return jobs.TemplatesBroken("there is no template for a conversation without tools")
        given = {name: value for name, value in job.variables.items() if name in compiled.variables}
        variables: dict[str, Any] = {
            **self._special,
            **given,
            "messages": job.messages,
            "tools": job.tools,
            "documents": None,
            "add_generation_prompt": job.add_generation_prompt,
        }
        try:
            return jobs.Rendered(self._sandbox.render(compiled.template, variables, job.seconds))
        except TemplateException as error:
            return jobs.TemplateRefused(str(error)[:1000])
        except TemplateLimit as error:
            return jobs.LimitReached(str(error))
        except MemoryError:
            return _NO_MEMORY
        except Exception as error:  # expressions of the template fail on unexpected messages
            return jobs.TemplatesBroken(type(error).__name__)


def _limit_seconds(seconds: float) -> None:
    """Let the kernel end this process after `seconds` more of processor time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, most))


def _compile(data: bytes) -> tuple[CompiledTemplates | None, jobs.Outcome]:
    _limit_seconds(COMPILE_SECONDS)
    try:
        return CompiledTemplates(msgspec.json.decode(data, type=jobs.TemplateSources)), jobs.Rendered("")
    except (jinja2.TemplateError, MemoryError, RecursionError) as error:
        return None, jobs.TemplatesBroken(" ".join(str(error).split())[:1000] or type(error).__name__)


def _outcome(templates: CompiledTemplates, data: bytes) -> jobs.Outcome:
    try:
        job = msgspec.json.decode(data, type=jobs.Conversation)
        _limit_seconds(job.seconds)
        return templates.render(job)
    except MemoryError:
        return _NO_MEMORY


def main(descriptor: str, parent: str) -> int:
    die_with_parent(int(parent))
    resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
    gc.freeze()
    with Connection(int(descriptor)) as connection, contextlib.suppress(EOFError, OSError):  # the frontend has ended
        templates, outcome = _compile(connection.recv_bytes())
        connection.send_bytes(msgspec.json.encode(outcome))
        while templates is not None:
            connection.send_bytes(msgspec.json.encode(_outcome(templates, connection.recv_bytes())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
