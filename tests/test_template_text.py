"""Chat templates see messages as they are, and special tokens count only where a template wrote
them; what takes too long or makes too much is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from test_tokenizer import byte_tokenizer, plain_ids
from tokenizers import AddedToken

from jaxinfer import template_limits
from jaxinfer.template_limits import TemplateLimitError, metered
from jaxinfer.template_text import MarkedText, joined
from jaxinfer.tokenizer import ChatTemplateError, Tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|critic|>", "<s>", "<s><", "\u2402"]
PIECES = [*SPECIAL, *"<|s>im_end x\n", "<|IM_END|>", "<|im_", "end|>", "</think>", "\ufdd0", "é"]
contents = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


def tokenizer_with(template: str) -> Tokenizer:
    config = {"chat_template": template, "bos_token": "<s>"}
    return byte_tokenizer([AddedToken(t, special=True) for t in SPECIAL], config)


def chat_ids(template: str, *contents: str) -> list[int]:
    messages = [{"role": "user", "content": content} for content in contents]
    return tokenizer_with(template).apply_chat_template(messages)


# -- what templates see ---------------------------------------------------------------------------

SEEN = [
    "{{ 'yes' if '</think>' in c else 'no' }}",
    "{{ c.startswith('<s>') }}{{ c.endswith('>') }}{{ c.find('m') }}{{ c.count('|') }}",
    "{{ c.split('</think>')[-1] }}|{{ c.split() }}|{{ c.rsplit('|', 1)[0] }}",
    "{{ c | length }}{{ c[:3] }}{{ c[-2:] }}{{ c[::-1] }}{{ c[1:2] }}{{ c | list | length }}",
    "{{ c | urlencode }}{{ c | e }}{{ c | tojson }}{{ c | tojson(ensure_ascii=true) }}",
    "{{ c | lower }}{{ c.upper() }}{{ c | title }}{{ c | capitalize }}{{ c.casefold() }}",
    "{{ c | replace('|', '') }}{{ c.replace('<', c) }}{{ c.replace('', '-') }}",
    "{{ c | trim }}{{ c.strip('<>') }}{{ c.lstrip('<') ~ c.rstrip('>') }}{{ c | indent }}",
    "{{ c.partition('|') | join('/') }}{{ c.splitlines() | join(c) }}{{ c is string }}{{ c }}",
    "{{ '%s|%5s|%%' | format(c, c) }}{{ '{}{:>4}{x!r}'.format(c, 'a', x=c) }}",
    "{{ '%(a)s' % dict(a=c) }}{{ c == '<s>' }}{{ c * 2 }}",
    "{{ c | safe + '<b>' }}{{ '<b>' + c | safe }}{{ c.ljust(9, '.') ~ c.rjust(9) ~ c.center(9) }}",
    "{{ c | wordcount }}{{ c | truncate(5) }}{{ [c, 'a'] | sort | first }}",
    "{% for x in c %}{{ loop.index }}{{ x }}{% endfor %}{{ c | string | first }}{{ c | reverse }}",
    "{% set n = namespace(t='') %}{% for x in c %}{% set n.t = x + n.t %}{% endfor %}{{ n.t }}",
]


@pytest.mark.parametrize("template", SEEN)
@given(content=contents)
@settings(max_examples=12, deadline=None)
def test_templates_see_messages_as_they_are(template: str, content: str) -> None:
    """Every expression gives what Jinja itself gives."""
    template = template.replace("c.", "m.content.").replace(" c ", " m.content ")
    template = "{% set m = messages[0] %}{% set c = m.content %}" + template
    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    jinja.policies["json.dumps_function"] = None
    tokenizer = tokenizer_with(template)
    jinja.filters["tojson"] = tokenizer._templates["default"]._template.environment.filters[
        "tojson"
    ]
    messages = [{"role": "user", "content": content}]
    with metered():
        wanted = jinja.from_string(template).render(messages=messages)
    assert tokenizer.render_chat(messages) == wanted
    assert type(tokenizer.render_chat(messages)) is str


# -- whose special tokens -------------------------------------------------------------------------

REBUILDING = [
    ("{{ c }}", lambda c: c),
    ("{{ c | lower }}", str.lower),
    ("{{ c | replace('\\n', '') }}", lambda c: c.replace("\n", "")),
    ("{{ c.replace('x', '') | trim }}", lambda c: c.replace("x", "").strip()),
    ("{{ c.split('x') | join }}", lambda c: c.replace("x", "")),
    ("{{ c[::-1] }}|>", lambda c: c[::-1] + "|>"),
    ("<|{{ c }}|>", lambda c: f"<|{c}|>"),
    ("{{ '<|im_' ~ c ~ '|>' }}", lambda c: f"<|im_{c}|>"),
    ("{{ '<|im_%s|>' | format(c) }}", lambda c: f"<|im_{c}|>"),
    ("{{ '<|im_{}|>'.format(c) }}", lambda c: f"<|im_{c}|>"),
    ("{{ ['<|im_', c, '.|>'] | join }}", lambda c: f"<|im_{c}.|>"),
    ("{{ '<|im_x|>'.replace('x', c) }}", lambda c: f"<|im_{c}|>"),
    ("{% for x in c %}{{ x }}{% endfor %}", lambda c: c),
    ("{% macro f(x) %}{{ x }}{% endmacro %}{{ f(c) + f(c) }}", lambda c: c + c),
    ("{% set x %}{{ c }}{% endset %}{{ x.strip() | string }}", str.strip),
    ("{{ c | safe }}{{ (c | safe) ~ '|>' }}", lambda c: c + c + "|>"),
]


@pytest.mark.parametrize(("template", "meaning"), REBUILDING)
@given(content=contents)
@settings(max_examples=20, deadline=None)
def test_no_message_makes_a_special_token(template: str, meaning: Any, content: str) -> None:
    template = "{% set c = messages[0].content %}<|im_start|>" + template + "<|im_end|>"
    tokenizer = tokenizer_with(template)
    messages = [{"role": "user", "content": content}]
    start, end = (tokenizer.raw.token_to_id(t) for t in SPECIAL[:2])
    ids = tokenizer.apply_chat_template(messages)
    assert ids == [start, *plain_ids(tokenizer, meaning(content)), end]
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    "expression",
    [
        "'<|im_end|>'",
        "'<|im_' ~ 'end|>'",
        "'<|im_' + 'end|>'",
        "'%s%s' % ('<|im_', 'end|>')",
        "'{}{}'.format('<|im_', 'end|>')",
        "'<|im_%s' | format('end|>')",
        "['<|im_', 'end|>'] | join",
        "'end'.join(['<|im_', '|>'])",
        "(' <|im_end|> ' ~ c) | trim | replace(c, '') | trim",
        "('<|im_end|>x' + c).split('x')[0]",
        "(c ~ '\\n<|im_end|>').rpartition('\\n')[2]",
        "(c ~ '<|im_end|>')[(c | length):]",
        "('<|IM_END|>' ~ c).lower().removesuffix(c)",
        "'<image>'.replace('<image>', '<|im_end|>')",
        "messages[0].content.replace(c, '<|im_end|>')",
        "messages[0].content | replace(c, '<|im_end|>')",
        "{'user': '<|im_end|>'}[messages[0].role]",
        "missing | default('<|im_end|>')",
        "(['<|im_end|>'] | list)[0] | string",
        "('<|im_end' | safe) ~ '|>'",
        "'<|im_end|>' if c else ''",
        "joiner('<|im_end|>')() ~ '<|im_end|>'",
        "[dict(a='<|im_end|>')] | map(attribute='a') | first",
        "('' ~ '<|im_end|>').ljust(3) | reverse | reverse",
    ],
)
def test_what_a_template_writes_is_special(expression: str) -> None:
    template = "{% set c = messages[0].content %}{{ " + expression + " }}"
    tokenizer = tokenizer_with(template)
    assert chat_ids(template, "q") == [tokenizer.raw.token_to_id("<|im_end|>")]


def test_a_special_token_that_a_message_extends_is_still_the_templates() -> None:
    """`<s><` would be one token, and `<s>` with a user's `<` after it is not."""
    tokenizer = tokenizer_with("")
    bos = tokenizer.raw.token_to_id("<s>")
    assert chat_ids("{{ bos_token }}{{ messages[0].content }}", "<") == [
        bos,
        *plain_ids(tokenizer, "<"),
    ]
    assert chat_ids("{{ bos_token }}{{ messages[0].content }}", "\u2402s") == [
        bos,
        *plain_ids(tokenizer, "\u2402s"),
    ]


def test_roles_may_be_part_of_marks() -> None:
    template = "{% for m in messages %}<|{{ m.role }}|>{% endfor %}"

    def ids(role: str, template: str = template) -> list[int]:
        return tokenizer_with(template).apply_chat_template([{"role": role, "content": ""}])

    tokenizer = tokenizer_with(template)
    assert ids("user") == [tokenizer.raw.token_to_id("<|user|>")]
    assert ids("im_end") == plain_ids(tokenizer, "<|im_end|>")  # nobody's usual role
    assert ids("user|><|im_end") == plain_ids(tokenizer, "<|user|><|im_end|>")
    named = template + "{% if messages[0].role == 'im_end' %}{% endif %}"
    assert ids("im_end", named) == [tokenizer.raw.token_to_id("<|im_end|>")]


# -- marks follow characters ----------------------------------------------------------------------

OPERATIONS = [
    lambda t, o: t.split(),
    lambda t, o: t.split("ab"),
    lambda t, o: t.rsplit("A", 1),
    lambda t, o: t.splitlines(),
    lambda t, o: t.splitlines(keepends=True),
    lambda t, o: t.partition("bA"),
    lambda t, o: t.rpartition("b"),
    lambda t, o: [t.strip(), t.lstrip("ab"), t.rstrip("B\n"), t.removeprefix("a")],
    lambda t, o: [t[1:4], t[::-2], t[-3:], *t, t * 2, 2 * t],
    lambda t, o: [t + o, o + t, o.join([t, t]), joined([t, "ab", o])],
    lambda t, o: [t.replace("a", o), t.replace("AB", "b", 1), t.replace("bA", o)],
    lambda t, o: [t.ljust(9, "a"), t.rjust(9, "b"), t.removesuffix("B")],
    lambda t, o: [MarkedText.of("a%sa%%%s").__mod__((t, o)), MarkedText.of("%(x)s") % {"x": t}],
]


@pytest.mark.parametrize("operation", OPERATIONS)
@given(st.text("aAbB \n", max_size=12), st.text("aAbB", max_size=3))
@settings(max_examples=30, deadline=None)
def test_marks_follow_their_characters(operation: Any, text: str, other: str) -> None:
    """Capitals are written by the template. What is lost is on the safe side."""

    def marked(text: str) -> MarkedText:
        return MarkedText(text, bytes(c.isupper() for c in text))

    with metered():
        results = operation(marked(text), marked(other))
        wanted = operation(text, other)
    assert [str.__str__(each) for each in results] == [str.__str__(each) for each in wanted]
    for each in results:
        if isinstance(each, MarkedText):
            plain, marks = each.unmarked()
            assert marks == bytes(c.isupper() for c in plain)


def test_parts_are_found_where_they_are() -> None:
    """And not in a separator with the same characters."""
    text = MarkedText("xaba", b"\1\1\1\0")
    with metered():
        for parts in (text.split("ab"), text.rsplit("ab"), text.partition("ab")[::2]):
            assert [MarkedText.of(part).unmarked() for part in parts] == [
                ("x", b"\1"),
                ("a", b"\0"),
            ]


# -- limits ---------------------------------------------------------------------------------------

SLOW = [
    "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "{{ (c * 9999) | list | length }}",
    "{% for a in c %}{% for b in c %}{% for d in c %}{{ '' }}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in range(99999) %}{{ range(99999) | map('string') | join | length }}{% endfor %}",
]
NEST = (
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
)
GROW = (
    "{% set n = namespace(x='x', l=[1]) %}{% for i in range(99) %}{% set n.x = *** %}{% endfor %}"
)


@pytest.mark.parametrize("template", [*SLOW, NEST + "{{ n.x }}", NEST + "{{ n.x | tojson }}"])
def test_templates_that_take_too_long(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.05)
    with pytest.raises(ChatTemplateError, match=r"'default' takes more than 0\.05 s of computing"):
        chat_ids("{% set c = messages[0].content %}" + template, "x" * 500)


@pytest.mark.parametrize(
    "template",
    [
        *(GROW.replace("***", step) for step in (
            "n.x + n.x", "n.x ~ n.x", "n.x * 9", "[n.x, n.x] | join", "'%s%s' % (n.x, n.x)",
            "'{0}{0}'.format(n.x)", "n.x | replace('x', 'xxx')", "c.replace('x', n.x) ~ n.x",
        )),
        GROW.replace("n.x = ***", "n.l = n.l + n.l"),
        "{% for a in range(99999) %}{{ c }}" + "data" * 99 + "{% endfor %}",
        "{{ c * 10 ** 9 }}", "{{ 10 ** 9 * c }}", "{{ [0] * 10 ** 9 }}",
        "{{ c.center(10 ** 9) }}", "{{ c.ljust(10 ** 9) }}", "{{ c | center(10 ** 9) }}",
        "{{ '%99999999d' % 1 }}", "{{ '{:{}}'.format(1, 99999999) }}",
        "{{ c | indent(10 ** 9) }}", "{{ c.zfill(10 ** 9) }}",
    ],
)  # fmt: skip
def test_templates_that_make_too_much(template: str) -> None:
    template = "{% set c = messages[0].content %}" + template
    with pytest.raises(
        ChatTemplateError, match=r"'default' makes .* more than 16777216 characters"
    ):
        chat_ids(template, "x" * 100)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 2 ** 1000000000 }}", "more than 65536 bits"),
        ("{{ '%999999999999d' % 1 }}", "more than nine digits"),
        ("{{ '%*d' % (10 ** 9, 1) }}", "a width that is not in the format"),
        ("{{ [1] | tojson(indent=10 ** 6) }}", "between JSON's parts; 64 is the limit"),
        ("{{ [1] | slice(10 ** 9) }}", "1000000000 parts; 100000 is the limit"),
        ("{{ c.translate({120: c}) }}", "'translate' .* is unsafe"),
        ("{{ 'x'.written(c) }}", "'written' .* is unsafe"),
        ("{{ 'x'._marks[0] }}", "'_marks' .* is unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_other_excesses_are_refused(template: str, why: str) -> None:
    with pytest.raises(ChatTemplateError, match=why):
        chat_ids("{% set c = messages[0].content %}" + template, "x")


def test_a_refusal_names_the_template_and_the_next_rendering_starts_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.05)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": SLOW[0]}]
    tokenizer = byte_tokenizer([], {"chat_template": named})
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="'tool_use' takes more than"):
            tokenizer.render_chat([], tools=[{}])
        assert tokenizer.render_chat([]) == "D"
    with pytest.raises(TemplateLimitError), metered():
        MarkedText.of("x") * 2**25
