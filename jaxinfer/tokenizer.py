"""Text ↔ token ids, and the chat templates that go with them.

It is over the `tokenizers` library, or over `sentencepiece` for the models of that one.

**Special tokens in a user's text are text.** A prompt that says `<|im_end|>` must not end a turn.
The library looks for special tokens before anything else it does, so every special token that a
user's text spells is broken first, by a *guard* put into it; and a normalizer step, which runs
after that search and before the rest, takes the guards out again. What is encoded is then exactly
the text, with nothing in it interpreted. The guard is random characters that Unicode reserves for
such internal use, drawn anew in every process: no text can carry it on purpose.

In a chat, the template sees messages as they are, and tells of every character of its text whether
it wrote that itself. Special tokens are those that it wrote wholly; one that has even a character
from a message is text, and guarded.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as RawTokenizer

from jaxinfer.chat_template import ChatTemplate, ChatTemplateError
from jaxinfer.literals import one_of
from jaxinfer.sentencepiece_model import SentencePieceModel
from jaxinfer.tokenizer_fields import NAMED_TOKENS
from jaxinfer.tokenizer_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    SENTENCEPIECE_FILE,
    TOKENIZER_FILE,
    TURN_MARKS,
    add_stated,
    config_decides,
    content,
    put_around,
    read_config,
    read_json,
    read_vocabulary,
    templates_entry,
    write_json,
)

__all__ = ["ChatTemplateError", "Tokenizer"]

_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]


class Tokenizer:
    """Encoding, decoding and chat templates of one model. Immutable and safe to share by threads.

    Attributes:
        raw: the `tokenizers.Tokenizer`, for decoding streams. Encode through this class instead.
        vocab_size: one more than the largest id, added tokens included.
        eos_ids: the ids that end the model's output.
        longest_token: bytes (UTF-8, as the vocabulary writes it) of the longest token: no token
            stands for more bytes of a text.
        config: tokenizer_config.json as a dict (special tokens' names, chat templates).
        generation: generation_config.json as a dict, the EOS ids excepted.
    """

    def __init__(
        self,
        vocabulary: str | SentencePieceModel,
        config: dict[str, Any],
        eos_ids: Sequence[int] = (),
        generation: dict[str, Any] | None = None,
    ):
        """From the text of a tokenizer.json, or a SentencePiece model.

        Raises ValueError when it is not one, when an EOS id is outside of the vocabulary, and
        ChatTemplateError when a chat template does not parse.
        """
        self._pieces = vocabulary if isinstance(vocabulary, SentencePieceModel) else None
        self._definition = self._pieces.definition() if self._pieces else str(vocabulary)
        if not self._definition.strip():
            raise ValueError(f"{TOKENIZER_FILE} is empty")
        try:
            self.raw = RawTokenizer.from_str(self._definition)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{TOKENIZER_FILE} cannot be read: {error}") from error
        if self._pieces is None:
            add_stated(self.raw, config)
            if config_decides(config):
                put_around(self.raw, config, bos=True)
        self.config = config
        self.generation = generation or {}
        self.raw.no_padding()
        self.raw.no_truncation()
        last_added = max(self.raw.get_added_tokens_decoder(), default=-1)
        self.vocab_size = max(self.raw.get_vocab_size(with_added_tokens=True), last_added + 1)
        tokens = self.raw.get_vocab(with_added_tokens=True)
        self.longest_token = max((len(token.encode()) for token in tokens), default=0)
        self.eos_ids = self._known(eos_ids)
        self._install_guard()
        self._templates = self._compile_templates()

    def _known(self, eos_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids, each once. Raises ValueError for one outside of the vocabulary."""
        for i in eos_ids:
            if not isinstance(i, int) or not 0 <= i < self.vocab_size:
                raise ValueError(f"EOS id {i!r} is not in the vocabulary of {self.vocab_size}")
        return tuple(dict.fromkeys(eos_ids))

    def _install_guard(self) -> None:
        """Make the library drop guards, after its search for special tokens and before all else."""
        added = self.raw.get_added_tokens_decoder().values()
        # Some checkpoints do not call the marks of turns special; a text may not spell them either.
        marks = [t for t in added if t.special or t.content in TURN_MARKS]
        special = [t.content for t in marks]
        late = [_search_early(t) for t in marks if t.normalized]
        if late:  # these would be searched for after the guards are gone
            self.raw.add_special_tokens([t for t in late if t.special])
            self.raw.add_tokens([t for t in late if not t.special])
        self._guard = _random_characters()
        # A special token of one character has no inside to put a guard in.
        self._stand_ins = {t: _random_characters() for t in special if len(t) == 1}
        steps: list[Any] = [normalizers.Replace(s, t) for t, s in self._stand_ins.items()]
        steps.append(normalizers.Replace(self._guard, ""))
        if self.raw.normalizer is not None:
            steps.append(self.raw.normalizer)
        self.raw.normalizer = normalizers.Sequence(steps)
        # Zero-width, so that overlapping spellings are all found.
        self._spelled = re.compile(f"(?=({one_of(special)}))") if special else None

    def _compile_templates(self) -> dict[str, ChatTemplate]:
        """Each by its name; "default" is for plain chats, "tool_use" for those with tools."""
        source = self.config.get("chat_template") or []
        named = [{"name": "default", "template": source}] if isinstance(source, str) else source
        if not isinstance(named, list) or not all(map(_is_template, named)):
            raise ValueError(
                "chat_template: expected a template, or a list of them with name and template"
            )
        tokens = {name: content(self.config.get(name)) for name in NAMED_TOKENS}
        tokens = {name: token for name, token in tokens.items() if token is not None}
        return {e["name"]: ChatTemplate(e["template"], tokens, e["name"]) for e in named}

    def with_chat_template(self, source: str) -> Tokenizer:
        """The same tokenizer with another chat template, in place of all it has.

        Raises ChatTemplateError when it does not parse.
        """
        other = copy.copy(self)
        other.config = self.config | {"chat_template": templates_entry({"default": source})}
        other._templates = other._compile_templates()
        return other

    # -- text ---------------------------------------------------------------------------------

    def encode(
        self, text: str, add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[int]:
        """Token ids of a text. `add_special_tokens` adds what the model expects around it (BOS).

        With `allow_special`, special tokens the text spells are interpreted as such.
        """
        guarded = text if allow_special else self._guarded(text)
        return self._ids(guarded, add_special_tokens)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._pieces is not None:
            return self._pieces.encode(text, add_special_tokens, self._unguarded)
        # Of the library's calls only those for batches let other threads run.
        batch = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, i: int) -> str | None:
        """The vocabulary entry of an id, None when there is none."""
        return self.raw.id_to_token(i)

    def _guarded(self, text: str, written: bytes | None = None) -> str:
        """The text with every special token it spells broken by a guard, except for those that are
        `written` by a chat template: all of whose characters have a 1."""
        if self._spelled is None or not text:
            return text
        written = bytes(len(text)) if written is None else written
        cut, parts = 0, []
        for match in self._spelled.finditer(text):
            start, end = match.span(1)
            foreign = written.find(0, start, end)
            if foreign == start:
                first = text[start]
                parts.append(text[cut:start] + self._stand_ins.get(first, first))
                cut = start + 1
            elif foreign > max(cut, start):  # what the template wrote before stays whole
                parts.append(text[cut:foreign])
                cut = foreign
        return self._guard.join([*parts, text[cut:]])

    def _unguarded(self, text: str) -> str:
        """The text without its guards."""
        for character, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, character)
        return text.replace(self._guard, "")

    # -- chat ---------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._templates

    @property
    def chat_templates(self) -> tuple[str, ...]:
        """The names of the chat templates."""
        return tuple(self._templates)

    @property
    def takes_tools(self) -> bool:
        """Whether a chat template tells the model of tools."""
        return any("tools" in template.variables for template in self._templates.values())

    @property
    def chat_template_source(self) -> str:
        """The text of all chat templates."""
        return "\n".join(template.source for template in self._templates.values())

    def template_variables(self, with_tools: bool) -> frozenset[str]:
        """The names that the chat template for such chats reads."""
        template = self._templates.get(self._template_name(with_tools))
        return template.variables if template else frozenset()

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text a conversation becomes. Raises ChatTemplateError as `apply_chat_template`."""
        text, _ = self._render(messages, add_generation_prompt, tools, kwargs)
        return text

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation: the special tokens that the template wrote are tokens, those
        in messages, `tools` and `kwargs` (further variables of the template) are text.

        Raises ChatTemplateError when there is no template, it fails on these messages, or it takes
        more than `template_limits` allow.
        """
        text, written = self._render(messages, add_generation_prompt, tools, kwargs)
        return self._ids(self._guarded(text, written), add_special_tokens=False)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> tuple[str, bytes]:
        name = self._template_name(bool(tools))
        if name not in self._templates:
            others = (
                f" named default (only {', '.join(self._templates)})" if self._templates else ""
            )
            raise ChatTemplateError(
                f"this model has no chat template{others}; send a text prompt instead, or serve it"
                " with --chat-template FILE"
            )
        return self._templates[name].render(
            messages=messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **{"documents": None, **kwargs},
        )

    def _template_name(self, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self._templates else "default"

    # -- files --------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: Path, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """From the files of a folder, in any of the layouts in use (see `tokenizer_files`).

        EOS ids are generation_config.json's; else `eos_ids`; else the tokenizer's own eos_token.
        Raises ValueError naming the file that is missing or broken.
        """
        config = read_config(folder)
        generation = read_json(folder / GENERATION_FILE)
        try:
            stated = eos_token_ids(generation)
        except ValueError as error:
            raise ValueError(f"{folder / GENERATION_FILE}: {error}") from error
        vocabulary = read_vocabulary(folder, config)
        name = TOKENIZER_FILE if isinstance(vocabulary, str) else SENTENCEPIECE_FILE
        try:
            tokenizer = cls(vocabulary, config, generation=generation)
        except ChatTemplateError as error:
            raise ValueError(f"{folder}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{folder / name}: {error}") from error
        try:
            tokenizer.eos_ids = tokenizer._known(stated or eos_ids)
        except ValueError as error:
            name = GENERATION_FILE if stated else "config.json"
            raise ValueError(f"{folder / name}: {error}") from error
        if not tokenizer.eos_ids and (eos := content(config.get("eos_token"))):
            found = tokenizer.raw.token_to_id(eos)
            tokenizer.eos_ids = () if found is None else (found,)
        return tokenizer

    def save(self, folder: Path) -> None:
        """Write the files `from_folder` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        if self._pieces is not None:
            (folder / SENTENCEPIECE_FILE).write_bytes(self._pieces.data)
        else:
            (folder / TOKENIZER_FILE).write_text(self._definition, "utf-8")
        write_json(folder / CONFIG_FILE, self.config)
        write_json(folder / GENERATION_FILE, self.generation | {"eos_token_id": list(self.eos_ids)})


def _random_characters() -> str:
    return "".join(secrets.choice(_NONCHARACTERS) for _ in range(16))


def _search_early(token: AddedToken) -> AddedToken:
    """The same token, looked for in the text as it was given."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=token.special,
    )


def _is_template(entry: Any) -> bool:
    """Whether an entry of a list of chat templates has a name and a text."""
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("name", "template")
    )


def eos_token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id as Hugging Face configs give it: absent, one id or a list.

    Raises ValueError for anything else.
    """
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if any(type(each) is not int for each in ids):
        raise ValueError(f"eos_token_id = {value!r}, expected a token id or a list of them")
    return ids
