"""A request in progress: host state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.request import Request
from jaxinfer.token_rules import SequenceRules

NO_SLOT = -1
NOT_WAITING = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and progress of one request. Mutable, owned by the scheduler.

    Attributes:
        tokens: prompt and the output tokens read so far.
        num_computed_tokens: positions whose keys and values dispatched steps write.
        prefill_target: tokens to prefill in this admission; decoding starts once it is reached.
        decode_until: while its computed tokens are fewer, it has a page for the next one and is not
            complete; 0 while it prefills or waits.
        slot: row of the decode batch, NO_SLOT while waiting.
        pages: the pages it holds, by KV group.
        keys: names of its full pages in the prefix cache; `root` is where their chain begins.
        num_published: how many of its leading pages the prefix cache was told of; `has_unnamed`:
            it has filled others since.
        cached_tokens: prompt tokens that the prefix cache had when it was first admitted.
        num_scored: positions of the prompt after which dispatched steps score the next token.
        host_pages: where its pages are in host memory while it waits, by KV group.
        replay: outputs it had before it was preempted, which it is computing again.
        most_tokens: tokens it may have in the end.
        last_step: number of the last dispatched step that works on it.
        order: how many sequences came before it; level: the priority it waits or runs at.
        to_compute: prompt tokens that the prefix cache lacked when it came.
        entry, entered, preempted: of the waiting queue: the number of its place (NOT_WAITING while
            it has none), when it took it, and whether it ran before.
        preemptions: how often it lost its slot.
        waited: seconds it waited at its level before it ran; `entered` is so much earlier after.
        tokens_then: the tokens it had when it was admitted last.
        rules: what it may take next, where that is not every token.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    prefill_target: int = 0
    decode_until: int = 0
    slot: int = NO_SLOT
    pages: list[list[int]] = field(default_factory=list)
    root: bytes | None = None
    keys: list[bytes] = field(default_factory=list)
    num_published: int = 0
    has_unnamed: bool = False
    cached_tokens: int = 0
    num_scored: int = 0
    host_pages: list[list[int]] = field(default_factory=list)
    replay: list[int] = field(default_factory=list)
    last_step: int = -1
    order: int = 0
    level: int = 0
    entry: int = NOT_WAITING
    entered: float = 0.0
    waited: float = 0.0
    preempted: bool = False
    preemptions: int = 0
    tokens_then: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    reported: bool = False
    finished: bool = False
    rules: SequenceRules | None = None
    most_tokens: int = field(init=False)
    to_compute: int = field(init=False)

    def __post_init__(self) -> None:
        self.most_tokens = len(self.request.prompt) + self.request.max_new_tokens
        self.to_compute = len(self.request.prompt)

    @property
    def tenant(self) -> str:
        return self.request.scheduling.tenant

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def num_in_flight(self) -> int:
        """Tokens sampled by dispatched steps that have not been read yet."""
        return max(0, self.num_computed_tokens + 1 - len(self.tokens))

    @property
    def num_outputs(self) -> int:
        """Output tokens sampled, those in flight included."""
        return len(self.tokens) - len(self.request.prompt) + self.num_in_flight

    @property
    def prefilling(self) -> bool:
        return self.num_computed_tokens < self.prefill_target

    @property
    def decodes(self) -> bool:
        """Whether the next step may compute one more token."""
        return not self.prefilling and len(self.tokens) + self.num_in_flight < self.most_tokens

    @property
    def may_skip(self) -> int:
        """Leading tokens it need not compute if their pages are found; one at least is left.

        What is not computed cannot be scored.
        """
        last = len(self.tokens) - 1
        wanted = self.request.params.prompt_logprobs is not None
        return self.num_scored if wanted and self.num_scored < self.prompt_len - 1 else last

    def score(self, end: int) -> range:
        """Positions before `end` to be scored now, if the prompt is to be: none twice."""
        first = self.num_scored
        if self.request.params.prompt_logprobs is not None:
            self.num_scored = max(first, min(end, self.prompt_len - 1))
        return range(first, self.num_scored)

    @property
    def output(self) -> list[int]:
        """The output tokens read so far."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def rules_are_known(self) -> bool:
        """Whether it is known what its next token may be."""
        return self.rules is None or self.rules.are_known

    def sit_out(self) -> None:
        """The step that was dispatched does not give it a token: the next one computes the same."""
        self.num_computed_tokens -= 1

    def start_again(self) -> None:
        """Back to the prompt: the same outputs will come, and are known already."""
        self.num_computed_tokens = 0
        if len(self.tokens) > self.prompt_len:
            self.replay = [*self.replay, *reversed(self.tokens[self.prompt_len :])]
            del self.tokens[self.prompt_len :]
            if self.rules is not None:
                self.rules.follow([])
