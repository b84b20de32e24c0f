"""A request in progress: host state of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxinfer.request import Request

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and progress of one request. Mutable, owned by the scheduler.

    Attributes:
        tokens: prompt and the output tokens read so far.
        num_computed_tokens: positions whose keys and values dispatched steps write.
        num_in_flight: tokens sampled by dispatched steps that have not been read yet.
        prefill_target: tokens to prefill in this admission; decoding starts once it is reached.
        slot: row of the decode batch, NO_SLOT while waiting.
        pages: the pages it holds, by KV group.
        num_mapped: by group, how many leading pages the device's page table names already.
        last_step: number of the last dispatched step that works on it.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    prefill_target: int = 0
    slot: int = NO_SLOT
    pages: list[list[int]] = field(default_factory=list)
    num_mapped: list[int] = field(default_factory=list)
    last_step: int = -1
    first_scheduled: float | None = None
    reported: bool = False
    finished: bool = False

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

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
        return not self.prefilling and self.num_outputs < self.request.max_new_tokens
