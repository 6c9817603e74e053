"""What the programs call, read from their sources: nothing that could run code which a file holds."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAMS = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted(ROOT.glob("*.py")),
    *sorted((ROOT / "experiments").glob("*.py")),
]
# Modules that unpickle, load code, unpack archives or fetch files: none is needed.
FORBIDDEN_MODULES = {
    "cPickle", "cloudpickle", "code", "dill", "ftplib", "joblib", "marshal", "pickle", "requests", "runpy", "shelve",
    "tarfile", "urllib", "yaml", "zipfile", "zipimport",
}  # fmt: skip
HARMLESS_IMPORTS = {("yaml", "YAMLError")}  # the class of errors that OmegaConf lets through
FORBIDDEN_CALLS = {
    "__import__", "all_gather_object", "broadcast_object_list", "call", "compile_command", "eval", "exec", "execfile",
    "fromstring", "gather_object", "get_class", "get_method", "get_object", "instantiate", "popen", "recv_object_list",
    "scatter_object_list", "send_object_list", "system", "unpack_archive", "unsafe_load",
}  # fmt: skip
FORBIDDEN_OF = {"torch": {"load", "hub"}, "joblib": {"load"}, "pickle": {"load", "loads"}, "hub": {"load"}}
# Imports of what no file names: our own modules when first asked for, and packages behind their guards.
IMPORT_BY_NAME = {
    "src/gpipe/__init__.py",
    "src/gpipe/data/__init__.py",
    "src/gpipe/_compat/fairseq.py",
    "src/gpipe/_compat/torchvision.py",
}
# Between processes that one study starts itself, on one machine.
OBJECTS_BETWEEN_PROCESSES = {"experiments/engine_overhead.py", "experiments/peer_measurements.py"}


def name_of(node: ast.expr) -> tuple[str, str]:
    """Return the last two names of what is called: ("torch", "load") of torch.load."""
    if isinstance(node, ast.Attribute):
        return name_of(node.value)[1], node.attr
    return "", node.id if isinstance(node, ast.Name) else "(...)"


def dangers(tree: ast.AST) -> Iterator[str]:
    """Yield what in a program could run code that a file holds, unpack an archive, or start a shell."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                module = node.module or ""
                names = [module for name in names if (module, name) not in HARMLESS_IMPORTS]
            yield from (f"import {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            owner, name = name_of(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in FORBIDDEN_CALLS or name in FORBIDDEN_OF.get(owner, ()):
                yield f"{owner}.{name}"
            if owner in ("np", "numpy") and name == "load" and keywords.get("allow_pickle") != "False":
                yield "numpy.load without allow_pickle=False"
            if keywords.get("allow_pickle", "False") != "False" or keywords.get("shell", "False") != "False":
                yield f"{name} with allow_pickle or shell"
            if name == "import_module":
                yield "import_module"


def is_allowed(path: str, danger: str) -> bool:
    owner, _, name = danger.rpartition(".")
    return (
        (name == "import_module" and path in IMPORT_BY_NAME)
        or (name == "all_gather_object" and path in OBJECTS_BETWEEN_PROCESSES)
        or (name == "eval" and owner not in ("", "builtins"))  # the modules' mode
    )


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_program_loads_code_from_a_file(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert [danger for danger in dangers(ast.parse(path.read_text())) if not is_allowed(name, danger)] == []


@pytest.mark.parametrize(
    "program",
    [
        "import pickle", "from pickle import loads", "import yaml", "from yaml import YAMLError, load",
        "import tarfile", "import torch; torch.load(path)",
        "np.load(path)", "np.load(path, allow_pickle=True)", "np.load(path, allow_pickle=flag)", "eval(text)",
        "exec(text)", "dist.broadcast_object_list(values)", "hydra.utils.instantiate(config)", "os.system(text)",
        "subprocess.run(text, shell=True)", "shutil.unpack_archive(path)", "torch.hub.load(path)",
        "importlib.import_module(name)", "__import__(name)",
    ],
)  # fmt: skip
def test_the_search_finds_what_it_searches_for(program: str) -> None:
    assert [danger for danger in dangers(ast.parse(program)) if not is_allowed("src/gpipe/programs/build.py", danger)]
