"""Ways to break the device path: one wait, event, generator or move to a device that is missing.

They are found in the syntax tree, so that a new line of such a kind is covered by the tests from its first day on.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

SOURCES = Path(__file__).parents[2] / "src"
# Taken out where they are a statement.
_ORDERING = {"wait_event", "wait_stream", "record_stream", "record", "synchronize", "set_device", "wait_for_devices"}


class Mutant(NamedTuple):
    """One change of a module of gpipe.

    Attributes:
        module: such as "gpipe.pipeline.transfer".
        number: of the change among all those of the module.
        function: the outermost function that has it, such as "LocalTransfer.receive".
        text: what is changed, and how.
    """

    module: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('gpipe.')}, {self.function}: {self.text}"


reached: set[tuple[str, int]] = set()
"""The places of changes that this process came by, once it has called `watch`: their modules and numbers."""


class _Change(ast.NodeTransformer):
    """Makes change number `chosen` and lists all; without a number, it only lists them.

    watched: the name of the module, to note whenever the place of a change is come by.
    """

    def __init__(self, chosen: int | None = None, watched: str = "") -> None:
        self.found: list[tuple[str, str]] = []  # the function, and the text
        self._chosen, self._watched = chosen, watched
        self._notes: list[ast.expr] = []  # for the node that is looked at
        self._scope: list[tuple[str, bool]] = []  # classes and functions around, and which ones are functions

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._enter(node, is_function=False)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._enter(node, is_function=True)

    def visit_Expr(self, node: ast.Expr) -> Any:
        match node.value:
            case ast.Call(func=ast.Attribute(attr=name)) if name in _ORDERING and not self._is_wait_of_the_host(node):
                if self._choose(f"without {ast.unparse(node)}"):
                    return ast.copy_location(ast.Pass(), node)
            case ast.Call(func=ast.Attribute(attr="manual_seed")) if "cuda" in ast.unparse(node):
                if self._choose(f"without {ast.unparse(node)}"):
                    return ast.copy_location(ast.Pass(), node)
            case ast.Call(
                func=ast.Attribute(value=ast.Call() | ast.Name(id="work") as operation, attr="wait"), args=[]
            ):
                if self._choose(f"without waiting for {ast.unparse(operation)}"):
                    return ast.copy_location(ast.Expr(operation), node)
        return self._noted(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if "torch.cuda" in ast.unparse(node) and self._choose(f"without {ast.unparse(node)}"):
            return ast.copy_location(ast.Pass(), node)
        return self._noted(node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Call(func=ast.Attribute(value=tensor, attr="to"), args=[place, *_]) if self._is_place(place):
                if self._choose(f"{ast.unparse(tensor)} in place of {ast.unparse(node)}"):
                    return tensor
            case ast.Call(func=ast.Attribute(attr="record_event")):
                if self._choose(f"an empty event in place of {ast.unparse(node)}"):
                    return ast.copy_location(ast.parse("torch.cuda.Event()", mode="eval").body, node)
            case ast.Call(keywords=[*_, ast.keyword(arg="device")]) if isinstance(node.func, ast.Attribute):
                if ast.unparse(node.func).startswith("torch.") and self._choose(f"on the CPU: {ast.unparse(node)}"):
                    return ast.copy_location(ast.Call(node.func, node.args, node.keywords[:-1]), node)
        notes = self._take_notes()
        return ast.Subscript(ast.Tuple([*notes, node], ast.Load()), ast.Constant(-1), ast.Load()) if notes else node

    def visit_With(self, node: ast.With) -> Any:
        for item in list(node.items):
            is_stream = ast.unparse(item.context_expr).startswith("torch.cuda.stream(")
            if is_stream and self._choose(f"without with {ast.unparse(item)}"):
                node.items.remove(item)
                if not node.items:
                    node.items.append(ast.withitem(ast.parse("torch.cuda.stream(None)", mode="eval").body))
        return self._noted(node)

    def _noted(self, statement: ast.stmt) -> Any:
        """Return a statement, behind the notes for it."""
        notes = [ast.Expr(note) for note in self._take_notes()]
        return [*notes, self.generic_visit(statement)] if notes else self.generic_visit(statement)

    def _take_notes(self) -> list[ast.expr]:
        notes, self._notes = self._notes, []
        return notes

    def _enter(self, node: Any, *, is_function: bool) -> Any:
        self._scope.append((node.name, is_function))
        node = self.generic_visit(node)
        self._scope.pop()
        return node

    def _choose(self, text: str) -> bool:
        functions = [depth for depth, (_, is_function) in enumerate(self._scope) if is_function]
        names = [name for name, _ in self._scope[: functions[0] + 1]]
        number = len(self.found)
        self.found.append((".".join(names), text))
        if self._watched:
            note = f"__import__({__name__!r}, fromlist=['reached']).reached.add(({self._watched!r}, {number}))"
            self._notes.append(ast.parse(note, mode="eval").body)
        return number == self._chosen

    @staticmethod
    def _is_wait_of_the_host(node: ast.Expr) -> bool:
        """Return whether the statement waits for a thread, not a device."""
        return "_copied" in ast.unparse(node)

    @staticmethod
    def _is_place(argument: ast.expr) -> bool:
        """Return whether an argument of `.to` is a device, not a type."""
        text = ast.unparse(argument)
        return "device" in text or not ("dtype" in text or text == "wide")


def find_mutants(module: str) -> list[Mutant]:
    """Return all changes of a module, in the order of its lines."""
    change = _Change()
    change.visit(ast.parse(_find_source(module).read_text()))
    return [Mutant(module, number, *found) for number, found in enumerate(change.found)]


def apply(mutant: Mutant) -> None:
    """Make a change in this process, in the module that is imported: its function gets other code."""
    changed = _Change(mutant.number).visit(ast.parse(_find_source(mutant.module).read_text()))
    _replace(mutant.module, mutant.function, _compile(mutant.module, changed))


def watch(modules: Iterable[str]) -> None:
    """From now on, note in `reached` which places of changes this process comes by."""
    for module in modules:
        code, functions = compile_watched(module)
        for function in functions:
            _replace(module, function, code)


@cache
def compile_watched(module: str) -> tuple[CodeType, frozenset[str]]:
    """Return the code of a module with notes at the places of its changes, and the functions that have some."""
    import_module(module)  # a process that imported it later would get the code of its file
    change = _Change(watched=module)
    code = _compile(module, change.visit(ast.parse(_find_source(module).read_text())))
    assert change.found == [mutant[2:] for mutant in find_mutants(module)], f"notes change what is found in {module}"
    return code, frozenset(function for function, _ in change.found)


def _compile(module: str, tree: ast.AST) -> CodeType:
    code: CodeType = compile(ast.fix_missing_locations(tree), str(_find_source(module)), "exec")  # type: ignore[arg-type]
    return code


def _replace(module: str, function: str, code: CodeType) -> None:
    """Give a function of an imported module the code that it has in another version of the module."""
    owner: Any = sys.modules[module]
    *classes, name = function.split(".")
    for each in classes:
        code, owner = _find_code(code, each), getattr(owner, each)
    _find_function(vars(owner)[name]).__code__ = _find_code(code, name)


def _find_source(module: str) -> Path:
    return SOURCES.joinpath(*module.split(".")).with_suffix(".py")


def _find_code(code: CodeType, name: str) -> CodeType:
    return next(part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name)


def _find_function(found: Any) -> FunctionType:
    """Return the function below a property, a static method or a decorator."""
    while not (isinstance(found, FunctionType) and not hasattr(found, "__wrapped__")):
        found = getattr(found, "__wrapped__", None) or getattr(found, "fget", None) or found.__func__
    return found
