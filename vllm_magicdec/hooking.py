# SPDX-License-Identifier: Apache-2.0
"""Find, check, wrap and restore attributes of vLLM.

This module does not import vLLM, so that it works with every version.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Self

from vllm_magicdec.errors import MagicDecConfigError

Wrap = Callable[[Any, Callable[..., Any]], Any]  # (owner, original) -> replacement

_ABSENT = object()
_originals: dict["Hook", Any] = {}  # by installed hook; _ABSENT: the owner inherits it


@dataclass(frozen=True)
class Required:
    """A class, function, method or attribute of vLLM that the plugin relies on."""

    module: str
    owner: str  # class in that module; "": the module itself
    name: str  # attribute of the class or module
    parameters: tuple[str, ...] = ()  # names that the function or constructor must take

    @classmethod
    def of(cls, module: str, text: str, **fields: Any) -> Self:
        """Read `name`, `Owner.name` or `Owner.name(parameters)`; `fields` are those of a subclass."""
        qualified, _, parameters = text.partition("(")
        owner, _, name = qualified.rpartition(".")
        return cls(module, owner, name, tuple(re.findall(r"\w+", parameters)), **fields)

    @property
    def target(self) -> str:
        """Qualified name, for messages."""
        return ".".join(filter(None, (self.module, self.owner, self.name)))

    def find_owner(self) -> Any:
        """Return the class or module; raise ImportError or AttributeError if it does not exist."""
        module = importlib.import_module(self.module)
        return getattr(module, self.owner) if self.owner else module

    def find_problem(self) -> str | None:
        """Return why the installed vLLM does not match, or None."""
        try:
            owner = self.find_owner()
            found = getattr(owner, self.name, None)
            is_there = hasattr(owner, self.name) or _assigns(owner, self.name)
            if not is_there or getattr(found, "__isabstractmethod__", False):
                return f"{self.owner or self.module} has no {self.name}"
            return self._find_difference(found)
        except Exception as error:  # importing the module may raise any type
            return in_words(error)

    def _find_difference(self, found: Any) -> str | None:
        parameters = inspect.signature(found).parameters if self.parameters else {}
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            return None
        missing = [name for name in self.parameters if name not in parameters]
        return f"{self.target} takes no {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Hook(Required):
    """An attribute of a class or module of vLLM that the plugin wraps.

    `parameters` are the first parameters of vLLM's function, in order; () for a `__new__`, which passes
    its arguments on. Another plugin may have wrapped the attribute before.
    """

    reason: str = ""
    wrap: Wrap = lambda owner, original: original

    def _find_difference(self, found: Any) -> str | None:
        if not self.parameters:
            return None
        signature = inspect.signature(found)  # of the original, if a wrapper tells
        parameters = tuple(signature.parameters)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            return None  # a wrapper that passes everything on
        if parameters[: len(self.parameters)] != self.parameters:
            return f"{self.target} takes {parameters}, not {self.parameters}"
        return None


def in_words(error: Exception) -> str:
    """Return the message in one line, with the type unless it is a `MagicDecConfigError`."""
    name = "" if isinstance(error, MagicDecConfigError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def _assigns(owner: Any, name: str) -> bool:
    """Return whether a class annotates an instance attribute or one of its methods mentions it."""
    if not isinstance(owner, type):
        return False
    return any(
        name in getattr(cls, "__annotations__", ())
        or any(
            name in function.__code__.co_names
            for function in map(inspect.unwrap, vars(cls).values())
            if isinstance(function, FunctionType)
        )
        for cls in owner.__mro__
    )


def instead(act: Callable[..., Any]) -> Wrap:
    """Call `act(original, *arguments)` instead of the original function."""

    def wrap(owner: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return act(original, *args, **kwargs)

        return wrapper

    return wrap


def before(act: Callable[..., object]) -> Wrap:
    """Call `act` with the arguments before the original function."""

    def act_first(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    return instead(act_first)


def after(act: Callable[..., Any]) -> Wrap:
    """Return `act(result, *arguments)` instead of the result of the original function."""
    return instead(lambda original, *args, **kwargs: act(original(*args, **kwargs), *args, **kwargs))


def installed() -> tuple[Hook, ...]:
    """Return the installed hooks."""
    return tuple(_originals)


def check(required: Sequence[Required]) -> None:
    """Raise MagicDecConfigError if vLLM lacks something: the first problem and the number of others."""
    problems = list(filter(None, (one.find_problem() for one in required)))
    if problems:
        others = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise MagicDecConfigError(f"{problems[0]}{others}")


def install(hooks: Sequence[Hook]) -> None:
    """Wrap the attributes of all hooks but installed ones, or of none: raise MagicDecConfigError."""
    check(hooks)
    new = [hook for hook in hooks if hook not in _originals]
    try:
        for hook in new:
            owner = hook.find_owner()
            original = getattr(owner, hook.name)
            _originals[hook] = vars(owner).get(hook.name, _ABSENT)
            wrapper = hook.wrap(owner, original)
            is_static = isinstance(_originals[hook], staticmethod)
            setattr(owner, hook.name, staticmethod(wrapper) if is_static else wrapper)
    except Exception:
        uninstall(new)
        raise


def uninstall(hooks: Sequence[Hook] | None = None) -> None:
    """Restore the original attributes of vLLM."""
    for hook in [hook for hook in _originals if hooks is None or hook in hooks]:
        original, owner = _originals.pop(hook), hook.find_owner()
        if original is not _ABSENT:
            setattr(owner, hook.name, original)
        elif hook.name in vars(owner):
            delattr(owner, hook.name)
