"""Ways to break the device path: one wait, event, generator or move to a device that is missing.

They are found in the syntax tree, so that a new line of such a kind is covered by the tests from its first day on.
"""

from __future__ import annotations

import ast
import sys
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


class _Change(ast.NodeTransformer):
    """Makes change number `chosen` and lists all; without a number, it only lists them."""

    def __init__(self, chosen: int | None = None) -> None:
        self.found: list[tuple[str, str]] = []  # the function, and the text
        self._chosen = chosen
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
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if "torch.cuda" in ast.unparse(node) and self._choose(f"without {ast.unparse(node)}"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

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
        return node

    def visit_With(self, node: ast.With) -> Any:
        for item in list(node.items):
            is_stream = ast.unparse(item.context_expr).startswith("torch.cuda.stream(")
            if is_stream and self._choose(f"without with {ast.unparse(item)}"):
                node.items.remove(item)
                if not node.items:
                    node.items.append(ast.withitem(ast.parse("torch.cuda.stream(None)", mode="eval").body))
        return self.generic_visit(node)

    def _enter(self, node: Any, *, is_function: bool) -> Any:
        self._scope.append((node.name, is_function))
        node = self.generic_visit(node)
        self._scope.pop()
        return node

    def _choose(self, text: str) -> bool:
        functions = [depth for depth, (_, is_function) in enumerate(self._scope) if is_function]
        names = [name for name, _ in self._scope[: functions[0] + 1]]
        self.found.append((".".join(names), text))
        return len(self.found) - 1 == self._chosen

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
    source = _find_source(mutant.module)
    changed = ast.fix_missing_locations(_Change(mutant.number).visit(ast.parse(source.read_text())))
    code, owner = compile(changed, str(source), "exec"), sys.modules[mutant.module]
    *classes, name = mutant.function.split(".")
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
