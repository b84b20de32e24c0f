"""Which body computes attention on a device: one table, by device and feature."""

from __future__ import annotations

from pallas_kernels.dispatch import TENSOR_CORES, Body, Capability, Device, Implementation

# Element types of pages that the kernels read, and the oldest GPUs that can convert them.
PAGES: dict[str, Capability] = {
    "bfloat16": (8, 0),
    "float16": (8, 0),
    "int8": (8, 0),
    "float8_e4m3fn": (8, 9),
    "float8_e5m2": (8, 9),
}
SIXTEEN_BITS = ("bfloat16", "float16")
HOPPER: Capability = (9, 0)
# The body for Hopper. Its own kernels have never run on a GPU; "mosaic" here would prefer them.
ON_HOPPER: Implementation = "triton"
# What Hopper's own kernels take, of pages of 16 bits: dimensions of keys and values apart.
HOPPER_HEADS = (64, 80, 96, 128, 192, 256)
# Of a tile that is not whole, rows are copied one by one out of shared memory, where TMA begins at
# multiples of 128 bytes only: those of other heads do not lie so.
HOPPER_PREFILL_HEADS = (64, 128, 256)
HOPPER_PAGE_SIZES = (16, 32, 64, 128)
DIMENSIONS = 16  # of keys and values: a tensor core takes so many at once
WIDEST = 1024  # dimensions of a value


def choose_body(
    platform: str,
    kind: str,
    capability: Capability | None,
    head_dim: int,
    value_dim: int,
    page_dtype: str,
    dtype: str = "bfloat16",
) -> Body[Implementation]:
    """The best body for pages of `page_dtype` with keys and values of these dimensions, and queries
    of `dtype`.

    `platform`, `kind` and `capability` as for `Device`.
    """
    if platform == "cpu":
        return Body("reference")
    unfit = Device(platform, kind, capability).problem()
    problems = (
        (unfit, unfit),
        (page_dtype not in PAGES, f"tensor cores would round {page_dtype} keys and values"),
        # Keys of 16 bits are met in their own dtype, those of 8 bits in that of the queries.
        (
            page_dtype not in SIXTEEN_BITS and dtype not in SIXTEEN_BITS,
            f"tensor cores would round {dtype} queries of {page_dtype} pages",
        ),
        (
            capability and capability < PAGES.get(page_dtype, TENSOR_CORES),
            f"{page_dtype} pages need a newer GPU",
        ),
        (
            head_dim % DIMENSIONS or value_dim % DIMENSIONS,
            f"heads of {head_dim} and {value_dim} are no multiples of {DIMENSIONS}",
        ),
        (value_dim > WIDEST, f"values of {value_dim} dimensions do not fit into registers"),
    )
    why = next((why for wrong, why in problems if wrong), "")
    if why:
        return Body("reference_static", why)
    return Body(ON_HOPPER if capability == HOPPER else "triton")


def hopper_takes(
    head_dim: int, value_dim: int, page_size: int, page_dtype: str, prefill: bool = False
) -> bool:
    """Whether Hopper's own kernels take pages of keys, and as wide values apart from them."""
    return (
        head_dim == value_dim
        and head_dim in (HOPPER_PREFILL_HEADS if prefill else HOPPER_HEADS)
        and page_size in HOPPER_PAGE_SIZES
        and page_dtype in SIXTEEN_BITS
    )
