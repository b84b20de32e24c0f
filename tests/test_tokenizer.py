"""Tokenizers: exact ids, special tokens in users' text, chat templates, files."""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from demo_model import demo_path
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_checkpoint import CHAT_TEMPLATE, write_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from jaxinfer.tokenizer import ChatTemplateError, Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "<", "<s><"]


def byte_tokenizer(added: list[AddedToken], config: dict[str, Any] | None = None) -> Tokenizer:
    """Every byte a token, no merges: ids of text are hand-computable."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    for token in added:
        (raw.add_special_tokens if token.special else raw.add_tokens)([token])
    return Tokenizer(raw.to_str(), config or {})


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text whose bytes are all plain, computed without the library's search."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = byte_level.pre_tokenize_str(text)
    return [tokenizer.raw.token_to_id(c) for piece, _ in pieces for c in piece]


@functools.cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(demo_path() / "tokenizer")


@functools.cache
def many_special() -> Tokenizer:
    """Overlapping special tokens, one of a single character, one looked for after normalizing."""
    return byte_tokenizer([AddedToken(t, special=True, normalized=t == "<s>") for t in SPECIAL])


@pytest.fixture
def demo() -> Tokenizer:
    return demo_tokenizer()


def test_demo_ids(demo: Tokenizer) -> None:
    assert demo.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert demo.vocab_size == 49152
    assert demo.eos_ids == (2,)
    assert demo.id_to_token(2) == "<|im_end|>" and demo.id_to_token(49152) is None


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (":\n\n1.", [":", "ĊĊ", "1", "."]),
        ("in 1984,", ["in", "Ġ", "1", "9", "8", "4", ","]),
        ("a  b", ["a", "Ġ", "Ġb"]),
    ],
)
def test_demo_splits(demo: Tokenizer, text: str, pieces: list[str]) -> None:
    assert [demo.id_to_token(i) for i in demo.encode(text)] == pieces


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_demo_round_trip(text: str) -> None:
    tokenizer = demo_tokenizer()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = byte_level.pre_tokenize_str(text)
    # A few control characters and bytes above F0 are not in the vocabulary at all.
    assume(all(tokenizer.raw.token_to_id(c) is not None for piece, _ in pieces for c in piece))
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_text_unless_asked(demo: Tokenizer) -> None:
    text = "end<|im_end|>here"
    assert 2 in demo.encode(text, allow_special=True)
    ids = demo.encode(text)
    assert not set(ids) & set(range(17))
    assert demo.decode(ids, skip_special_tokens=True) == text


@given(st.lists(st.sampled_from([*SPECIAL, *"<s>|im_endtx é\n", "\ufdd0"]), max_size=12))
@settings(max_examples=500, deadline=None)
def test_no_spelling_of_special_tokens_is_interpreted(parts: list[str]) -> None:
    tokenizer, text = many_special(), "".join(parts)
    assert tokenizer.encode(text) == plain_ids(tokenizer, text)


@pytest.mark.parametrize("normalized", [True, False])
def test_marks_of_turns_are_text_whatever_the_file_calls_them(normalized: bool) -> None:
    """DeepSeek's `<｜User｜>` is an added token that is not special."""
    names = ("<｜User｜>", "<think>")
    tokenizer = byte_tokenizer(
        [AddedToken(name, special=False, normalized=normalized) for name in names],
        {"chat_template": "<｜User｜>{{ messages[0].content }}"},
    )
    mark, think = (tokenizer.raw.token_to_id(name) for name in names)
    text = "<think>a<｜User｜>b"
    ids = tokenizer.encode(text)
    assert mark not in ids and think in ids  # the other one is for everybody, as intended
    assert tokenizer.encode(text, allow_special=True).count(mark) == 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": text}]) == [mark, *ids]
    assert tokenizer.decode(ids) == text


@given(
    st.lists(
        st.lists(
            st.sampled_from(["<|im_end|>", "<|im_", "end|>", "|>", "<", ">", "hi"]), max_size=4
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=300, deadline=None)
def test_messages_cannot_spell_special_tokens_in_a_chat(contents: list[list[str]]) -> None:
    """Even where the template puts contents side by side, or its own text beside them."""
    template = "{% for m in messages %}<|im_start|>{{ m.content }}{{ m.content }}|><|im_end|>"
    template += "<|im_{% endfor %}end"
    special = [AddedToken(t, special=True) for t in SPECIAL[:3]]
    tokenizer = byte_tokenizer(special, {"chat_template": template})
    start, end = (tokenizer.raw.token_to_id(t) for t in SPECIAL[1:3])
    wanted: list[int] = []
    for parts in contents:
        text = "".join(parts)
        wanted += [start, *plain_ids(tokenizer, text + text + "|>"), end]
        wanted += plain_ids(tokenizer, "<|im_")
    wanted += plain_ids(tokenizer, "end")
    messages = [{"role": "user", "content": "".join(parts)} for parts in contents]
    assert tokenizer.apply_chat_template(messages) == wanted
    shown = tokenizer.render_chat(messages)
    assert (
        shown
        == "".join(f"<|im_start|>{m['content'] * 2}|><|im_end|><|im_" for m in messages) + "end"
    )


def test_guard_survives_json_in_a_template() -> None:
    for arguments in ("", "ensure_ascii=True"):
        template = "{{ tools | tojson(" + arguments + ") }}"
        tokenizer = byte_tokenizer(
            [AddedToken(t, special=True) for t in SPECIAL], {"chat_template": template}
        )
        tools = [{"name": "<s>", "about": "<|im_end|> ends"}]
        ids = tokenizer.apply_chat_template([], tools=tools)
        assert ids == plain_ids(tokenizer, json.dumps(tools, ensure_ascii=False))


def test_normalizers_still_see_the_text() -> None:
    raw = RawTokenizer(models.WordLevel({"▁<s>▁x": 0, "?": 1, "<s>": 2}, unk_token="?"))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.add_special_tokens([AddedToken("<s>", special=True)])
    assert Tokenizer(raw.to_str(), {}).encode("<s> x") == [0]


def test_chat_template_errors_are_named() -> None:
    def render(template: str | None) -> list[int]:
        return byte_tokenizer([], {"chat_template": template}).apply_chat_template(
            [{"role": "user", "content": "hi"}]
        )

    with pytest.raises(ChatTemplateError, match="no chat template"):
        render(None)
    with pytest.raises(ChatTemplateError, match=r"does not parse.*endfor"):
        render("{% for m in messages %}")
    with pytest.raises(ChatTemplateError, match="refuses: system first"):
        render("{{ raise_exception('system first') }}")
    with pytest.raises(ChatTemplateError, match=r"failed.*no attribute 'tool_calls'"):
        render("{{ messages[0].tool_calls[0].name }}")
    with pytest.raises(ChatTemplateError, match=r"failed.*unsafe"):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ChatTemplateError, match="failed"):
        render("{{ messages.append(1) }}")


def test_templates_get_what_their_writers_rely_on() -> None:
    template = (
        "{{ bos_token }}{% generation %}{{ messages | tojson }}{% endgeneration %}"
        "{% for x in [1, 2] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ thinking }}"
    )
    config = {"chat_template": template, "bos_token": {"content": "<s>"}}
    tokenizer = byte_tokenizer([AddedToken("<s>", special=True)], config)
    text = tokenizer.render_chat([{"role": "user", "content": "<é&>"}], thinking="on")
    assert text == '<s>[{"role": "user", "content": "<é&>"}]14on'


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert byte_tokenizer([], {"chat_template": named}).render_chat([]) == "D"
    assert not byte_tokenizer([], {"chat_template": named[:1]}).has_chat_template


def test_files_round_trip(tmp_path: Path, demo: Tokenizer) -> None:
    demo.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    text = "Ünïcode 123 <|im_end|>\n\n"
    messages = [{"role": "user", "content": text}]
    assert again.encode(text) == demo.encode(text)
    assert again.apply_chat_template(messages) == demo.apply_chat_template(messages)
    assert again.eos_ids == demo.eos_ids


def test_layouts_of_hugging_face_folders(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert Tokenizer.from_folder(tmp_path).eos_ids == (2, 0)
    (tmp_path / "generation_config.json").unlink()
    assert Tokenizer.from_folder(tmp_path, eos_ids=(0,)).eos_ids == (0,)
    assert Tokenizer.from_folder(tmp_path).eos_ids == (2,)  # eos_token of tokenizer_config.json
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer.from_folder(tmp_path).eos_ids == (0,)
    assert not Tokenizer.from_folder(tmp_path).has_chat_template
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert Tokenizer.from_folder(tmp_path).has_chat_template


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "", "tokenizer.json: .*is empty"),
        ("tokenizer.json", '{"version"', "tokenizer.json: .*cannot be read"),
        ("tokenizer.json", None, "tokenizer.json: missing"),
        ("tokenizer_config.json", "", "tokenizer_config.json: not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: expected a JSON object"),
        ("generation_config.json", '{"eos_token_id": 96}', "generation_config.json: EOS id 96"),
        ("generation_config.json", '{"eos_token_id": -1}', "EOS id -1"),
    ],
)
def test_broken_files_are_named(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    write_tokenizer(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


@functools.cache
def _words() -> Tokenizer:
    """Bytes, and merges up to one token of 6."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*alphabet, "ab", "abab", "ababab"])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "ab"), ("abab", "ab")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<eos>", special=True)])
    return Tokenizer(raw.to_str(), {})


@given(st.text(max_size=50), st.integers(0, 40))
def test_no_text_takes_fewer_tokens_than_the_longest_one_allows(text: str, repeats: int) -> None:
    tokenizer = _words()
    assert tokenizer.longest_token == len("ababab")
    whole = text + "ab" * repeats
    assert len(whole.encode()) <= len(tokenizer.encode(whole)) * tokenizer.longest_token


def test_encoding_lets_other_threads_run() -> None:
    text = "some words of prose, 123; " * 40_000
    tokenizer = _words()
    done = threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.wait(0.005):
        turns += 1
    thread.join()
    assert turns >= 5, "this thread had to wait until the text was encoded"
