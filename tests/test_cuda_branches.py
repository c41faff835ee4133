"""Everything that is done only for a GPU is in one table, with the test that stands for it (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "architecture.md"
ON_A_GPU = "make gpu-check"
LEFT_OUT = {"launch/gpu_check.py"}  # the check itself runs on GPUs only
MODULES = {"torch.cuda", "torch.backends.cuda", "torch.backends.cudnn", "torch.version.cuda", "torch.accelerator"}
ATTRIBUTES = {"is_cuda", "is_pinned", "pin_memory"}
KEYWORDS = {"pin_memory", "non_blocking"}
ROW = re.compile(r"^\| `(?P<file>[\w/]+\.py)` `(?P<function>[\w.]+)` \| (?P<what>.+) \| (?P<tests>.+) \|$")


def sources() -> Iterator[Path]:
    for package in ("shards", "pipeline", "launch"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if str(path.relative_to(ROOT)) not in LEFT_OUT:
                yield path


def is_for_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ATTRIBUTES or ast.unparse(node) in MODULES
    if isinstance(node, ast.keyword):
        return node.arg in KEYWORDS
    if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a device or a backend, not a sentence
        return re.fullmatch(r"cuda(:\d+)?|\S*nccl\S*", node.value, re.IGNORECASE) is not None
    return False


def functions_for_cuda(tree: ast.AST, inside: str = "") -> set[str]:
    """Names of the functions (`Class.method`), or of the class or module, whose own code does something for CUDA."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{inside}.{node.name}".lstrip(".") if named else inside  # type: ignore[attr-defined]
        if is_for_cuda(node):
            found.add(name or "module")
        found |= functions_for_cuda(node, name)
    return found


def in_source() -> set[tuple[str, str]]:
    return {
        (str(path.relative_to(ROOT)), function)
        for path in sources()
        for function in functions_for_cuda(ast.parse(path.read_text(encoding="utf-8")))
    }


def in_table() -> dict[tuple[str, str], list[str]]:
    """(file, function) -> the tests named for it."""
    rows = [match for line in TABLE.read_text(encoding="utf-8").splitlines() if (match := ROW.match(line))]
    return {(row["file"], row["function"]): re.findall(r"`([^`]+)`", row["tests"]) for row in rows}


def test_every_branch_for_cuda_is_in_the_table() -> None:
    missing = sorted(in_source() - in_table().keys())
    assert not missing, f"{TABLE.name}, The GPU path, lacks a row for {missing}: what it does, and the test for it."


def test_every_row_of_the_table_has_its_branch() -> None:
    gone = sorted(in_table().keys() - in_source())
    assert not gone, (
        f"{TABLE.name}, The GPU path, has rows for {gone}, which do nothing for CUDA any more. Remove them."
    )


def test_every_test_the_table_names_is_there() -> None:
    assert re.search(r"^gpu-check:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for place, tests in in_table().items():
        assert tests, f"{place} names no test"
        for test in tests:
            if test == ON_A_GPU:
                continue
            file, _, function = test.partition("::")
            defined = {n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)}
            assert function in defined, f"{place}: there is no {test}"


@pytest.mark.parametrize(
    ("code", "function"),
    [
        ("def f(device):\n    return 1 if device.type == 'cuda' else 2", "f"),
        ("class A:\n    def f(self):\n        torch.cuda.empty_cache()", "A.f"),
        ("def f(x):\n    return x.to(d, non_blocking=True)", "f"),
        ("def f(x):\n    def g():\n        return x.pin_memory()\n    return g", "f.g"),
        ("def f(n):\n    return torch.empty(n, pin_memory=True)", "f"),
        ("def f(x):\n    return x.is_cuda", "f"),
        ("backend = 'cpu:gloo,cuda:nccl'", "module"),
        ("torch.backends.cudnn.benchmark = True", "module"),
        ("class A:\n    device: Literal['cpu', 'cuda']", "A"),
    ],
)
def test_what_is_found(code: str, function: str) -> None:
    assert functions_for_cuda(ast.parse(code)) == {function}


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    'cuda'",
        "def f():\n    raise E('NCCL has gone')",
        "x = f.cuda_like",
        "def f(x): return x.to('cpu')",
    ],
)
def test_what_is_not_found(code: str) -> None:
    assert functions_for_cuda(ast.parse(code)) == set()
