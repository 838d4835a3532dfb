"""Rendering equals transformers', and a template can neither escape nor blow up."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from services.checkpoint import DEMO_MODEL, CheckpointError
from services.frontend.chat_template import ChatTemplate, find_template
from services.frontend.errors import APIError
from services.frontend.tokenizer import Tokenizer

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": '  Hi, <b>"you"</b>\n'},
    {"role": "assistant", "content": "Hello 😀"},
    {"role": "user", "content": "What is 2 + 2?"},
]
TEMPLATES = {
    "demo": find_template(DEMO_MODEL, None),
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>'"
        " + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "llama 3": (
        "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|start_header_id|>' + message['role'] + "
        "'<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n"
        "    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}\n{%- endif %}"
    ),
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
    "tools absent": "{% if tools is not none and tools %}tools{% else %}none{% endif %}{{ messages | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompt_is_the_one_that_transformers_renders(name: str) -> None:
    text = TEMPLATES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(DEMO_MODEL / "tokenizer.json"),
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        pad_token="<|pad|>",
    )
    special = Tokenizer(DEMO_MODEL).special
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=text, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(text, special).render(MESSAGES) == expected


def test_what_a_template_raises_is_a_400_with_its_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(APIError, match="roles must alternate") as refused:
        template.render(MESSAGES)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_sandbox_holds(text: str) -> None:
    with pytest.raises(APIError):
        ChatTemplate(text, {}).render([dict(message) for message in MESSAGES])


def test_endless_output_is_cut_off() -> None:
    with pytest.raises(APIError, match="too long"):
        ChatTemplate("{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", {}).render(MESSAGES)


def test_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(APIError, match="--chat-template"):
        ChatTemplate(None, {}).render(MESSAGES)


def test_broken_template_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="broken"):
        ChatTemplate("{% for %}", {})
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_template(tmp_path, str(tmp_path / "missing.jinja"))


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
