"""Chat templates render as transformers renders them; conversations in JSON are read strictly."""

import json

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eagle_graphs.errors import EagleError
from eagle_runtime.chat import ChatTemplate, messages_from_json

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is 3 < 5 & \"é\" > 'e'? 😀"},
    {"role": "assistant", "content": "  Yes.\n"},
    {"role": "user", "content": "Why?"},
]

CHATML = """\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou help.<|im_end|>' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' -}}
{% endif %}
"""
INSTRUCT = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- if messages[0].role == 'system' %}
    {%- set ns.system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user and assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + ns.system + message.content | trim + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- else %}
        {{- ' ' + message.content.strip() + eos_token }}
    {%- endif %}
{%- endfor %}
"""
ALL_CONVENTIONS = """\
{{ strftime_now('%Y') }} {{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}
{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}
{% for message in messages %}
{% if message.role == 'assistant' %}{% continue %}{% endif %}
{% if loop.index == 4 %}{% break %}{% endif %}
{{ message.content }}
{% endfor %}
"""
TRAINING = """\
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {%- generation -%}{% set shout = message.content | upper %}{{ shout }}{{ eos_token }}{%- endgeneration -%}
  {%- else -%}
    {{ message.content }}{{ shout }}
  {%- endif -%}
{%- endfor -%}
"""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("source", [CHATML, INSTRUCT, ALL_CONVENTIONS, TRAINING])
@pytest.mark.parametrize("messages", [CONVERSATION, CONVERSATION[1:], CONVERSATION[1:2]])
def test_renders_as_transformers_does(source, messages, add_generation_prompt):
    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL_TOKENS)
    expected = reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    template = ChatTemplate(source, SPECIAL_TOKENS)
    assert template.render(messages, add_generation_prompt=add_generation_prompt) == expected


def test_the_generation_prompt_is_on_by_default():
    prompt = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "Hi"}])
    assert prompt == (
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_templates_own_message_reaches_the_user():
    with pytest.raises(EagleError, match=r"roles: assistant.*roles must alternate user and assistant"):
        ChatTemplate(INSTRUCT, SPECIAL_TOKENS).render([{"role": "assistant", "content": "Hi"}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"line 1"),
        ("one\n{{ 'a' | no_such_filter }}", r"no_such_filter.*line 2"),
        ("{% for m in messages %}", r"endfor"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, r"nested"),
    ],
)
def test_a_template_that_does_not_parse(source, message):
    with pytest.raises(EagleError, match=message) as caught:
        ChatTemplate(source, {})
    assert "does not parse" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ messages.__class__.__mro__ }}", "__class__"),
        ("{{ 1 // 0 }}", "zero"),
    ],
)
def test_a_template_that_fails(source, message):
    with pytest.raises(EagleError, match=message):
        ChatTemplate(source, {}).render(CONVERSATION)


def test_messages_are_read():
    assert messages_from_json(json.dumps(CONVERSATION), "chat.json") == CONVERSATION


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{", r"chat\.json is not JSON \(.*column"),
        ("[" * 100_000, r"chat\.json is not JSON"),
        ("", r"chat\.json is not JSON"),
        ('{"role": "user", "content": "Hi"}', r"holds an object: expected a list"),
        ("null", r"holds null"),
        ("3", r"holds a number"),
        ("[]", r"holds an empty list"),
        ('["Hi"]', r"message 1 is a string: expected an object"),
        ('[{"role": "user"}]', r'message 1 has no "content"'),
        ('[{"content": "Hi"}]', r'message 1 has no "role"'),
        ('[{"role": "user", "content": null}]', r'"content" is null, expected a string'),
        ('[{"role": "user", "content": [{"type": "text"}]}]', r'"content" is a list'),
        ('[{"role": true, "content": "Hi"}]', r'"role" is a boolean'),
        ('[{"role": "user", "content": "Hi", "name": "x"}]', r"unknown keys \['name'\]"),
        (
            '[{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Hi"}]',
            r'message 2 has the role "bot".*tool',
        ),
        (r'[{"role": "user", "content": "\ud83d"}]', r"half of a surrogate pair"),
    ],
)
def test_anything_else_is_refused(text, message):
    with pytest.raises(EagleError, match=message):
        messages_from_json(text, "chat.json")
