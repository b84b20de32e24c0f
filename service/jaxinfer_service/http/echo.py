"""What comes before a choice's first text: its prompt, where that is to be repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.prompt_logprobs import PromptLogprobs
from jaxinfer.text import Delta
from jaxinfer_service.http.answers import Choice, Echoed


class Preface(Protocol):
    """What is needed of a shape of answers."""

    def head(self, index: int, prompt: Echoed) -> Choice | None: ...
    def parts(self, delta: Delta) -> Iterable[Choice]: ...


@dataclass(slots=True)
class _Prompt:
    """One prompt of a call: its choices, and what they wait for."""

    echoed: Echoed
    choices: range
    scored: bool  # whether its logprobs belong before the first text
    held: list[Delta]
    begun: bool = False

    def take(self, delta: Delta) -> bool:
        """Keep a delta that came before all that belongs in front; whether that is there now."""
        self.held.append(delta)
        if (more := delta.prompt_logprobs) is not None:
            before: PromptLogprobs | None = self.echoed.logprobs
            self.echoed.logprobs = before.then(more) if before is not None else more
        known = len(self.echoed.logprobs or ())
        self.begun = not self.scored or known == len(self.echoed.token_ids) - 1
        return self.begun


class Prefaced:
    """Choices as they are streamed: each prompt's heads first, once they are complete.

    `scored`: the heads have the prompts' logprobs. Samples that are ahead of them wait.
    """

    def __init__(
        self, shape: Preface, echoed: Sequence[Echoed], samples: Sequence[int], scored: bool
    ):
        self._shape = shape
        ends = list(itertools.accumulate(samples, initial=0))
        self._of_choice: list[_Prompt] = []
        for one, first, end in zip(echoed, ends, ends[1:]):
            self._of_choice += [_Prompt(one, range(first, end), scored, [])] * (end - first)

    def take(self, delta: Delta) -> Iterator[Choice]:
        """What a delta brings to be sent, in order."""
        prompt, ready = self._of_choice[delta.index], [delta]
        if not prompt.begun:
            if not prompt.take(delta):
                return
            ready, prompt.held = prompt.held, []
            for index in prompt.choices:
                if head := self._shape.head(index, prompt.echoed):
                    yield head
        for each in ready:
            yield from self._shape.parts(each)
