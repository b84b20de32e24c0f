"""YAML that people write: a name that is there twice is an error, as the format has it."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key.value} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_yaml(text: str) -> Any:
    """What a text says. Raises ValueError, in one line, saying where it is wrong."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        what = ", ".join(filter(None, (error.problem, error.context)))
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{what}") from error
    except yaml.YAMLError as error:  # characters that it does not take
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
