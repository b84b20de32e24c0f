"""The attention kernels compile for every kind of GPU as well as was recorded."""

from __future__ import annotations

import dataclasses

import pytest
from test_gpu_check import require_compiler
from tiny_engine import TINY

from jaxinfer import startup
from jaxinfer.gpu_check import kernel_report
from jaxinfer.gpu_check.cli import RECORDED
from jaxinfer.gpu_check.kernels import Kernel, cases
from jaxinfer.gpu_check.target import TARGETS
from jaxinfer.kv_pool import kv_groups
from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention import choose_body, dispatch


@pytest.fixture(scope="module")
def report():
    require_compiler()
    return kernel_report.compile_everywhere()


def test_no_kernel_spills_and_all_use_the_tensor_cores(report):
    assert not kernel_report.problems(report, RECORDED.read_text())
    for target, kernels in report.items():
        known = [case for case in cases() if case.runs_on(TARGETS[target].compute_capability)]
        assert len(kernels) == len(known)


def test_what_is_worse_than_recorded_is_named(report):
    text = kernel_report.table(report)
    first, *rest = report["h200"]

    def wrong(**changes) -> list[str]:
        return kernel_report.problems(
            {"h200": [dataclasses.replace(first, **changes), *rest]}, text
        )

    assert not wrong()
    (more,) = wrong(registers=first.registers + kernel_report.SLACK + 1)
    assert (
        f"{first.kernel}, {first.case}, on h200" in more and f"{first.registers} recorded" in more
    )
    assert "4 bytes spilled" in wrong(spilled=4)[0]
    assert "0 products" in wrong(tensor_core_products=0)[0]
    assert "no such tile" in wrong(error="no such tile")[0]
    assert "no cp.async.bulk" in wrong(missing="cp.async.bulk")[0]


def test_the_recorded_table_has_every_kernel():
    recorded = kernel_report._recorded(RECORDED.read_text())
    for case in cases():
        assert recorded[case.kernel, case.case, "h200"] > 0
    assert Kernel("decode", "x", 96, 0, 32).passed and not Kernel("decode", "x", 96, 0, 0).passed
    assert Kernel("top-k", "x", 96, 0, 0, tensor_cores=False).passed


@pytest.mark.parametrize(
    ("asked", "body", "why"),
    [
        (("cpu", "cpu", None, 64, 64, "float32"), "reference", ""),
        (("gpu", "NVIDIA H200", (9, 0), 128, 128, "bfloat16"), "triton", ""),
        (("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 576, 512, "float16"), "triton", ""),
        (("gpu", "NVIDIA L4", (8, 9), 128, 128, "float8_e4m3fn"), "triton", ""),
        (("gpu", "NVIDIA A100", (8, 0), 128, 128, "float8_e4m3fn"), "reference_static", "newer"),
        (("gpu", "NVIDIA H100", (9, 0), 128, 128, "float32"), "reference_static", "round float32"),
        (("gpu", "NVIDIA H100", (9, 0), 64, 64, "float16", "float32"), "triton", ""),
        (("gpu", "NVIDIA H100", (9, 0), 64, 64, "int8", "float16"), "triton", ""),
        (
            ("gpu", "NVIDIA H100", (9, 0), 64, 64, "int8", "float32"),
            "reference_static",
            "round float32 queries of int8",
        ),
        (("gpu", "NVIDIA H100", (9, 0), 72, 72, "bfloat16"), "reference_static", "multiples of 16"),
        (("gpu", "Tesla T4", (7, 5), 64, 64, "float16"), "reference_static", "older"),
        (("gpu", "NVIDIA L40S", (8, 9), 64, 64, "bfloat16"), "reference_static", "'NVIDIA L40S'"),
        (("gpu", "AMD Instinct MI300X", None, 64, 64, "bfloat16"), "reference_static", "NVIDIA"),
    ],
)
def test_the_body_follows_from_device_and_features(asked, body, why):
    chosen = choose_body(*asked)
    assert chosen.implementation == body and why in chosen.why and bool(chosen.why) == bool(why)


@pytest.mark.parametrize(
    ("kind", "capability", "dtype", "attends", "filters"),
    [
        ("NVIDIA H200", (9, 0), "bfloat16", "", ""),
        ("NVIDIA H200", (9, 0), "float32", "round float32 queries", ""),
        ("Tesla T4", (7, 5), "bfloat16", "older", "older"),
    ],
)
def test_the_start_says_why_where_no_kernel_computes(
    kind, capability, dtype, attends, filters, caplog
):
    device = Device("gpu", kind, capability)
    groups = kv_groups(dataclasses.replace(TINY, head_dim=64), 4, 16, "int8")
    for choose, why in (
        (lambda: startup._attention(device, groups, dtype), attends),
        (lambda: startup._sampling(device), filters),
    ):
        caplog.clear()
        assert choose() == ("reference_static" if why else "triton")
        assert [why in r.message and r.levelname == "WARNING" for r in caplog.records] == (
            [True] if why else []
        )


def test_hopper_has_kernels_of_its_own_for_what_they_take(monkeypatch):
    monkeypatch.setattr(dispatch, "ON_HOPPER", "mosaic")
    wanted = {(9, 0): "mosaic", (8, 9): "triton", (10, 0): "triton"}
    for capability, body in wanted.items():
        asked = ("gpu", "NVIDIA H200", capability, 128, 128, "bfloat16")
        assert choose_body(*asked).implementation == body
    assert dispatch.hopper_takes(80, 80, 16, "float16")
    assert not dispatch.hopper_takes(80, 80, 16, "float16", prefill=True)
    assert dispatch.hopper_takes(128, 128, 16, "float16", prefill=True)
    for other in ((576, 512, 64, "bfloat16"), (128, 128, 64, "int8"), (72, 72, 64, "bfloat16")):
        assert not dispatch.hopper_takes(*other)
    assert not dispatch.hopper_takes(128, 128, 48, "bfloat16")
