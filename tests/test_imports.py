"""Who may import whom, read from the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "gpipe"
# The guards that let torchvision be imported beside any build of torch, and fairseq at all; they know nothing of ours.
GUARDS = "_compat"
MAY_IMPORT = {
    GUARDS: set(),
    "environment_secrets": set(),
    "config": {"environment_secrets"},
    "pipeline": set(),
    "models": {GUARDS},
    "data": {"durable_files", GUARDS},
    "durable_files": set(),
    "checkpoint": {"durable_files", "pipeline"},
    "training": {"checkpoint", "durable_files", "pipeline", GUARDS},
    "decoding": {"models", GUARDS},
    "planning": {"pipeline"},
    "results": {"config", "durable_files"},
    "launch": {"pipeline", "environment_secrets"},
    "programs": {
        "checkpoint", "config", "data", "decoding", "durable_files", "environment_secrets", "launch", "models",
        "pipeline", "planning", "results", "training",
    },
    "__init__": {"pipeline", "planning"},
}  # fmt: skip
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """Return the package or single module directly below gpipe that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Yield the full name of every imported module; for `from gpipe import x` also `gpipe.x`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import as an absolute one"
            module = node.module or ""
            yield from (f"gpipe.{alias.name}" for alias in node.names) if module == "gpipe" else (module,)


def all_imports(path: Path) -> set[str]:
    return set(imported(ast.walk(ast.parse(path.read_text()))))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_imports_only_the_parts_below_its_own(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is new: say in MAY_IMPORT what it may import"
    ours = {name.split(".")[1] for name in all_imports(path) if name.startswith("gpipe.")}
    assert ours - {part} - MAY_IMPORT[part] == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_only_build_knows_the_config(path: Path) -> None:
    knows = {name.partition(".")[0] for name in all_imports(path)} & {"hydra", "omegaconf"}
    assert not knows or part_of(path) in {"programs", "config", "launch", GUARDS}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_fairseq_is_imported_through_its_guard_alone(path: Path) -> None:
    packages = {name.partition(".")[0] for name in all_imports(path)}
    assert packages.isdisjoint({"fairseq", "fairseq_cli"})


def test_the_config_can_be_read_without_torch() -> None:
    for path in (path for path in FILES if part_of(path) == "config"):
        packages = {name.partition(".")[0] for name in all_imports(path)}
        assert packages.isdisjoint({"torch", "torchvision", "timm", "numpy"}), path.name


def test_the_engine_loads_torch_and_nothing_else() -> None:
    for path in (SOURCE / "pipeline").rglob("*.py"):
        at_import = {name.partition(".")[0] for name in imported(iter(ast.parse(path.read_text()).body))}
        assert at_import - set(sys.stdlib_module_names) <= {"torch", "gpipe"}, path.name


def test_what_starts_a_run_loads_no_table_of_a_page() -> None:
    """The tables take most of a second to load: scipy, and a module per claim."""
    program = (
        "import runpy, sys; runpy.run_path('train.py', run_name='loaded'); "
        "print('scipy' in sys.modules, 'gpipe.results.reproduction' in sys.modules)"
    )
    root = SOURCE.parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
