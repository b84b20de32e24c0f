"""The owner of the device where it cannot work."""

from __future__ import annotations

import os
import types

import pytest

from jaxinfer.programs import Programs
from jaxinfer.runner import Runner
from jaxinfer.step_plan import StepPlan


def test_a_forked_process_is_refused_and_does_not_wait(monkeypatch):
    slots = types.SimpleNamespace(page_tables=())
    runner = Runner(Programs(), 1, (None, None, slots, None, None))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match=f"made in process {runner._process}.*'spawn'"):
        runner.dispatch(StepPlan(0))
