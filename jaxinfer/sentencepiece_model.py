"""SentencePiece models (`tokenizer.model`), encoded by the `sentencepiece` library itself.

What a model's trainer chose (unigram or BPE, normalization, a space before the text, byte fallback,
pieces that users defined) is in the file, and the library alone follows all of it exactly. Added
tokens, which the file knows nothing of, are found here first; the library gets the text between.

`ModelProto` states those fields of sentencepiece's own format (Kudo and Richardson 2018,
arXiv:1808.06226; sentencepiece_model.proto) that we read or set; others are kept as they are.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

from jaxinfer.literals import one_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces
UNIGRAM, BPE, WORD, CHAR = range(1, 5)  # model types
SPACE = "▁"
_BLANK = re.compile(r"\s*")
_FIELDS = {  # message -> (name, number, type, default)
    "Piece": (("piece", 1, "string", None), ("score", 2, "float", None), ("type", 3, "int32", "1")),
    "TrainerSpec": (
        ("model_type", 3, "int32", "1"),
        ("byte_fallback", 35, "bool", "false"),
        ("unk_id", 40, "int32", "0"),
        ("bos_id", 41, "int32", "1"),
        ("eos_id", 42, "int32", "2"),
        ("unk_piece", 45, "string", "<unk>"),
        ("bos_piece", 46, "string", "<s>"),
        ("eos_piece", 47, "string", "</s>"),
    ),
    "NormalizerSpec": (
        ("name", 1, "string", None),
        ("precompiled_charsmap", 2, "bytes", None),
        ("add_dummy_prefix", 3, "bool", "true"),
        ("remove_extra_whitespaces", 4, "bool", "true"),
        ("escape_whitespaces", 5, "bool", "true"),
    ),
    "ModelProto": (
        ("pieces", 1, "Piece", None),
        ("trainer_spec", 2, "TrainerSpec", None),
        ("normalizer_spec", 3, "NormalizerSpec", None),
    ),
}


@dataclass(frozen=True, slots=True)
class Added:
    """A token that is found in a text before anything else: one that a checkpoint added to its
    vocabulary. One that is not `special` is found in any text; `lstrip` and `rstrip` take in the
    white space before and after. A `single_word` is found between other words only, one that is
    `normalized` in what the normalizer makes of a text; both are of tokenizer.json alone."""

    id: int
    content: str
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@functools.cache
def _proto_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="jaxinfer/sentencepiece_model.proto", package="jaxinfer.sentencepiece", syntax="proto2"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _FIELDS.items():
        described = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            added = described.field.add(name=field, number=number, label=kinds.LABEL_OPTIONAL)
            if field == "pieces":
                added.label = kinds.LABEL_REPEATED
            if kind in _FIELDS:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{file.package}.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
            if default is not None:
                added.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.ModelProto"))


def new_model() -> Any:
    """An empty ModelProto."""
    return _proto_class()()


def parse_model(data: bytes) -> Any:
    """The ModelProto of a file. Raises ValueError when it is none, or one of another kind."""
    if re.match(rb"[A-Za-z0-9+/]+={0,2} \d+\s", data):
        raise ValueError(
            "is a tiktoken file, not a SentencePiece model; save the model's fast tokenizer as"
            " tokenizer.json"
        )
    model = new_model()
    try:
        model.ParseFromString(data)
    except message.DecodeError as error:
        raise ValueError(f"is no SentencePiece model: {error}") from error
    if not model.pieces:
        raise ValueError("is no SentencePiece model: it has no pieces")
    return model


class SentencePieceModel:
    """A model with the tokens that were added to it. Immutable and safe to share by threads.

    Attributes:
        added: the added tokens, the model's own control pieces among them.
        data: the model as the bytes of a file.
        bos_id / eos_id: what `add_bos` and `add_eos` put around a text.
    """

    def __init__(
        self,
        model: Any,
        added: Sequence[Added] = (),
        *,
        bos_id: int | None = None,
        eos_id: int | None = None,
        prefix_after_tokens: bool = False,
    ):
        """`prefix_after_tokens`: where the model puts a space before a text, put one after every
        added token too, and not only at the text's begin. Otherwise a text's own white space there
        stays, as one space where the model makes one of several.

        Raises ValueError for a model the library refuses, or one whose added tokens contradict it.
        """
        self._check(model, added)
        self.data: bytes = model.SerializeToString()
        given = {token.content for token in added}
        own = [
            Added(i, piece.piece, special=True)
            for i, piece in enumerate(model.pieces)
            if piece.type in (CONTROL, UNKNOWN) and piece.piece not in given
        ]
        self.added = [*own, *added]
        self.bos_id, self.eos_id = bos_id, eos_id
        self._pieces = [(piece.piece, piece.type) for piece in model.pieces]
        self._unknown = model.trainer_spec.unk_piece
        for token in added:  # the library is not to find these by itself
            if token.id < len(self._pieces) and model.pieces[token.id].type == USER_DEFINED:
                model.pieces[token.id].type = CONTROL
        spec = model.normalizer_spec
        self._prefix = spec.add_dummy_prefix
        self._encode = _encoder(model)
        self._encode_later = self._encode_spaced = self._encode
        if not prefix_after_tokens and (self._prefix or spec.remove_extra_whitespaces):
            spec.add_dummy_prefix = False
            self._encode_later = self._encode_spaced = _encoder(model)
            if spec.remove_extra_whitespaces:  # it would drop the first one, which is no extra one
                spec.add_dummy_prefix = True
                self._encode_spaced = _encoder(model)
        self._tokens = {token.content: token for token in self.added}
        self._find = re.compile(one_of(self._tokens)) if self._tokens else None

    @staticmethod
    def _check(model: Any, added: Sequence[Added]) -> None:
        count = len(model.pieces)
        for token in added:
            if token.single_word:
                raise ValueError(
                    f"added_tokens_decoder: {token.content!r}: single_word is not supported"
                )
            if token.id < count and model.pieces[token.id].piece != token.content:
                raise ValueError(
                    f"the added token {token.content!r} has the id {token.id} of the piece"
                    f" {model.pieces[token.id].piece!r}"
                )
        ids = [token.id for token in added]
        if len(set(ids)) < len(ids):
            raise ValueError("two added tokens have the same id")

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        plain: Callable[[str], str] = lambda text: text,
    ) -> list[int]:
        """Token ids. `plain` is applied to the text between added tokens, once they were found."""
        ids = [self.bos_id] if add_special_tokens and self.bos_id is not None else []
        cut = 0
        while match := self._find.search(text, cut) if self._find else None:
            token, between = self._tokens[match.group()], text[cut : match.start()]
            ids += self._section(plain(between.rstrip() if token.lstrip else between), cut == 0)
            ids.append(token.id)
            cut = match.end()
            if token.rstrip:
                cut = _BLANK.match(text, cut).end()  # type: ignore[union-attr]
        ids += self._section(plain(text[cut:]), cut == 0)
        if add_special_tokens and self.eos_id is not None:
            ids.append(self.eos_id)
        return ids

    def _section(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        if first:
            return self._encode(text)
        spaced = text[0].isspace() and not self._encode_later(text[0])  # dropped at a begin
        return (self._encode_spaced if spaced else self._encode_later)(text)

    def definition(self) -> str:
        """A tokenizer.json that decodes as this model does. It is not for encoding."""
        vocab = {piece: i for i, (piece, _) in enumerate(self._pieces)}
        vocab |= {token.content: token.id for token in self.added}
        raw = RawTokenizer(
            models.BPE(vocab=vocab, merges=[], unk_token=self._unknown, byte_fallback=True)
        )
        ends = [decoders.Strip(" ", 1, 0)] if self._prefix else []
        raw.decoder = decoders.Sequence(
            [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
        )
        for special, add in ((True, raw.add_special_tokens), (False, raw.add_tokens)):
            add(
                [
                    AddedToken(token.content, special=special, normalized=False)
                    for token in self.added
                    if token.special == special
                ]
            )
        return raw.to_str()


def _encoder(model: Any) -> Callable[[str], list[int]]:
    from sentencepiece import SentencePieceProcessor  # loads a library of its own

    try:
        return SentencePieceProcessor(model_proto=model.SerializeToString()).encode
    except Exception as error:  # the library raises many kinds
        raise ValueError(f"sentencepiece refuses the model: {error}") from error
