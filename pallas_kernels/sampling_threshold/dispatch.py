"""Which body finds the thresholds on a device."""

from __future__ import annotations

from pallas_kernels.devices import Body, Capability, why_no_kernels


def choose_body(platform: str, kind: str, capability: Capability | None) -> Body:
    """The best body for a device: `kind` is what it calls itself, `capability` its compute
    capability, None where there is no such thing."""
    if platform == "cpu":
        return Body("reference")
    why = why_no_kernels(platform, kind, capability)
    return Body("reference_static" if why else "triton", why)
