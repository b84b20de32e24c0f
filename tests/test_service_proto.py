"""The committed stubs are those of proto/, and a wheel carries the .proto files."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PB = ROOT / "service" / "jaxinfer_service" / "pb"
FILES = sorted(path.relative_to(PROTO) for path in PROTO.rglob("*.proto"))


def descriptor(relative: Path) -> descriptor_pb2.FileDescriptorProto:
    """What the committed stub of a .proto file was generated from."""
    parts = ("jaxinfer_service", "pb", *relative.with_suffix("").parts)
    module = importlib.import_module(".".join(parts) + "_pb2")
    message = descriptor_pb2.FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(message)
    return message


def test_the_copies_beside_the_stubs_are_the_files():
    """`scripts/gen_proto` copies what it compiles: an edit without a new run shows here."""
    assert FILES
    assert sorted(path.relative_to(PB) for path in PB.rglob("*.proto")) == FILES
    for relative in FILES:
        assert (PB / relative).read_text() == (PROTO / relative).read_text(), (
            "run scripts/gen_proto"
        )


def test_the_stubs_are_what_a_compiler_makes_of_the_files(tmp_path):
    """Compared as descriptors, which every compiler version writes alike."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    out = tmp_path / "set"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Ijaxinfer_service/pb={PROTO}"]
    command += [f"--descriptor_set_out={out}", *(str(PROTO / relative) for relative in FILES)]
    subprocess.run(command, check=True)
    compiled = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    for relative, message in zip(FILES, compiled.file, strict=True):
        message.ClearField("source_code_info")
        for each in message.message_type:
            _forget_json_names(each)
        committed = descriptor(relative)
        for each in committed.message_type:
            _forget_json_names(each)
        assert message == committed, "run scripts/gen_proto"


def _forget_json_names(message: descriptor_pb2.DescriptorProto) -> None:
    """Compilers fill them into descriptor sets, stubs leave them out."""
    for field in message.field:
        field.ClearField("json_name")
    for nested in message.nested_type:
        _forget_json_names(nested)


def test_the_stubs_need_no_newer_protobuf_than_the_project_does():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (least,) = [d for d in project["dependencies"] if d.startswith("protobuf>=")]
    needed = tuple(int(part) for part in least.removeprefix("protobuf>=").split("."))
    for path in PB.rglob("*_pb2.py"):
        lines = path.read_text().splitlines()
        (line,) = [line for line in lines if line.startswith("# Protobuf Python Version: ")]
        made_by = tuple(int(part) for part in line.rpartition(" ")[2].split("."))
        assert made_by[:2] <= needed, "generate with the oldest supported grpcio-tools"


def test_the_wheel_carries_the_proto_files():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pattern = config["tool"]["setuptools"]["package-data"]["jaxinfer_service"][0]
    assert sorted(p.relative_to(PB) for p in PB.parent.glob(pattern)) == FILES
