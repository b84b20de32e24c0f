"""Token ids to text as they come: incremental decoding, and stop strings found in it.

What holds, for any token ids, valid text or not:
- The pieces put together are what the tokenizer's own decode gives for all ids at once. The output
  is decoded as what follows the prompt, so the first word keeps its space.
- No piece ends within a UTF-8 character; an incomplete one at the very end becomes U+FFFD.
- The cost of a token does not grow with the output.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Protocol

import tokenizers


class Detokenizer(Protocol):
    """Decodes the output of one request."""

    def push(self, token: int) -> str:
        """The text that is certain now; "" while a character or a run of bytes is incomplete."""

    def flush(self) -> str:
        """The rest, once no token follows."""


class DetokenizerFactory:
    """Starts a detokenizer for each request; keeps what all requests share.

    A byte-level tokenizer (GPT-2's, Llama 3's, SmolLM2's, ...) gives every token its bytes, so its
    text is a UTF-8 stream. Any other (SentencePiece's with byte fallback, ...) is decoded in a
    small window.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    def start(
        self,
        prompt: Sequence[int],
        skip_special_tokens: bool,
        kept: frozenset[int] = frozenset(),
    ) -> Detokenizer:
        """A detokenizer for the output that follows `prompt`. `kept`: are never skipped."""
        skipped = self.special - kept if skip_special_tokens else frozenset()
        if self._byte_level:
            return _ByteLevelDetokenizer(self, skipped)
        return _WindowDetokenizer(self._tokenizer, self._context(prompt), skipped)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; none for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            text = self._tokenizer.id_to_token(token) or ""
            known = _spelled(text) if self._byte_level else _pieced(text)
            self._bytes[token] = known
        return known

    def _context(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last ordinary token: with it before them, first tokens keep their space."""
        for token in reversed(prompt):
            text = self._tokenizer.id_to_token(token)
            if text and token not in self.special and not _BYTE_TOKEN.fullmatch(text):
                return [token]
        return []


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies, as character → byte.

    Printable Latin-1 stands for itself; the other bytes, in order, take characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    stand_ins = {chr(0x100 + rank): byte for rank, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | stand_ins


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def _spelled(text: str) -> bytes:
    """Of a byte-level tokenizer's token."""
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:  # an added token, spelled as it is
        return text.encode()


def _pieced(text: str) -> bytes:
    """Of a SentencePiece token: a byte, or a text whose spaces are written as bars."""
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", text):
        return bytes.fromhex(byte[1])
    return text.replace("▁", " ").encode()


class _ByteLevelDetokenizer:
    """Tokens are bytes: a UTF-8 decoder that holds at most the three bytes of an open character."""

    def __init__(self, factory: DetokenizerFactory, skipped: frozenset[int]):
        self._factory = factory
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._utf8.decode(self._factory.token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDetokenizer:
    """Decodes one token at a time with one settled token before it.

    A run of byte tokens is decoded as a whole when it ends, since its last byte decides whether the
    whole run is text.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, context: list[int], skipped: frozenset[int]
    ):
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window = context
        self._settled = self._decode(context)

    def push(self, token: int) -> str:
        text = self._tokenizer.id_to_token(token)
        if not text or token in self._skipped:
            return ""
        self._window.append(token)
        if _BYTE_TOKEN.fullmatch(text):
            return ""
        piece = self.flush()
        self._window = [token]
        self._settled = self._decode(self._window)
        return piece

    def flush(self) -> str:
        return self._decode(self._window)[len(self._settled) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopMatcher:
    """Finds stop strings in text that comes in pieces, holding back what may still become one.

    The stop string completed first ends the text; of two completed by the same character, the
    longer. So the outcome does not depend on how the text is cut into pieces. Each string is
    followed by its own automaton (Knuth, Morris, Pratt 1977): its state is how many of its
    characters the text ends with, and the longest of them is what is held back.
    """

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._include = include
        self._held = ""

    def push(self, piece: str, ends: bool = True) -> tuple[str, str | None]:
        """(text that is certain now, the stop string that ended it or None).

        Without `ends`, stop strings that are complete within this piece end nothing.
        """
        if not self._stops:
            return piece, None
        text = self._held + piece
        for end in range(len(self._held), len(text)):
            matched = self._advance(text[end])
            if matched is not None and ends:
                self._held = ""
                return text[: end + 1 - (0 if self._include else len(matched))], matched
        certain = len(text) - max(self._states)
        self._held = text[certain:]
        return text[:certain], None

    def flush(self) -> str:
        """What was held back, once no text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Follow one character; the longest stop string that it completes."""
        completed = None
        for index, (stop, fallback) in enumerate(zip(self._stops, self._fallbacks)):
            state = self._states[index]
            while state and stop[state] != char:
                state = fallback[state - 1]
            state += stop[state] == char
            self._states[index] = state
            if state == len(stop):
                completed = completed or stop
                self._states[index] = fallback[-1]  # where the text goes on after it
        return completed


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(stop)
    state = 0
    for position in range(1, len(stop)):
        while state and stop[position] != stop[state]:
            state = table[state - 1]
        state += stop[position] == stop[state]
        table[position] = state
    return table
