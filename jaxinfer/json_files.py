"""JSON that somebody else wrote: an object, or one line that says what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError naming the file and what is wrong with it."""
    try:
        return parse_object(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object a text stands for. Raises ValueError saying what it is instead."""
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ValueError("not valid JSON: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, found {type(data).__name__}")
    if "\\ud" in text.lower():  # an escape that may be half of a character: no text could hold it
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid JSON: half of a character: {error}") from error
    return data
