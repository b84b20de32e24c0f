"""What a kernel of attention is made for."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.cpu_kernels.compiler import Vectors, vectors


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of queries over pages.

    Attributes:
        group: query heads that share keys.
        key_dim / value_dim: of a key and of a value.
        page_size: tokens of a page.
        soft_cap: c makes scores c * tanh(score / c); 0: as they are.
        pages: the dtype of pages.
    """

    group: int
    key_dim: int
    value_dim: int
    page_size: int
    soft_cap: float = 0.0
    pages: str = "float32"

    @property
    def taken(self) -> bool:
        """Whether there is a kernel for them on this CPU."""
        found = vectors()
        sizes = (self.key_dim, self.value_dim, self.page_size)
        return found is not None and not any(size % found.lanes for size in sizes)

    @property
    def name(self) -> str:
        """Of all that a kernel depends on."""
        sizes = (self.group, self.key_dim, self.value_dim, self.page_size, self.lanes)
        cap = f"_{self.soft_cap}" if self.soft_cap else ""
        return "_".join(map(str, (*sizes, self.pages))) + cap

    @property
    def lanes(self) -> int:
        """Floats of a register."""
        return self._vectors.lanes

    @property
    def rows(self) -> int:
        """Of queries, whose products with keys and whose values stay in registers."""
        widest = max(self.wide(self.page_size), self.wide(self.value_dim))
        return self._vectors.sums // widest

    @property
    def floats_of_row(self) -> int:
        """What prefill keeps of a row of queries: itself, its values, its top score and its sum."""
        return self.key_dim + self.value_dim + 2

    @property
    def floats_of_page(self) -> int:
        """What prefill makes of a page: its keys transposed, and scores of `rows`."""
        return self.page_size * (self.key_dim + self.rows)

    def wide(self, columns: int) -> int:
        """Registers of columns that a product makes at once."""
        count = columns // self.lanes
        return next(wide for wide in (4, 3, 2, 1) if count % wide == 0 and wide <= self._widest)

    @property
    def _widest(self) -> int:
        """So that at least 6 rows of sums stay in registers beside them."""
        return max(1, self._vectors.sums // 6)

    @property
    def _vectors(self) -> Vectors:
        found = vectors()
        assert found is not None
        return found
