# SPDX-License-Identifier: Apache-2.0
"""A vLLM's source text, looked up by name without importing it."""

import ast
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Reader = Callable[[str], str | None]  # module name -> source, None where there is no such module

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """A definition: of a class, a function, a module, or an assignment (`annotation`: of its target)."""

    module: str
    node: ast.AST
    annotation: ast.expr | None = None

    @property
    def class_name(self) -> str | None:
        """Of a class; None for everything else."""
        return self.node.name if isinstance(self.node, ast.ClassDef) else None


class Source:
    """The modules of one vLLM.

    Args:
        read: gives their text.
    """

    def __init__(self, read: Reader) -> None:
        self._read = read
        self.tree = cache(self._parse)
        self.find = cache(self._find)
        self.member = cache(self._member)

    def _parse(self, module: str) -> ast.Module | None:
        """A module's syntax tree; None where there is none."""
        text = self._read(module)
        return None if text is None else ast.parse(text)

    def _find(self, module: str, name: str) -> Found | None:
        """What a name of a module stands for, wherever it was imported from; None: nothing."""
        tree = self.tree(module)
        if tree is None:
            return None
        found = None
        for statement in _statements(tree.body):
            if name in _names(statement):
                found = Found(module, statement, getattr(statement, "annotation", None))
            elif isinstance(statement, ast.ImportFrom):
                found = self._imported(module, statement, name) or found
        submodule = f"{module}.{name}"
        if found is None and (tree := self.tree(submodule)) is not None:
            return Found(submodule, tree)
        return found

    def _imported(self, module: str, statement: ast.ImportFrom, name: str) -> Found | None:
        for alias in statement.names:
            if name == (alias.asname or alias.name):
                return self.find(self._absolute(module, statement), alias.name)
        return None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        levels = statement.level - (self.tree(f"{module}.__init__") is not None)
        package = module.split(".")[: -levels or None]
        return ".".join([*package, *filter(None, [statement.module])])

    def _member(self, owner: Found, name: str) -> Found | None:
        """An attribute of a class or module: a method, a field, or what a method assigns to `self`."""
        if isinstance(owner.node, ast.Module):
            return self.find(owner.module, name)
        if not isinstance(owner.node, ast.ClassDef):
            return None
        found = None
        for statement in _statements(owner.node.body):
            if name in _names(statement):  # the last: the implementation, not its overloads
                found = Found(owner.module, statement, getattr(statement, "annotation", None))
        if found is not None:
            return found
        for method in (s for s in _statements(owner.node.body) if isinstance(s, Function)):
            for node in ast.walk(method):
                if isinstance(node, ast.Assign | ast.AnnAssign) and name in _self_names(node):
                    return Found(owner.module, node, _annotation(node, method))
        for base in owner.node.bases:
            parent = self.annotated_class(owner.module, base)
            inherited = self.member(parent, name) if parent is not None else None
            if inherited is not None:
                return inherited
        return None

    def annotated_class(self, module: str, annotation: ast.expr | None) -> Found | None:
        """The class that an annotation or a base names in a module: of a union the first; None: unknown."""
        match annotation:
            case ast.Name(id=name):
                found = self.find(module, name)
                return found if found is not None and found.class_name is not None else None
            case ast.Constant(value=str(text)):
                return self.annotated_class(module, ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self.annotated_class(module, left) or self.annotated_class(module, right)
            case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
                return self.annotated_class(module, inner)
        return None

    def type_of(self, found: Found) -> Found | None:
        """The class of a member's value or a function's result, where it is annotated."""
        if isinstance(found.node, Function):
            return self.annotated_class(found.module, found.node.returns)
        return self.annotated_class(found.module, found.annotation)

    def parameters(self, found: Found) -> tuple[str, ...]:
        """A function's parameters, or what constructs a class: those of `__init__`, or the fields."""
        if isinstance(found.node, Function):
            arguments = found.node.args
            return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))
        if not isinstance(found.node, ast.ClassDef):
            return ()
        constructor = self.member(found, "__init__")
        return self.parameters(constructor) if constructor is not None else tuple(self.fields(found))

    def takes_any(self, found: Found) -> bool:
        """Whether a function takes whatever name it is given."""
        return isinstance(found.node, Function) and found.node.args.kwarg is not None

    def is_wholly_known(self, found: Found) -> bool:
        """Whether a class and all that it inherits from, but for Python's own abstractions, are vLLM's."""
        if not isinstance(found.node, ast.ClassDef):
            return True
        for base in found.node.bases:
            parent = self.annotated_class(found.module, base)
            abstract = isinstance(base, ast.Name) and base.id in ("ABC", "Enum", "NamedTuple", "Protocol")
            if not (abstract if parent is None else self.is_wholly_known(parent)):
                return False
        return True

    def fields(self, found: Found) -> Iterator[str]:
        """The annotated names of a class and of those it inherits from."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            parent = self.annotated_class(found.module, base)
            if parent is not None:
                yield from self.fields(parent)
        for statement in _statements(found.node.body):
            if isinstance(statement, ast.AnnAssign):
                yield from _names(statement)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Of a module or class, those under conditions too."""
    for statement in body:
        yield statement
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(statement, ast.If | ast.Try | ast.With):
                for inner in getattr(statement, part, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _names(statement: ast.stmt) -> list[str]:
    """What a statement defines."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [statement.name]
    return [target.id for target in _targets(statement) if isinstance(target, ast.Name)]


def _self_names(statement: ast.stmt) -> list[str]:
    return [
        target.attr
        for target in _targets(statement)
        if isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    ]


def _targets(statement: ast.stmt) -> Iterator[ast.expr]:
    match statement:
        case ast.Assign(targets=targets):
            for target in targets:
                yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        case ast.AnnAssign(target=target):
            yield target


def _annotation(statement: ast.Assign | ast.AnnAssign, method: Function) -> ast.expr | None:
    """Of `self.x: T = ...`, or of the parameter in `self.x = parameter`."""
    if isinstance(statement, ast.AnnAssign):
        return statement.annotation
    arguments = (*method.args.args, *method.args.kwonlyargs)
    name = statement.value.id if isinstance(statement.value, ast.Name) else None
    return next((argument.annotation for argument in arguments if argument.arg == name), None)


def tree_reader(root: Path) -> Reader:
    """Reads modules below the folder that holds the package `vllm`."""

    def read(module: str) -> str | None:
        stem = root.joinpath(*module.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None

    return read


def wheel_reader(wheel: Path) -> Reader:
    """Reads modules from a wheel without unpacking it."""
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())

    def read(module: str) -> str | None:
        stem = module.replace(".", "/")
        for path in (f"{stem}.py", f"{stem}/__init__.py"):
            if path in names:
                return archive.read(path).decode("utf-8")
        return None

    return read
