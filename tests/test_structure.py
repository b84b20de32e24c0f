"""The shape of the house: one way of imports, few homes of jit, short files and functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "pallas_kernels": ROOT / "pallas_kernels",
    "jaxinfer": ROOT / "jaxinfer",
    "jaxinfer_service": ROOT / "service" / "jaxinfer_service",
}
GENERATED = PACKAGES["jaxinfer_service"] / "pb"
MAY_IMPORT = {
    "pallas_kernels": {"pallas_kernels"},
    "jaxinfer": {"jaxinfer", "pallas_kernels"},
    "jaxinfer_service": {"jaxinfer_service", "jaxinfer", "pallas_kernels"},
}
HOST_ONLY = (  # the host's decisions: no array library but NumPy
    "config",
    "deadlines",
    "decoding",
    "expert_load",
    "load",
    "pace",
    "page_allocator",
    "policy",
    "prefix_cache",
    "prompt_logprobs",
    "request",
    "sampler_outcomes",
    "scheduler",
    "scheduler_check",
    "sequence",
    "sequence_pages",
    "step_plan",
    "structured",
    "token_rules",
    "truncation",
    "unread",
    "validation",
    "waiting_queue",
)
HOMES_OF_JIT = {
    "jaxinfer/step.py",
    "jaxinfer/sampler.py",
    "jaxinfer/logprobs.py",
    "jaxinfer/page_transfer.py",
    "jaxinfer/gpu_check/on_device/timing.py",  # times kernels on a device; nothing that serves
}
LONGEST_FILE, LONGEST_FUNCTION = 400, 60  # lines; of a function, those of its body


def sources(package: str) -> list[Path]:
    files = sorted(PACKAGES[package].rglob("*.py"))
    return [file for file in files if GENERATED not in file.parents]


EVERY_FILE = [file for package in PACKAGES for file in sources(package)]
by_file = pytest.mark.parametrize("file", EVERY_FILE, ids=lambda f: str(f.relative_to(ROOT)))


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def imported(node: ast.AST) -> list[str]:
    """Modules that a statement imports, absolute ones."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        return [node.module or ""]
    return []


def imports(file: Path) -> set[str]:
    return {name for node in ast.walk(tree(file)) for name in imported(node)}


def package_of(file: Path) -> str:
    return next(name for name, folder in PACKAGES.items() if folder in file.parents)


def test_the_packages_are_where_they_should_be():
    assert all(len(sources(package)) >= 2 for package in PACKAGES)


@by_file
def test_imports_point_one_way(file):
    """jaxinfer_service → jaxinfer → pallas_kernels → jax."""
    package = package_of(file)
    ours = {name.split(".")[0] for name in imports(file)} & set(PACKAGES)
    assert ours <= MAY_IMPORT[package]
    if package != "jaxinfer_service":
        assert not {name for name in imports(file) if name.split(".")[0] == "grpc"}


def test_kernels_import_jax_and_nothing_else_of_third_parties():
    allowed = {"__future__", "typing", "functools", "math", "dataclasses", "collections", "enum"}
    allowed |= {"json", "pathlib", "jax", "jaxtyping", "numpy", "pallas_kernels"}
    for file in sources("pallas_kernels"):
        assert {name.split(".")[0] for name in imports(file)} <= allowed, file


@pytest.mark.parametrize("module", HOST_ONLY)
def test_the_hosts_side_never_imports_jax(module):
    """Nor does anything that it imports at its start."""
    seen, todo = set(), [f"jaxinfer.{module}"]
    while todo:
        name = todo.pop()
        file = ROOT / Path(*name.split(".")).with_suffix(".py")
        seen.add(name)
        at_start = {n for node in tree(file).body for n in imported(node)}
        assert not {n for n in at_start if n.split(".")[0] in ("jax", "jaxlib")}, name
        todo += [n for n in at_start if n.startswith("jaxinfer.") and n not in seen]


@pytest.mark.parametrize("module", ["engine", "engine_thread", "frontend"])
def test_the_loop_and_the_front_do_not_touch_jax_themselves(module):
    assert not {n for n in imports(ROOT / "jaxinfer" / f"{module}.py") if n.split(".")[0] == "jax"}


def is_jit(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("jit", "pjit")
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
    )


@by_file
def test_jit_is_at_module_level_in_its_few_homes(file):
    """Never built inside a call: programs would compile again and again."""
    name = str(file.relative_to(ROOT))
    assert "from jax import jit" not in file.read_text()
    module = tree(file)
    uses = [node for node in ast.walk(module) if is_jit(node)]
    if uses:
        assert name in HOMES_OF_JIT or name.startswith("pallas_kernels/"), name
    inside = [
        node
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for part in (function.body if isinstance(function.body, list) else [function.body])
        for node in ast.walk(part)
        if is_jit(node)
    ]
    assert not inside, f"{name}: jit inside a function, line {inside[0].lineno}"


def test_the_step_does_have_its_programs():
    """The search for jit finds what is there."""
    assert {name for name in HOMES_OF_JIT if any(map(is_jit, ast.walk(tree(ROOT / name))))} == (
        HOMES_OF_JIT
    )


@by_file
def test_files_and_functions_are_short(file):
    lines = file.read_text().splitlines()
    assert len(lines) <= LONGEST_FILE
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = node.end_lineno - body[0].lineno + 1 if body else 0
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"


@pytest.mark.parametrize("folder", ["tests", "scripts"])
def test_tests_and_scripts_are_short_too(folder):
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in ("", ".py")]
    assert len([file for file in files if file.is_file()]) > 5
    for file in files:
        if file.is_file():
            assert len(file.read_text().splitlines()) <= LONGEST_FILE, file


@by_file
def test_no_unquoted_axis_names_in_array_annotations(file):
    """`Int[Array, N]` names an unknown type, for which the tests' checker accepts anything."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            first, *rest = node.slice.elts
            several = isinstance(node.value, ast.Name) and node.value.id == "tuple"
            if isinstance(first, ast.Name) and first.id == "Array" and not several:
                assert all(isinstance(axes, ast.Constant) for axes in rest), node.lineno
