"""Streams are exact: pieces put together are the whole decode, characters whole, stops exact."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxinfer.detokenizer import DetokenizerFactory, StopMatcher

TEXT = "hello world, straße: 你好 世界 😀👩‍👩‍👧 \ufffd привет ที่ "


def byte_level_bpe() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|a b|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.add_tokens(["<added é>"])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As SentencePiece models converted by transformers: ▁ for a space, <0xNN> for other bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁the", "▁▁"]
    tokens += ["cat", "▁你", "好", "é", "\ufffd", "e", ""]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level_bpe(), byte_fallback()
FACTORIES = {id(t): DetokenizerFactory(t) for t in (BYTE_LEVEL, BYTE_FALLBACK)}


def stream(tokenizer, ids, skip, prompt=()):
    detokenizer = FACTORIES[id(tokenizer)].start(prompt, skip)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


def ids_of(tokenizer, **kwargs):
    return st.lists(st.integers(0, tokenizer.get_vocab_size() + 3), **kwargs)


@given(ids_of(BYTE_LEVEL, max_size=40), st.booleans())
def test_byte_level_pieces_are_the_whole_decode(ids, skip):
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_LEVEL, ids, skip)) == whole


BYTES = st.sampled_from(
    [f"<0x{b:02X}>" for b in b"\x41\x80\xbf\xc3\xa9\xe4\xbd\xa0\xf0\x9f\x98\xff"]
)
FALLBACK_IDS = st.lists(
    st.one_of(BYTES.map(BYTE_FALLBACK.token_to_id), st.integers(0, 2), st.integers(259, 275)),
    max_size=30,
)


@given(FALLBACK_IDS, st.booleans())
@example([BYTE_FALLBACK.token_to_id(t) for t in ("<0xC3>", "<0xA9>", "<0x80>", "e")], True)
def test_byte_fallback_pieces_are_the_whole_decode(ids, skip):
    whole = BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(BYTE_FALLBACK, ids, skip)) == whole


@given(FALLBACK_IDS, FALLBACK_IDS)
def test_output_is_decoded_as_what_follows_the_prompt(prompt, ids):
    the = BYTE_FALLBACK.token_to_id("▁the")
    whole = BYTE_FALLBACK.decode([the, *ids])
    assert "the" + "".join(stream(BYTE_FALLBACK, ids, True, [*prompt, the])) == whole


@given(st.text(max_size=30))
def test_any_text_comes_back_and_no_character_is_split(text):
    ids = BYTE_LEVEL.encode(text).ids
    pieces = stream(BYTE_LEVEL, ids, False)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)
        position = 0
        for token_count, piece in enumerate(pieces[:-1], 1):  # nothing certain is held back
            position += len(piece)
            certain = BYTE_LEVEL.decode(ids[:token_count]).rstrip("\ufffd")
            assert text[:position] == certain


def test_the_first_word_keeps_its_space_after_a_prompt():
    the, cat = BYTE_FALLBACK.token_to_id("▁the"), BYTE_FALLBACK.token_to_id("cat")
    assert "".join(stream(BYTE_FALLBACK, [the], True, [cat])) == " the"
    assert "".join(stream(BYTE_FALLBACK, [the], True, [])) == "the"


def test_an_incomplete_character_is_flushed_at_the_end():
    ids = BYTE_LEVEL.encode("é😀").ids
    byte_ids = [BYTE_LEVEL.token_to_id(c) for c in "ðŁĺ"]  # the first three bytes of 😀
    assert stream(BYTE_LEVEL, byte_ids, True) == ["", "", "", "\ufffd"]
    assert "".join(stream(BYTE_LEVEL, ids, True)) == "é😀"


def naive_stop(text, stops, include):
    """The text up to the stop string completed first; of those, the longest."""
    for end in range(1, len(text) + 1):
        completed = [s for s in stops if text[:end].endswith(s)]
        if completed:
            matched = max(completed, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


STOPS = st.lists(st.text("ab你", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(st.text("ab你", max_size=6), max_size=12), STOPS, st.booleans())
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(pieces, stops, include):
    matcher = StopMatcher(stops, include)
    out, matched = "", None
    for count, piece in enumerate(pieces, 1):
        text, matched = matcher.push(piece)
        out += text
        if matched is not None:
            break
        seen = "".join(pieces[:count])
        held = max(
            n
            for n in range(len(seen) + 1)
            if n == 0 or any(s.startswith(seen[-n:]) and len(s) > n for s in stops)
        )
        assert len(out) == len(seen) - held  # the longest suffix that may become a stop, no more
    if matched is None:
        out += matcher.flush()
    assert (out, matched) == naive_stop("".join(pieces), stops, include)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["ab", "b"], "xab", ("x", "ab")),  # completed by the same character: the longer
        (["abcd", "b"], "abcd", ("a", "b")),  # completed first
        (["aab"], "aaab", ("a", "aab")),  # a false start overlaps the match
        ([], "ab", ("ab", None)),
    ],
)
def test_which_stop_string_wins(stops, text, expected):
    matcher = StopMatcher(stops)
    out, matched = "", None
    for char in text:
        piece, matched = matcher.push(char)
        out += piece
        if matched:
            break
    assert (out + matcher.flush(), matched) == expected
    whole = StopMatcher(stops)
    assert whole.push(text) == expected
