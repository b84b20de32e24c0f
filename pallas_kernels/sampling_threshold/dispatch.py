"""Which body finds the thresholds on a device."""

from __future__ import annotations

from pallas_kernels.dispatch import Body, Device, Implementation


def choose_body(device: Device) -> Body[Implementation]:
    """The best body for a device."""
    if device.platform == "cpu":
        return Body("reference")
    why = device.problem()
    return Body("reference_static" if why else "triton", why)
