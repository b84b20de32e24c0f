"""What operators rely on: how a server ends, and the files they begin with."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import promql
import pytest
import yaml
from fake_engine import ScriptedEngine, echo
from jaxinfer_service.metrics.collector import Metrics
from jaxinfer_service.server import EngineFailedError, Server, ServerConfig
from prometheus_client.parser import text_string_to_metric_families
from serving import in_loop, opened, until
from setuptools import find_packages

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "docs" / "deploy"

SERVER = """
import sys
from fake_engine import ScriptedEngine
from serving import opened
import jaxinfer_service.cli
engine = ScriptedEngine()
engine.fail_with = MemoryError("the device is gone")
module = sys.modules["jaxinfer_service.cli.serve"]
module.open_model = lambda source: opened(engine)
from jaxinfer_service.command import main
main()
"""


# -- how a server ends -----------------------------------------------------------------------------


@in_loop
async def test_a_server_whose_engine_failed_says_so_and_ends():
    engine = ScriptedEngine()
    engine.fail_with = MemoryError("the device is gone")
    server = Server(ServerConfig(port=0, failed_grace=0.1), lambda: opened(engine))
    with pytest.raises(EngineFailedError, match="the device is gone"):
        await server.run(on_signals=False)


@in_loop
async def test_a_failed_server_still_answers_for_a_while():
    engine = ScriptedEngine()
    engine.fail_with = MemoryError("the device is gone")
    server = Server(ServerConfig(port=0, http_port=0), lambda: opened(engine))
    task = asyncio.create_task(server.run(on_signals=False))
    await until(lambda: server._http.served is not None and server._http.served.frontend.failure)
    assert not task.done()
    server.shut_down()
    with pytest.raises(EngineFailedError):
        await task


def test_the_process_of_a_failed_engine_ends_with_3_and_its_reason():
    done = subprocess.run(
        [sys.executable, "-c", SERVER, "serve", "m", "--port", "0", "--no-http"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == (
        "jaxinfer: the server has stopped because the engine failed: "
        "MemoryError: the device is gone"
    )


# -- the files -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported():
    """Labels of all samples, by name, that a server of a model with experts exports."""
    import numpy as np
    from jaxinfer_service.metrics.histograms import Histograms
    from jaxinfer_service.model import ServedModel

    from jaxinfer.engine_thread import EngineThread
    from jaxinfer.expert_load import ExpertLoad
    from jaxinfer.frontend import Frontend

    engine = ScriptedEngine(echo)
    engine.experts = ExpertLoad((0,), 1, np.array([[1, 2]]))
    engine.times.collected("1+0", 0.0, 0.0)

    async def text() -> str:
        model = opened(engine)
        histograms = Histograms(64)
        frontend = Frontend(model.text, lambda events, stop: EngineThread(engine, events, stop))
        metrics = Metrics("jaxinfer")
        metrics.served = ServedModel(model, frontend, histograms)
        return metrics.text().decode()

    families = text_string_to_metric_families(asyncio.run(text()))
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: frozenset(sample.labels) for sample in samples}


def test_the_dashboard_asks_only_what_is_exported(exported):
    board = json.loads((DEPLOY / "grafana.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "5m")
            named = {*re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))}
            assert named <= promql.labels(expression, exported), panel["title"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len({*places}) == len(places)


def test_alerts_ask_only_what_is_exported(exported):
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    rules = {rule["alert"]: rule for rule in group["rules"]}
    for rule in rules.values():
        given = promql.labels(rule["expr"], exported)
        assert {*rule["annotations"]} == {"summary", "description"}
        assert {*re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))} <= given
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    about = " ".join(rule["expr"] for rule in rules.values())
    for need in ("kv_cache_usage", "num_requests_waiting", "iteration_tokens", "device_busy",
                 "prefix_cache_hits", "time_to_first_token"):  # fmt: skip
        assert need in about


def test_who_is_held_for_a_slow_reader_is_no_reason_to_call_anybody(exported):
    """It waits and no step is computed, as it should be."""
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    about_work = {"JaxinferNoStepProgress", "JaxinferDeviceIdleWithWork"}
    rules = [rule["expr"] for rule in group["rules"] if rule["alert"] in about_work]
    for expression in rules:
        assert 'waiting_by_reason{reason=~"capacity|preempted"}' in expression
        assert "num_requests_waiting >" not in expression
    assert len(rules) == 2


@pytest.mark.parametrize(
    "expression",
    [
        "jaxinfer:nothing",
        "jaxinfer:slots{state='free'}",
        "sum by (state) (jaxinfer:slots)",
        "jaxinfer:slots / sum by (instance) (jaxinfer:slots)",
        "jaxinfer:slots and jaxinfer:pages",
        "histogram_quantile(0.5, sum by (instance) (jaxinfer:request_params_n_bucket))",
    ],
)
def test_what_would_find_nothing_is_seen(expression, exported):
    with pytest.raises(AssertionError):
        promql.labels(expression, exported)


def test_the_manifests_are_valid_kubernetes():
    documents = [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())]
    for document in documents:
        kubernetes_validate.validate(document, "1.32", strict=True)
    deployment = next(d for d in documents if d["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    drain = next(a for a in container["args"] if a.startswith("--drain-timeout="))
    needed = int(drain.partition("=")[2]) + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > needed
    service = next(d for d in documents if d["kind"] == "Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_container_is_given_what_a_wheel_is_made_of_and_nothing_else():
    text = (DEPLOY / "Containerfile").read_text()
    copied = {name for line in re.findall("(?m)^COPY (.+) /src", text) for name in line.split()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    find = project["tool"]["setuptools"]["packages"]["find"]
    packages = [
        Path(where, *name.split("."))
        for where in find["where"]
        for name in find_packages(str(ROOT / where), include=find["include"])
    ]
    assert {path.parts[0] for path in packages} | {"pyproject.toml", "README.md"} == copied
    assert all((ROOT / name).exists() for name in copied)


def test_files_use_only_options_that_serve_has():
    text = (DEPLOY / "kubernetes.yaml").read_text() + (DEPLOY / "Containerfile").read_text()
    text = re.sub(r"(?m)#.*$|^RUN .*$", "", text)
    from jaxinfer_service.cli import app
    from typer.main import get_command

    serve = get_command(app).commands["serve"]
    known = {option for parameter in serve.params for option in parameter.opts}
    assert (used := {*re.findall(r"--[a-z][a-z-]+", text)}) and used <= known
