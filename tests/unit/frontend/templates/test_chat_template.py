"""Prompts equal those of transformers; a template cannot leave the sandbox or exceed its limits."""

import json
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from services.checkpoint import DEMO_MODEL, CheckpointError
from services.frontend.errors import APIError
from services.frontend.templates import chat_template
from services.frontend.templates.chat_template import ChatTemplate, find_template
from services.frontend.templates.jobs import Conversation, Rendered, TemplatesBroken, TemplateSources
from services.frontend.templates.render_process import CompiledTemplates
from services.frontend.templates.renderer import Renderer
from services.frontend.templates.sandbox import Sandbox, TemplateLimit
from services.frontend.text.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  Hi, <b>"you"</b>\n'},
    {"role": "assistant", "content": "Hello 😀"},
    {"role": "user", "content": "What is 2 + 2?"},
]
TEMPLATES = {
    "demo": find_template(DEMO_MODEL, None),
    "namespaces and loop controls": (
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}"
        "{%- endif -%}{%- set ns.n = ns.n + 1 -%}[{{ ns.n }}:{{ m.content }}]{%- if loop.last -%}{%- break -%}"
        "{%- endif -%}{%- endfor -%}"
    ),
    "tojson": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "blocks trimmed": (
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}"
    ),
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "slices and macros": (
        "{%- macro say(m) -%}<{{ m['role'][0] | upper }}>{{ m['content'] }}{%- endmacro -%}"
        "{%- for m in messages[1:] -%}{{ say(m) }}{%- endfor -%}"
    ),
    "qwen3 thinking": (
        "{%- set ns = namespace(last=messages|length - 1) %}{%- for message in messages[::-1] %}"
        "{%- set index = (messages|length - 1) - loop.index0 %}"
        "{%- if message.role == 'user' and message.content is string and not(message.content.startswith('<tool'))"
        " and ns.last == messages|length - 1 %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
        "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content"
        ".split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}{%- endfor %}{{ ns.last }}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}"
        "{%- endif %}"
    ),
    "date": "{{ strftime_now('%d %b %Y') }}{{ documents is none }}{{ messages | tojson(sort_keys=True) }}",
    "generation marks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_is_the_one_that_transformers_renders(name: str) -> None:
    text = TEMPLATES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO_MODEL / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>"
    )
    special = Tokenizer(DEMO_MODEL).special
    expected = tokenizer.apply_chat_template(MESSAGES, chat_template=text, tokenize=False, add_generation_prompt=True)
    template = ChatTemplate(text, special)
    template.try_out()
    assert template.render(Conversation(MESSAGES)) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "too long"),
        (None, "--chat-template"),
        ("{{ messages.append(1) }}", "cannot be applied"),
    ],
)
def test_template_that_fails_over_these_messages_is_a_400(text: str | None, reason: str) -> None:
    with pytest.raises(APIError, match=reason) as refused:
        ChatTemplate(text, {}).render(Conversation([dict(message) for message in MESSAGES]))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ messages[7].content }}", "{{ 1 / 0 }}",
        "{{ messages + 1 }}", "{{ messages[0]['content'] % 5 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)  # fmt: skip
def test_expression_that_fails_or_leaves_the_sandbox_ends_the_rendering(text: str) -> None:
    templates = CompiledTemplates(TemplateSources(text, None, {}))
    assert isinstance(templates.render(Conversation(MESSAGES)), TemplatesBroken)


def test_broken_template_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="broken"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_template(tmp_path, str(tmp_path / "missing.jinja"))


def test_template_of_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.jinja").write_text("T")
    assert find_template(tmp_path, "~/own.jinja") == "T"


def test_template_is_found_in_its_three_places(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert find_template(tmp_path, None) == "D"
    config.write_text(json.dumps({"chat_template": "S"}))
    assert find_template(tmp_path, None) == "S"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert find_template(tmp_path, None) == "J"
    (tmp_path / "own").write_text("O")
    assert find_template(tmp_path, str(tmp_path / "own")) == "O"


class EndlessKey(str):
    def __str__(self) -> NoReturn:
        while True:
            pass


@pytest.mark.parametrize(
    "endless",
    ["{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "{{ {}[key] }}"],
    ids=["loops", "where jinja catches exceptions"],
)
def test_rendering_that_takes_too_long_is_ended(endless: str) -> None:
    sandbox = Sandbox()
    with pytest.raises(TemplateLimit, match="too long"):
        sandbox.render(sandbox.from_string(endless), {"key": EndlessKey()}, seconds=0.05)


def test_template_is_not_refused_because_the_machine_is_busy() -> None:
    sandbox = Sandbox()
    pause = sandbox.from_string("{{ pause(0.1) }}{{ messages | length }}")
    assert sandbox.render(pause, {"pause": time.sleep}, seconds=0.05) == "None0"


@pytest.mark.parametrize(
    "text",
    ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
     "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
     "{% if tools %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}",
     "{{ 'x' * 10 ** 11 }}", "{% for %}"],
    ids=["endless", "doubling", "endless with tools", "huge", "syntax"],
)  # fmt: skip
def test_template_that_would_hang_the_server_fails_its_trial(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TRIAL_SECONDS", 0.05)
    with pytest.raises(CheckpointError, match="broken"):
        ChatTemplate(text, {}).try_out()


HUGE = {
    "format": "{{ '%1500000000d' | format(1) }}",
    "behind an if": "{% if messages | length > 1 %}{{ '%1500000000d' | format(1) }}{% endif %}",
    "method": "{{ messages[0].role.center(1500000000) }}",
    "filter": "{{ 'x' | center(1500000000) }}",
    "ljust": "{{ 'x'.ljust(1500000000) | length }}",
    "product": "{{ (['a' * 8000000] * 200) | join | length }}",
    "replace": "{{ ('a' * 80000).replace('a', 'b' * 80000) | length }}",
    "list": "{{ range(99999) | batch(100000000, 1) | list | length }}",
    "doubling": "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
}


@pytest.mark.parametrize("name", HUGE)
def test_expression_that_takes_memory_is_a_400_and_the_next_conversation_is_rendered(name: str) -> None:
    """The template may do so only for some messages, as here; the limit holds for the process that renders."""
    text = f"{{% if messages[0].role == 'system' %}}{HUGE[name]}{{% else %}}fine{{% endif %}}"
    template = ChatTemplate(text, {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(APIError, match="too long") as refused:
        template.render(Conversation(MESSAGES))
    assert refused.value.status == 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    assert template.render(Conversation(MESSAGES[1:])) == "fine"


def test_expression_that_takes_memory_while_compiled_does_not_take_it_here() -> None:
    """jinja evaluates constant expressions when it compiles a template, also behind an `if`."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    template = ChatTemplate("{% if messages | length > 9 %}{{ '%1500000000d' | format(1) }}{% endif %}fine", {})
    assert template.render(Conversation(MESSAGES)) == "fine"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_variables_of_the_server_hold_where_a_conversation_does_not_set_them() -> None:
    template = ChatTemplate("{{ think }} {{ style }}", {}, variables={"think": False, "style": "brief"})
    assert template.render(Conversation(MESSAGES, variables={"style": "long"})) == "False long"
    with pytest.raises(CheckpointError, match=r"--default-chat-template-kwargs: .* may not set tools"):
        ChatTemplate("", {}, variables={"tools": []})


def test_renderer_that_was_killed_while_idle_is_replaced() -> None:
    others = set(psutil.Process().children())
    renderer = Renderer(TemplateSources("{{ messages[0].role }}", None, {}))
    (process,) = set(psutil.Process().children()) - others
    assert renderer.render(Conversation(MESSAGES)) == Rendered("system")
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert renderer.render(Conversation(MESSAGES)) == Rendered("system")


def test_conversations_of_many_threads_do_not_mix() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    conversations = [Conversation([{"role": "user", "content": f"{i} " * 1000}]) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(template.render, conversations))
    assert prompts == [given.messages[0]["content"] for given in conversations]
