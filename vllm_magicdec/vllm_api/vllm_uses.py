# SPDX-License-Identifier: Apache-2.0
"""What the plugin uses of vLLM, read from the plugin's own source.

Found are: every name imported from vLLM; the attributes of imported modules and classes, of what is
annotated with a class of vLLM, and of what follows from it by vLLM's own annotations; the parameters that
calls name; the members of vLLM's classes that a subclass overrides, with their parameters, and those that
it uses by `self`. Not found is what is reached through `Any`: that is listed by hand (`compat.CALLED`).
"""

import ast
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_magicdec.vllm_api.vllm_source import Found, Function, Source

_Types = dict[str, Found | None]  # by the names of a scope


@dataclass(frozen=True)
class Needed:
    """A class, method, function or other name of vLLM, and the parameters or fields that are relied on."""

    module: str
    name: str  # "function", "Class" or "Class.member"
    parameters: tuple[str, ...] = ()
    absent: bool = False  # the plugin adds it, so vLLM must not have it
    accepted: tuple[str, ...] | None = None  # all that an override takes; None: vLLM calls nothing of ours
    optional: bool = False  # the plugin does without it

    @property
    def label(self) -> str:
        """Short, for a report."""
        return f"{self.module.removeprefix('vllm.')}: {self.name}"


def find_uses(files: Iterable[Path], source: Source, optional: Collection[str] = ()) -> tuple[Needed, ...]:
    """What these files of the plugin use of vLLM, each name once.

    Args:
        files: Python files.
        source: of a vLLM that has all of it; from its annotations follow the types.
        optional: modules that the plugin does without.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    classes: dict[str, tuple[ast.Module, ast.ClassDef]] = {}
    for tree in trees:
        classes |= {node.name: (tree, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    uses: dict[tuple[str, str], Needed] = {}
    for tree in trees:
        for use in _File(tree, source, classes, optional).uses():
            before = uses.get((use.module, use.name), use)
            parameters = tuple(dict.fromkeys((*before.parameters, *use.parameters)))
            accepted = before.accepted if use.accepted is None else use.accepted
            uses[use.module, use.name] = Needed(use.module, use.name, parameters, accepted=accepted)
    return tuple(uses[key] for key in sorted(uses))


class _File:
    """One file of the plugin."""

    def __init__(
        self,
        tree: ast.Module,
        source: Source,
        classes: dict[str, tuple[ast.Module, ast.ClassDef]],
        optional: Collection[str] = (),
    ) -> None:
        self._tree = tree
        self._source = source
        self._classes = classes  # the plugin's, with their files
        self._uses: list[Needed] = []
        self._names: _Types = {}
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(module)) if _is_vllm(module) and module not in optional:
                    for alias in node.names:
                        self._names[alias.asname or alias.name] = source.find(module, alias.name)
                        self._uses.append(Needed(module, alias.name))
                case ast.Import():
                    for alias in node.names:
                        found = source.tree(alias.name) if _is_vllm(alias.name) else None
                        if found is not None:
                            self._names[alias.asname or "vllm"] = Found(alias.name, found)

    def uses(self) -> list[Needed]:
        self._visit(self._tree.body, dict(self._names), None)
        return self._uses

    def _visit(self, body: list[ast.stmt], types: _Types, owner: ast.ClassDef | None) -> None:
        for statement in body:
            match statement:
                case ast.ClassDef():
                    for base in statement.bases:
                        self._type(base, types, owner)
                    self._visit(statement.body, dict(types), statement)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self._function(statement, types, owner)
                case ast.Assign(targets=[target], value=value):
                    self._assign(target, value, types, owner)
                case _:
                    for _, value in ast.iter_fields(statement):
                        for part in value if isinstance(value, list) else [value]:
                            if isinstance(part, ast.stmt):
                                self._visit([part], types, owner)
                            elif isinstance(part, ast.ExceptHandler | ast.match_case):
                                self._visit(part.body, types, owner)
                            elif isinstance(part, ast.AST):
                                self._type_within(part, types, owner)

    def _function(self, function: Function, types: _Types, owner: ast.ClassDef | None) -> None:
        arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        inner = {**types, **{a.arg: self._annotated(a.annotation) for a in arguments}}
        if owner is not None and function in owner.body:
            self._override(function, owner)
        self._visit(function.body, inner, owner)

    def _override(self, function: Function, owner: ast.ClassDef) -> None:
        ours = self._source.parameters(Found("", function))
        for base in self._vllm_bases(owner):
            member = self._source.member(base, function.name)
            if member is None:
                continue
            theirs = self._source.parameters(member)
            # One that takes less than vLLM's has is called by the plugin alone.
            accepted = ours if function.args.kwarg is None and {*theirs} <= {*ours} else None
            self._need(base, function.name, [p for p in ours if p in theirs], accepted)

    def _assign(self, target: ast.expr, value: ast.expr, types: _Types, owner: ast.ClassDef | None) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its_value in zip(target.elts, value.elts, strict=False):
                self._assign(one, its_value, types, owner)
            return
        found = self._type(value, types, owner)
        if isinstance(target, ast.Name):
            types[target.id] = found
        else:
            self._type(target, types, owner)

    def _type(self, node: ast.expr, types: _Types, owner: ast.ClassDef | None) -> Found | None:
        """The class of an expression's value, or the class, module or function it is; notes its uses."""
        match node:
            case ast.Name(id=name):
                return types.get(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if owner is not None:
                return self._own_or_inherited(owner, name)
            case ast.Attribute(value=value, attr=name):
                return self._attribute(self._type(value, types, owner), name)
            case ast.Call(func=called, args=arguments, keywords=keywords):
                for argument in (*arguments, *(keyword.value for keyword in keywords)):
                    self._type(argument, types, owner)
                names = [keyword.arg for keyword in keywords if keyword.arg is not None]
                return self._call(called, names, types, owner)
        self._type_within(node, types, owner)
        return None

    def _type_within(self, node: ast.AST, types: _Types, owner: ast.ClassDef | None) -> None:
        if isinstance(node, ast.expr) and not isinstance(node, ast.Attribute | ast.Name | ast.Call):
            parts: Iterable[ast.AST] = ast.iter_child_nodes(node)
        else:
            parts = [node] if isinstance(node, ast.expr) else ast.iter_child_nodes(node)
        for part in parts:
            if isinstance(part, ast.Attribute | ast.Name | ast.Call):
                self._type(part, types, owner)
            else:
                self._type_within(part, types, owner)

    def _call(
        self, called: ast.expr, names: list[str], types: _Types, owner: ast.ClassDef | None
    ) -> Found | None:
        match called:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=method) if owner is not None:
                found = None
                for base in self._vllm_bases(owner):
                    member = self._source.member(base, method)
                    if member is not None:
                        self._need(base, method, names)
                        found = found or self._source.type_of(member)
                return found
            case ast.Name(id=name):
                found = types.get(name)
                if found is not None and not isinstance(found.node, ast.Module):
                    self._uses.append(Needed(found.module, _name(found), tuple(names)))
            case ast.Attribute(value=value, attr=method):
                holder = (
                    self._inherited(owner, method)
                    if isinstance(value, ast.Name) and value.id == "self" and owner is not None
                    else self._type(value, types, owner)
                )
                found = self._attribute(holder, method, names)
            case _:
                return self._type(called, types, owner)
        return self._source.type_of(found) if found is not None and found.class_name is None else found

    def _own_or_inherited(self, owner: ast.ClassDef, name: str) -> Found | None:
        return self._attribute(self._inherited(owner, name), name)

    def _inherited(self, owner: ast.ClassDef, name: str) -> Found | None:
        """The class of vLLM from which a class of the plugin has an attribute; None: it is the plugin's."""
        if any(name in _defined(one) for one in self._plugin_classes(owner)):
            return None
        bases = list(self._vllm_bases(owner))
        holding = (base for base in bases if self._source.member(base, name) is not None)
        return next(holding, bases[0] if bases else None)

    def _attribute(self, holder: Found | None, name: str, names: Iterable[str] = ()) -> Found | None:
        if holder is None or (holder.class_name is None and not isinstance(holder.node, ast.Module)):
            return None
        member = self._source.member(holder, name)
        if member is None and (
            not self._source.is_wholly_known(holder)
            # The plugin's: `isinstance` has told one of its classes.
            or any(name in _defined(one) for _, one in self._classes.values())
        ):
            return None
        # What is called may be kept in an attribute: its parameters are not the attribute's.
        is_kept = member is not None and not isinstance(member.node, ast.ClassDef | Function)
        self._need(holder, name, () if is_kept else names)
        if member is None or isinstance(member.node, ast.ClassDef | ast.Module):
            return member
        is_property = isinstance(member.node, Function) and any(
            isinstance(d, ast.Name) and d.id in ("property", "cached_property")
            for d in member.node.decorator_list
        )
        if isinstance(member.node, Function) and not is_property:
            return member
        return self._source.type_of(member)

    def _need(
        self,
        holder: Found,
        name: str,
        parameters: Iterable[str] = (),
        accepted: tuple[str, ...] | None = None,
    ) -> None:
        if name.startswith("__") and name != "__init__":
            return  # Python's
        qualified = f"{holder.class_name}.{name}" if holder.class_name else name
        self._uses.append(Needed(holder.module, qualified, tuple(parameters), accepted=accepted))

    def _annotated(self, annotation: ast.expr | None) -> Found | None:
        match annotation:
            case ast.Name(id=name):
                return self._names.get(name)
            case ast.Constant(value=str(text)):
                return self._annotated(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, right=right):
                return self._annotated(left) or self._annotated(right)
        return None

    def _plugin_classes(self, owner: ast.ClassDef) -> Iterator[ast.ClassDef]:
        yield owner
        for base in owner.bases:
            if isinstance(base, ast.Name) and base.id in self._classes:
                yield from self._plugin_classes(self._classes[base.id][1])

    def _vllm_bases(self, owner: ast.ClassDef) -> Iterator[Found]:
        for one in self._plugin_classes(owner):
            tree, _ = self._classes[one.name]
            names = self._names if tree is self._tree else _File(tree, self._source, self._classes)._names
            for base in one.bases:
                found = names.get(base.id) if isinstance(base, ast.Name) else None
                if found is not None and found.class_name is not None:
                    yield found


def _is_vllm(module: str) -> bool:
    return module.split(".")[0] == "vllm"


def _name(found: Found) -> str:
    assert isinstance(found.node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    return found.node.name


def _defined(owner: ast.ClassDef) -> set[str]:
    """What a class of the plugin defines itself."""
    names = {s.name for s in owner.body if isinstance(s, Function)}
    for node in ast.walk(owner):
        match node:
            case ast.AnnAssign(target=target) | ast.Assign(targets=[target]):
                match target:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        names.add(name)
                    case ast.Name(id=name) if node in owner.body:
                        names.add(name)
    return names
