"""The engine with the kernels in its step, interpreted: it says what it says with the reference,
on one device and on two."""

from __future__ import annotations

import pytest
from test_engine import mixed_requests
from tiny_engine import Setup, check, drive, engine_for


@pytest.mark.parametrize("devices", [1, 2])
def test_the_engine_says_the_same_with_kernels(devices):
    kernels = {"attention": "triton_interpreted", "sampling": "triton_interpreted"}
    setup = Setup(slots=2, chunk=64, pages=21, devices=devices, **kernels)
    requests = mixed_requests(seed=11, count=4, longest=40)
    outputs = drive(engine_for(setup), requests, arrivals=2)
    for r in requests:
        check(r, outputs[r.id])
