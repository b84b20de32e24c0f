"""Rules about tokens, against masks made by hand; and that they are refused where they must be."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from fake_engine import EOS, LIMITS, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.detokenizer import StopMatcher
from jaxinfer.request import FinishReason, RequestError, SamplingParams, SequenceEvent
from jaxinfer.sampler import SampleRows, forbid
from jaxinfer.sampler_outcomes import FREE, HELD, RULED
from jaxinfer.slot_state import empty_options, empty_slots, mask_words, pack_masks
from jaxinfer.step import put_masks
from jaxinfer.structured import StructuredOutput
from jaxinfer.text import TextProcessor
from jaxinfer.token_rules import NothingAllowedError, SequenceRules, TokenRules, mask_of

SIZE = 70  # two words and a part of one
TEXT = TextProcessor(byte_tokenizer(), [EOS], LIMITS)


def allowed(mask: np.ndarray, size: int = SIZE) -> set[int]:
    assert mask.dtype == np.uint32 and mask.shape == (mask_words(size),)
    found = {i for i in range(32 * len(mask)) if int(mask[i // 32]) >> (i % 32) & 1}
    assert all(token < size for token in found)
    return found


class Fixed:
    """A grammar that always says the same."""

    def __init__(self, ids, may_end):
        self._mask = mask_of([*ids, *([SIZE] if may_end else [])], SIZE + 1)

    def follow(self, output): ...
    def forget(self): ...
    def wait(self, timeout):
        return True

    def mask(self):
        return self._mask


@settings(max_examples=60)
@given(st.data())
def test_a_mask_is_what_the_rules_say_token_by_token(data):
    ids = st.integers(0, SIZE - 1)
    some = st.lists(ids, max_size=6)
    ends = tuple(data.draw(st.lists(ids, max_size=3, unique=True)))
    rules = TokenRules(
        ends,
        data.draw(st.integers(0, 4)),
        data.draw(st.none() | st.lists(ids, min_size=1).map(tuple)),
        tuple(data.draw(st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4))),
        data.draw(st.none() | st.just(StructuredOutput.json_object())),
    )
    output = data.draw(some)
    if rules.bad_words and data.draw(st.booleans()):  # so that some begin to be spelled
        output += data.draw(st.sampled_from(rules.bad_words))[:-1]
    structured, may_end = data.draw(some), data.draw(st.booleans())
    grammar = Fixed(structured, may_end) if rules.structure else None
    expected = set()
    for token in range(SIZE):
        spelled = any([*output, token][-len(word) :] == [*word] for word in rules.bad_words)
        early = token in ends and len(output) < rules.min_tokens
        in_form = grammar is None or token in structured or (token in ends and may_end)
        listed = rules.allowed is None or token in rules.allowed
        if listed and in_form and not spelled and not early:
            expected.add(token)
    sequence = SequenceRules(rules, SIZE, grammar)
    if expected:
        assert allowed(sequence.mask(output, len(output))) == expected
    else:
        with pytest.raises(NothingAllowedError, match="no token may follow"):
            sequence.mask(output, len(output))


def test_masks_that_do_not_change_are_the_same_array():
    rules = SequenceRules(TokenRules((3,), min_tokens=2, bad_words=((5,),)), SIZE)
    early, late = rules.mask((), 0), rules.mask((), 2)
    assert rules.mask((), 1) is early and rules.mask((), 9) is late
    assert allowed(early) == {*range(SIZE)} - {3, 5} and allowed(late) == {*range(SIZE)} - {5}


def test_forbidden_tokens_lose_and_held_rows_stay_where_they_were():
    logits = np.random.default_rng(0).normal(size=(4, SIZE)).astype(np.float32)
    logits[1, 7], logits[2, 60] = np.nan, np.inf
    slots = empty_slots(5, (1,))._replace(position=jnp.arange(10, 16), done=jnp.zeros(6, bool))
    options = put_masks(
        empty_options(5, SIZE),
        pack_masks([(3, mask_of([1, 69], SIZE)), (1, mask_of([2], SIZE))], 5, mask_words(SIZE)),
    )
    rows = SampleRows(jnp.array([3, 1, 4, 0]), jnp.array([True, True, True, False]))
    rules = jnp.array([RULED, RULED, HELD, HELD])
    out, kept, new = forbid(jnp.asarray(logits), rows, slots, options, rules)
    expected = np.full_like(logits, -np.inf)
    expected[0, [1, 69]] = logits[0, [1, 69]]
    expected[1, [2, 7]] = logits[1, [2, 7]]  # the model's failure stays one
    np.testing.assert_array_equal(np.asarray(out)[:2], expected[:2])
    assert kept.live.tolist() == [True, True, False, False]
    assert new.position.tolist() == [10, 11, 12, 13, 13, 15]  # 14 is back at 13; idle rows stay
    free = forbid(jnp.asarray(logits), rows, new, options, jnp.full(4, FREE))
    np.testing.assert_array_equal(np.asarray(free[0]), logits)


def refused(**params) -> dict[str, str]:
    with pytest.raises(RequestError) as caught:
        TEXT.requests([1, 2, 3], SamplingParams(**{"max_new_tokens": 10, **params}), "r", 0.0)
    return {v.field: v.message for v in caught.value.violations}


S = StructuredOutput


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 1.0}, "min_tokens"),
        ({"min_tokens": 11}, "min_tokens"),
        ({"max_new_tokens": None, "min_tokens": 62}, "min_tokens"),
        ({"allowed_token_ids": ()}, "allowed_token_ids"),
        ({"allowed_token_ids": (1, 257)}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": (1 << 63,)}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": (True,)}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": (1,) * 258}, "allowed_token_ids"),
        ({"allowed_token_ids": (EOS,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (97,), "bad_words": ("a",)}, "allowed_token_ids"),
        ({"bad_words": "ab"}, "bad_words"),
        ({"bad_words": ("a", " ")}, "bad_words[1]"),
        ({"bad_words": ("a" * 257,)}, "bad_words[0]"),
        ({"bad_words": (1,)}, "bad_words[0]"),
        ({"bad_words": ("\ud800",)}, "bad_words[0]"),
        ({"bad_words": ("a",) * 129}, "bad_words"),
        ({"structured": "[0-9]"}, "structured"),
        ({"structured": S("xml", "a")}, "structured"),
        ({"structured": S.regex("")}, "structured.regex"),
        ({"structured": S.regex("a" * (128 << 10) + "b")}, "structured.regex"),
        ({"structured": S.regex("\ud800")}, "structured.regex"),
        ({"structured": S.choice([])}, "structured.choice"),
        ({"structured": S("choice", '["a", 1]')}, "structured.choice"),
        ({"structured": S.grammar('%llguidance {}\nstart: "a"')}, "structured.grammar"),
        ({"structured": S.json_object(), "ignore_eos": True}, "structured"),
    ],
)  # fmt: skip
def test_rules_that_cannot_hold_are_refused_by_name(params, field):
    found = refused(**params)
    assert list(found) == [field] and found[field]


def test_words_are_forbidden_with_and_without_a_space_before_them():
    def spelled(words) -> tuple[tuple[int, ...], ...]:
        (request,) = TEXT.requests([1], SamplingParams(bad_words=words), "r", 0.0)
        return request.rules.bad_words

    assert spelled(("ab", "  c")) == ((97, 98), (99,))  # a space is a token of its own here
    (request,) = TEXT.requests([1], SamplingParams(), "r", 0.0)
    assert request.rules is None  # requests without rules pay nothing


def output_of(tokens: bytes, **params) -> tuple[str, object]:
    """The text and the end of an output that comes token by token."""
    (request,) = TEXT.requests([1], SamplingParams(max_new_tokens=40, **params), "r", 0.0)
    builder, text = TEXT.output(request), ""
    for token in tokens:
        delta = builder.push(SequenceEvent("r", (token,)))
        text += delta.text
        if delta.finish:
            return text, delta.finish.stop
    end = builder.push(SequenceEvent("r", finish=FinishReason.LENGTH))
    return text + end.text, end.finish.stop


def test_a_stop_string_ends_nothing_within_the_first_tokens():
    assert output_of(b"xabyabz", stop=("ab",)) == ("x", "ab")
    assert output_of(b"xabyabz", stop=("ab",), min_tokens=3) == ("xaby", "ab")
    assert output_of(b"xabyabz", stop=("ab",), min_tokens=2) == ("x", "ab")  # complete after them
    assert output_of(b"xabyabz", stop=("ab",), min_tokens=6) == ("xabyabz", None)
    assert output_of(b"ababab", stop=("abab",), min_tokens=4) == ("ab", "abab")  # they overlap


@given(
    st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=3)), st.integers(0, 9)
)
def test_the_first_stop_string_that_is_complete_later_ends_the_text(text, stops, least):
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(least + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    matcher, out, found = StopMatcher(stops), "", None
    for position, char in enumerate(text, 1):
        certain, found = matcher.push(char, ends=position > least)
        out += certain
        if found:
            break
    if not ends:
        assert found is None and out + matcher.flush() == text
    else:
        end, _, stop = min(ends)
        assert (out, found) == (text[: end - len(stop)], stop)
