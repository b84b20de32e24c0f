"""Which tokens an output may take next: rules as data, and as masks of the vocabulary.

A mask has a bit a token, packed into uint32 words, lowest bit first. It depends on how many tokens
the output has (`min_tokens`), on the last of them (`bad_words`) and on all of them (a structure).
Host only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxinfer.structured import StructuredOutput


class NothingAllowedError(ValueError):
    """No token may follow: the rules contradict each other, or the output."""


class Grammar(Protocol):
    """Follows one sequence's output by the grammar of its structure."""

    def follow(self, output: Sequence[int]) -> None: ...  # the output there is now
    def wait(self, timeout: float) -> bool: ...  # whether it is known what may follow
    def mask(self) -> np.ndarray: ...  # which raises GrammarError
    def forget(self) -> None: ...  # the sequence has ended


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The rules of a request, complete: words are token ids here.

    Attributes:
        end_ids: what ends the output. Not among its first `min_tokens`, and with a structure only
            where the structure may end.
        allowed: all that may come, the end included; None is every token.
        bad_words: sequences of tokens that never come in the output.
        structure: what the output is, in whole.
    """

    end_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    structure: StructuredOutput | None = None

    @property
    def follow_output(self) -> bool:
        """Whether what may come next depends on which tokens came before."""
        return self.structure is not None or any(len(word) > 1 for word in self.bad_words)


class SequenceRules:
    """The masks of one sequence. Those that do not depend on its output are one array each, so
    that whoever uploads them sees that nothing changed."""

    def __init__(self, rules: TokenRules, vocab_size: int, grammar: Grammar | None = None):
        assert (grammar is None) == (rules.structure is None)
        self.rules, self.grammar, self._vocab_size = rules, grammar, vocab_size
        allowed = np.zeros(vocab_size, bool)
        allowed[list(rules.allowed) if rules.allowed is not None else slice(None)] = True
        allowed[[word[0] for word in rules.bad_words if len(word) == 1]] = False
        self._words = [word for word in rules.bad_words if len(word) > 1]
        self._ends = _packed(np.array(rules.end_ids, int), vocab_size)
        self._late = _pack(allowed)
        self._early = self._late & ~self._ends if rules.min_tokens else self._late

    def follow(self, output: Sequence[int]) -> None:
        """This is the output now: begin to compute what may follow."""
        if self.grammar is not None:
            self.grammar.follow(output)

    @property
    def are_known(self) -> bool:
        """Whether it is known what may follow."""
        return self.wait(0)

    def wait(self, seconds: float) -> bool:
        """Whether it is known after so many seconds."""
        return self.grammar is None or self.grammar.wait(seconds)

    def forget(self) -> None:
        """The sequence has ended."""
        if self.grammar is not None:
            self.grammar.forget()

    def mask(self, output: Sequence[int], index: int) -> np.ndarray:
        """uint32[words]: what may be output token `index`, after `output` where they follow it.

        Raises NothingAllowedError, and GrammarError when the grammar cannot go on.
        """
        rules = self.rules
        mask = self._early if index < rules.min_tokens else self._late
        if rules.follow_output:
            assert len(output) == index
            banned = [word[-1] for word in self._words if _ends_with(output, word[:-1])]
            if banned:
                mask = mask & ~_packed(np.array(banned), self._vocab_size)
        if self.grammar is not None:
            mask = mask & self._structured(self.grammar.mask())
        if not mask.any():
            raise NothingAllowedError(self._why(index))
        return mask

    def _structured(self, mask: np.ndarray) -> np.ndarray:
        """The grammar's mask with our ends in place of its own."""
        last, bit = divmod(self._vocab_size, 32)
        may_end = bool(mask[last] >> np.uint32(bit) & np.uint32(1))
        own = mask[: len(self._late)].copy()
        if bit:
            own[-1] &= np.uint32((1 << bit) - 1)
        return own | self._ends if may_end else own

    def _why(self, index: int) -> str:
        rules = self.rules
        asked = {
            "min_tokens": index < rules.min_tokens,
            "allowed_token_ids": rules.allowed is not None,
            "bad_words": bool(rules.bad_words),
            "structured": self.grammar is not None,
        }
        names = ", ".join(name for name, given in asked.items() if given)
        return f"no token may follow the first {index}: {names} leave none"


def mask_of(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """uint32[words] with the bits of these tokens."""
    return _packed(np.array(ids, int), vocab_size)


def _packed(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    bits = np.zeros(vocab_size, bool)
    bits[ids] = True
    return _pack(bits)


def _pack(bits: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(bits) // 32) * 32, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def _ends_with(output: Sequence[int], start: tuple[int, ...]) -> bool:
    return len(output) >= len(start) and tuple(output[len(output) - len(start) :]) == start
