"""Chat templates of well-known families' constructs, against transformers' own rendering."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CONVERSATIONS, TEMPLATES, TOOLS
from test_tokenizer import byte_tokenizer
from tokenizers import AddedToken

from jaxinfer.chat_template import ChatTemplateError, read_chat_template
from jaxinfer.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parent / "fixtures/oracles/text/chat.json").read_text())
MARKS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<|end|>")


def tokenizer_with(template: Any) -> Tokenizer:
    config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    return byte_tokenizer([AddedToken(mark, special=True) for mark in MARKS], config)


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case['template']}: {case['conversation']}"
)
def test_texts_are_those_of_transformers(case: dict[str, Any]) -> None:
    tokenizer = tokenizer_with(TEMPLATES[case["template"]])
    messages, options = CONVERSATIONS[case["conversation"]]
    options = {"add_generation_prompt": False, **options}
    options["tools"] = TOOLS if options.get("tools") else None
    if "refused" in case:
        with pytest.raises(ChatTemplateError) as error:
            tokenizer.render_chat(messages, **options)
        assert case["refused"] in str(error.value)
    else:
        assert tokenizer.render_chat(messages, **options) == case["text"]


def test_the_cases_show_what_templates_rely_on() -> None:
    texts = {(case["template"], case["conversation"]): case.get("text") for case in CASES}
    assert texts["gemma", "system"] is None  # it takes none, and says so
    assert texts["mistral", "wrong turns"] is None
    assert texts["qwen3", "not thinking"] != texts["qwen3", "one question"]
    assert texts["command-r", "documents"] != texts["command-r", "one question"]
    assert '"description": "The weather in a place, in °C <now>"' in texts["llama3", "tools"]
    assert sum(text is None for text in texts.values()) < len(texts) / 5


def test_templates_by_name() -> None:
    named = [
        {"name": "default", "template": "plain {{ messages | length }}"},
        {"name": "tool_use", "template": "with {{ tools | length }} tools"},
    ]
    tokenizer = tokenizer_with(named)
    assert tokenizer.chat_templates == ("default", "tool_use")
    assert tokenizer.render_chat([{}]) == "plain 1"
    assert tokenizer.render_chat([{}], tools=TOOLS) == "with 1 tools"
    assert tokenizer.render_chat([{}], tools=[]) == "plain 1"
    with pytest.raises(ChatTemplateError, match=r"named default \(only tool_use\)"):
        tokenizer_with(named[1:]).render_chat([{}])
    other = tokenizer.with_chat_template("other {{ bos_token }}")
    assert other.render_chat([{}], tools=TOOLS) == "other <s>"
    assert tokenizer.render_chat([{}]) == "plain 1"  # as before


def test_templates_in_files_of_their_own(tmp_path: Path) -> None:
    tokenizer_with("in the config").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("in a file")
    assert Tokenizer.from_folder(tmp_path).render_chat([]) == "in a file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    both = Tokenizer.from_folder(tmp_path)
    both.save(tmp_path / "saved")
    again = Tokenizer.from_folder(tmp_path / "saved")
    for tokenizer in (both, again):
        assert tokenizer.render_chat([]) == "in a file"
        assert tokenizer.render_chat([], tools=TOOLS) == "for tools"
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ValueError, match=rf"{tmp_path}: chat template does not parse"):
        Tokenizer.from_folder(tmp_path)


def test_a_template_given_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0].content }}!")
    assert read_chat_template(file) == "{{ messages[0].content }}!"
    for content, message in (
        (b"{% if %}", r"t\.jinja: line 1: .*Expected an expression"),
        (b"\xff\xfe", r"t\.jinja: is not UTF-8"),
        (b" \n", r"t\.jinja: is empty"),
        (b"{{ x | nofilter }}", r"t\.jinja: line 1: No filter named 'nofilter'"),
    ):
        file.write_bytes(content)
        with pytest.raises(ChatTemplateError, match=message):
            read_chat_template(file)
    with pytest.raises(ChatTemplateError, match="cannot be read: No such file"):
        read_chat_template(tmp_path / "none.jinja")
    with pytest.raises(ChatTemplateError, match="cannot be read: Is a directory"):
        read_chat_template(tmp_path)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__base__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ (messages | attr('append'))(1) }}",
        "{% for _ in range(10**9) %}{% endfor %}",
    ],
)
def test_templates_stay_in_their_sandbox(attack: str) -> None:
    tokenizer = tokenizer_with(attack)
    try:
        text = tokenizer.render_chat([{"role": "user", "content": "x"}])
    except ChatTemplateError:
        return
    assert "class" not in text and "uid=" not in text and "globals" not in text


def test_a_broken_entry_is_named() -> None:
    for template in (7, [{"name": "default"}], ["x"], {"default": "x"}):
        with pytest.raises(ValueError, match="chat_template: expected"):
            tokenizer_with(template)
