"""Conversations with tools become the text that templates of each kind make of them."""

from __future__ import annotations

import pytest
import typer
from jaxinfer_service.cli import text_options
from test_tokenizer import byte_tokenizer

from jaxinfer.chat_template import ChatTemplateError
from jaxinfer.conversation import Conversation
from jaxinfer.replies.formats import reply_format
from jaxinfer.request import RequestError
from jaxinfer.tokenizer import Tokenizer

TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
USER = {"role": "user", "content": "x"}


def call(number: int) -> dict:
    return {"id": f"c{number}", "type": "function"} | {
        "function": {"name": "f", "arguments": f'{{"a": {number}}}'}
    }


def result(number: int) -> dict:
    return {"role": "tool", "content": f"r{number}", "tool_call_id": f"c{number}"}


ONE = [USER, {"role": "assistant", "content": None, "tool_calls": [call(1)]}, result(1)]
TWO = [
    USER,
    {"role": "assistant", "content": "So", "tool_calls": [call(1), call(2)]},
    result(2),
    result(1),
    USER,
]
BEGIN = "{% if tools %}T{% endif %}{% for m in messages %}[{{ m.role }}]"
FIRST_CALL = "{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls[0].id }}{% endif %}"


def tokenizer(template: str) -> Tokenizer:
    return byte_tokenizer([], {"chat_template": template})


def rendered(template: str, messages: list, tools=(TOOL,), **options) -> str:
    tokens = tokenizer(template)
    return tokens.decode(Conversation(messages, tools, options).encode(tokens))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (  # as Qwen's: an object, and no content
            "{% if m.content is not none %}{{ m.content }}{% endif %}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}",
            'T[user]x[assistant]{"a": 1}[tool]r1',
        ),
        (  # as DeepSeek's first: arguments that are text
            "{{ m.content or '' }}"
            "{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}{% endfor %}",
            'T[user]x[assistant]<{"a": 1}>[tool]r1',
        ),
        (  # as gpt-oss': a content that is always text
            "{{ '' + m.content }}"
            "{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}{% endfor %}",
            'T[user]x[assistant]<{"a": 1}>[tool]r1',
        ),
        (  # as Granite 3's, which knows of no calls
            "{{ '' + m.content }}{# <|tool_call|> #}",
            'T[user]x[assistant]<|tool_call|>[{"name": "f", "arguments": {"a": 1}}][tool]r1',
        ),
    ],
    ids=["object", "text", "text, no null", "no calls"],
)
def test_messages_take_the_form_that_a_template_renders(body, text):
    assert rendered(BEGIN + body + "{% endfor %}", ONE) == text


@pytest.mark.parametrize(
    "rule",
    [
        "{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one') }}{% endif %}",
        "{# <|channel|> #}",
    ],
    ids=["refused", "left out"],
)
def test_several_calls_where_a_template_takes_one(rule):
    """Each in a message of its own, with its result behind it."""
    text = rendered(BEGIN + rule + FIRST_CALL + "{% endfor %}", TWO)
    assert text == "T[user]x[assistant]Soc1[tool]r1[assistant]c2[tool]r2[user]x"


def test_results_that_name_no_call_are_of_the_calls_in_their_order():
    unnamed = [{**each} for each in TWO]
    for message in unnamed[2:4]:
        del message["tool_call_id"]
    text = rendered(BEGIN + "{# <|channel|> #}" + FIRST_CALL + "{% endfor %}", unnamed)
    assert text == "T[user]x[assistant]Soc1[tool]r2[assistant]c2[tool]r1[user]x"


def test_tools_where_the_template_takes_none_and_no_system_message_either():
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    text = rendered(template, [USER])
    assert text.startswith("[user]You can use") and text.endswith("\n\nx")
    assert rendered(template, [USER], ()) == "[user]x"
    with pytest.raises(ChatTemplateError, match="no system"):
        rendered(template, [{"role": "system", "content": "s"}], ())


def test_what_is_no_text_is_refused_wherever_it_is():
    half = "\ud800"
    for odd in (
        Conversation([{**USER, "name": half}]),
        Conversation([USER], [TOOL | {"function": {"name": "f", "parameters": {half: 1}}}]),
        Conversation([USER], (), {"x": [{"y": half}]}),
    ):
        with pytest.raises(ValueError, match="surrogates"):
            _ = odd.size


def test_reasoning_off_by_the_switch_that_a_template_has():
    template = "{{ messages[0].content }}{{ enable_thinking is defined and not enable_thinking }}"
    assert rendered(template, [USER], (), reasoning_effort="none") == "xTrue"
    with pytest.raises(RequestError, match="does not read"):
        rendered(template, [USER], (), reasoning_effort="low")
    own = "{{ reasoning_effort }}{{ enable_thinking is defined }}"
    assert rendered(own, [USER], (), reasoning_effort="none") == "noneFalse"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", "hermes", ""),
        ("{{ tools }}", "", ""),
        ("{{ tools }}<tool_call>{{ {'arguments': 1} }}", "", ""),
        ('{{ tools }}<tool_call>{"arguments"}<think>', "hermes", "qwen3"),
        ("{{ tools }}<tool_call><function=", "qwen3_coder", ""),
        ('{{ tools }}{"name": n, "parameters": dictionary', "llama3_json", ""),
        ("{{ tools }}[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("{{ tools }}<｜tool▁call▁begin｜></think>", "deepseek_v3", "qwen3"),
        ("{{ tools }}<|tool_call|><think></think>.<response></response>", "granite", "granite"),
        ("{{ tools }}<|channel|><|message|>", "openai", "openai"),
    ],
)
def test_the_form_of_replies_is_found_in_the_template(template, tools, reasoning):
    found = reply_format(tokenizer(template))
    assert (found.tool_parser, found.reasoning_parser) == (tools, reasoning)
    none = reply_format(tokenizer(template), "none", "none")
    assert (none.tool_parser, none.reasoning_parser) == ("", "")


def test_options_of_the_command_line():
    assert text_options.parse_tool_parser("hermes") == "hermes"
    assert text_options.parse_reasoning_parser("none") == "none"
    for parse in (text_options.parse_tool_parser, text_options.parse_reasoning_parser):
        with pytest.raises(typer.BadParameter, match="there are auto, none, "):
            parse("r1")
    shown = reply_format(tokenizer("{{ tools }}[TOOL_CALLS]")).describe()
    assert shown == "tool_call_parser mistral, reasoning_parser none"


def test_parsers_that_there_are_not_and_that_nobody_is_told_of():
    with pytest.raises(ValueError, match="there are auto, none, hermes"):
        reply_format(tokenizer("{{ tools }}"), "hermez")
    with pytest.raises(ValueError, match="there are auto, none, deepseek_r1"):
        reply_format(tokenizer("{{ tools }}"), "auto", "r1")
    with pytest.raises(ValueError, match="takes no tools"):
        reply_format(tokenizer("{{ messages }}"), "mistral")
