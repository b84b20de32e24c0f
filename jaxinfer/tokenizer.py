"""Text ↔ token ids, over the `tokenizers` library, and the chat template that goes with them.

**Special tokens in a user's text are text.** A prompt that says `<|im_end|>` must not end a turn.
The library looks for special tokens before anything else it does, so every special token that a
user's text spells is broken first, by a *guard* put behind its first character; and a normalizer
step, which runs after that search and before the rest, takes the guards out again. What is encoded
is then exactly the text, with nothing in it interpreted. In a chat the guards go into the message
contents before the template is rendered, so the template's own special tokens stay whole and are
interpreted. The guard is random characters that Unicode reserves for such internal use, drawn anew
in every process: no text can carry it on purpose.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as RawTokenizer

from jaxinfer.chat_template import ChatTemplate, ChatTemplateError

__all__ = ["ChatTemplateError", "Tokenizer"]

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"
_NONCHARACTERS = [chr(c) for c in range(0xFDD0, 0xFDF0)]
_TEMPLATE_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Encoding, decoding and chat templates of one model. Immutable and safe to share by threads.

    Attributes:
        raw: the `tokenizers.Tokenizer`, for decoding streams. Encode through this class instead.
        vocab_size: one more than the largest id, added tokens included.
        eos_ids: the ids that end the model's output.
        longest_token: bytes (UTF-8, as the vocabulary writes it) of the longest token: no token
            stands for more bytes of a text.
        config: tokenizer_config.json as a dict (special tokens' names, chat template).
    """

    def __init__(self, definition: str, config: dict[str, Any], eos_ids: Sequence[int] = ()):
        """From the text of a tokenizer.json.

        Raises ValueError when it is not one, or when an EOS id is outside of the vocabulary.
        """
        if not definition.strip():
            raise ValueError(f"{TOKENIZER_FILE} is empty")
        try:
            self.raw = RawTokenizer.from_str(definition)
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{TOKENIZER_FILE} cannot be read: {error}") from error
        self._definition = definition
        self.config = config
        self.raw.no_padding()
        self.raw.no_truncation()
        last_added = max(self.raw.get_added_tokens_decoder(), default=-1)
        self.vocab_size = max(self.raw.get_vocab_size(with_added_tokens=True), last_added + 1)
        vocabulary = self.raw.get_vocab(with_added_tokens=True)
        self.longest_token = max((len(token.encode()) for token in vocabulary), default=0)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        for i in self.eos_ids:
            if not isinstance(i, int) or not 0 <= i < self.vocab_size:
                raise ValueError(f"EOS id {i!r} is not in the vocabulary of {self.vocab_size}")
        self._install_guard()
        self._template = self._compile_template()

    def _install_guard(self) -> None:
        """Make the library drop guards, after its search for special tokens and before all else."""
        added = self.raw.get_added_tokens_decoder().values()
        special = sorted((t.content for t in added if t.special), key=len, reverse=True)
        late = [t for t in added if t.special and t.normalized]
        if late:  # these would be searched for after the guards are gone
            self.raw.add_special_tokens([_search_early(t) for t in late])
        self._guard = _random_characters()
        # A special token of one character has no inside to put a guard in.
        self._stand_ins = {t: _random_characters() for t in special if len(t) == 1}
        steps: list[Any] = [normalizers.Replace(s, t) for t, s in self._stand_ins.items()]
        steps.append(normalizers.Replace(self._guard, ""))
        if self.raw.normalizer is not None:
            steps.append(self.raw.normalizer)
        self.raw.normalizer = normalizers.Sequence(steps)
        # Zero-width, so that overlapping spellings are all found.
        alternatives = "|".join(re.escape(t) for t in special)
        self._spelled = re.compile(f"(?=({alternatives}))") if special else None
        self._starts = {t[:n] for t in special for n in range(1, len(t))}
        self._ends = {t[n:] for t in special for n in range(1, len(t))}
        self._longest = max(map(len, special), default=0)

    def _compile_template(self) -> ChatTemplate | None:
        source = self.config.get("chat_template")
        if isinstance(source, list):  # several named ones; "default" is for plain chats
            source = {t["name"]: t["template"] for t in source}.get("default")
        if not source:
            return None
        tokens = {name: _content(self.config.get(name)) for name in _TEMPLATE_TOKENS}
        return ChatTemplate(source, {k: v for k, v in tokens.items() if v is not None})

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
        # Of the library's calls only those for batches let other threads run.
        batch = self.raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that are no UTF-8 become U+FFFD."""
        return self.raw.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, i: int) -> str | None:
        """The vocabulary entry of an id, None when there is none."""
        return self.raw.id_to_token(i)

    def _guarded(self, text: str) -> str:
        """The text with every special token it spells broken by a guard."""
        if self._spelled is None or not text:
            return text
        cut, parts = 0, []
        for match in self._spelled.finditer(text):
            start, first = match.start(), text[match.start()]
            parts.append(text[cut:start] + self._stand_ins.get(first, first))
            cut = start + 1
        return self._guard.join([*parts, text[cut:]])

    # -- chat ---------------------------------------------------------------------------------

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The text a conversation becomes. Raises ChatTemplateError as `apply_chat_template`."""
        text = self._render(messages, add_generation_prompt, tools, kwargs)
        for character, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, character)
        return text.replace(self._guard, "")

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation: the template's special tokens are tokens, the messages'
        are text. `kwargs` are further variables of the template.

        Raises ChatTemplateError when there is no template or it fails on these messages.
        """
        text = self._render(messages, add_generation_prompt, tools, kwargs)
        return self._ids(text, add_special_tokens=False)

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> str:
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; send a text prompt instead")
        text = self._template.render(
            messages=self._guard_all(messages),
            tools=self._guard_all(tools),
            add_generation_prompt=add_generation_prompt,
            **self._guard_all(kwargs),
        )
        for mark in (self._guard, *self._stand_ins.values()):
            text = text.replace(
                json.dumps(mark)[1:-1], mark
            )  # a template may write ASCII-only JSON
        return text

    def _guard_all(self, value: Any) -> Any:
        """Guard every string of a JSON-like value. A string that starts or ends like part of a
        special token is guarded there too, since the template decides what it stands next to."""
        if isinstance(value, str):
            guarded = self._guarded(value)
            reach = range(1, self._longest)
            if any(value[-n:] in self._starts for n in reach):
                guarded += self._guard
            if any(value[:n] in self._ends for n in reach):
                guarded = self._guard + guarded
            return guarded
        if isinstance(value, dict):
            return {k: self._guard_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard_all(v) for v in value]
        return value

    # -- files --------------------------------------------------------------------------------

    @classmethod
    def from_folder(cls, folder: Path, eos_ids: Sequence[int] = ()) -> Tokenizer:
        """From tokenizer.json and the files beside it, in any of the layouts in use.

        EOS ids are generation_config.json's; else `eos_ids`; else the tokenizer's own eos_token.
        Raises ValueError naming the file that is missing or broken.
        """
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise ValueError(f"{path}: missing; save the model's fast tokenizer as {path.name}")
        config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / CONFIG_FILE)
        if (template := folder / TEMPLATE_FILE).is_file():
            config["chat_template"] = template.read_text("utf-8")
        stated = eos_token_ids(_read_json(folder / GENERATION_FILE))
        try:
            definition = path.read_text("utf-8")
            tokenizer = cls(definition, config, stated or eos_ids)
            if not tokenizer.eos_ids and (eos := _content(config.get("eos_token"))):
                found = tokenizer.raw.token_to_id(eos)
                tokenizer.eos_ids = () if found is None else (found,)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        return tokenizer

    def save(self, folder: Path) -> None:
        """Write the files `from_folder` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TOKENIZER_FILE).write_text(self._definition, "utf-8")
        _write_json(folder / CONFIG_FILE, self.config)
        _write_json(folder / GENERATION_FILE, {"eos_token_id": list(self.eos_ids)})


def _random_characters() -> str:
    return "".join(secrets.choice(_NONCHARACTERS) for _ in range(16))


def _search_early(token: AddedToken) -> AddedToken:
    """The same special token, looked for in the text as it was given."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=False,
        special=True,
    )


def _content(token: Any) -> str | None:
    """A token named in a config: a string, or a dict that holds it."""
    return token.get("content") if isinstance(token, dict) else token


def eos_token_ids(config: dict[str, Any]) -> tuple[int, ...]:
    """eos_token_id as Hugging Face configs give it: absent, one id or a list."""
    value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; {} when the file is absent. Raises ValueError naming a broken file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), "utf-8")
