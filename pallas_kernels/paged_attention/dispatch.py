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
DIMENSIONS = 16  # of keys and values: a tensor core takes so many at once
WIDEST = 1024  # dimensions of a value


def choose_body(
    platform: str,
    kind: str,
    capability: Capability | None,
    head_dim: int,
    value_dim: int,
    page_dtype: str,
) -> Body[Implementation]:
    """The best body for pages of `page_dtype` with keys and values of these dimensions.

    `platform`, `kind` and `capability` as for `Device`.
    """
    if platform == "cpu":
        return Body("reference")
    unfit = Device(platform, kind, capability).problem()
    problems = (
        (unfit, unfit),
        (page_dtype not in PAGES, f"tensor cores would round {page_dtype} keys and values"),
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
    return Body("reference_static" if why else "triton", why)
