"""Questions whose answers are known: whether a model still gives them.

A file has one JSON object a line:

    {"name": "capital", "prompt": "The capital of France is", "any": ["Paris"]}

`prompt` is continued as it is, `chat` is asked in the model's chat form. The answer, greedy and at
most `max_new_tokens` long (default 32), must contain one of `any`, all of `all`, begin with
`starts`, or be `exact`, whitespace around it aside. Letters may be small or capital.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.json_files import parse_object

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

DEFAULT_CASES = Path(__file__).parent / "cases.jsonl"
DEFAULT_TEXTS = Path(__file__).parent / "texts.jsonl"


@dataclass(frozen=True, slots=True)
class Case:
    """One question; see the module."""

    name: str
    prompt: str = ""
    chat: str = ""
    any: tuple[str, ...] = ()
    all: tuple[str, ...] = ()
    starts: str = ""
    exact: str = ""
    max_new_tokens: int = 32

    def passes(self, answer: str) -> bool:
        said = answer.strip().lower()
        if self.exact:
            return said == self.exact.lower()
        if self.starts:
            return said.startswith(self.starts.lower())
        if self.all:
            return all(word.lower() in said for word in self.all)
        return any(word.lower() in said for word in self.any)


def read_cases(path: Path) -> list[Case]:
    """The cases of a file. Raises ValueError naming the line and what is wrong in it."""
    return [_case(f"{path}:{number}", data) for number, data in _lines(path)]


def read_texts(path: Path) -> dict[str, str]:
    """The texts of a file by name: an object with a `text`, and perhaps a `name`, a line. Raises
    ValueError naming the line."""
    texts: dict[str, str] = {}
    for number, data in _lines(path):
        name, text = data.get("name", f"text {number}"), data.get("text")
        if not isinstance(text, str) or not isinstance(name, str) or not text or name in texts:
            raise ValueError(f"{path}:{number}: expected a text, and a name of its own")
        texts[name] = text
    return texts


def _lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    found = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append((number, parse_object(line)))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no lines")
    return found


_LISTS = ("any", "all")


def _case(where: str, data: dict[str, Any]) -> Case:
    known = {field.name: field.default for field in fields(Case)}
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not one of {', '.join(known)}")
        if name in _LISTS:
            right = isinstance(value, list) and all(isinstance(w, str) and w for w in value)
        elif name == "max_new_tokens":
            right = type(value) is int and value > 0
        else:
            right = isinstance(value, str)
        if not right:
            raise ValueError(f"{where}: {name} = {value!r} is of the wrong kind")
    made: dict[str, Any] = {k: tuple(v) if k in _LISTS else v for k, v in data.items()}
    case = Case(**({"name": ""} | made))
    wanted = [bool(x) for x in (case.any, case.all, case.starts, case.exact)]
    if not case.name or bool(case.prompt) == bool(case.chat) or sum(wanted) != 1:
        raise ValueError(
            f"{where}: a case has a name, a prompt or a chat, and one of any, all, starts, exact"
        )
    return case


def answers(llm: LLM, cases: Sequence[Case]) -> list[str]:
    """Greedy answers of a model, all at once."""
    prompts = [c.prompt or [{"role": "user", "content": c.chat}] for c in cases]
    params = [{"temperature": 0.0, "max_new_tokens": c.max_new_tokens} for c in cases]
    return [completion.text for completion in llm.generate(prompts, params)]
