"""The functions of the modules of a process, and which of them a workload has replaced.

Kernel libraries, tracers and debuggers put functions of their own in the place of others, such as
`torch.nn.functional.gelu`. What has taken hold of such a function is not known, so none is put
back: a process in which one was replaced is no good for the next point. But what torch.compile
wraps for itself it wraps again when it is used again.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

from raybench.worker.state.torch_settings import is_of_compiler, let_compiler_wrap_again

# What raybench and Ray load for themselves, and torch's compiler and exporters, whose settings are
# read elsewhere: nobody computes with their functions in a step.
_OF_OTHERS = frozenset(
    {
        "_pytest",
        "attr",
        "attrs",
        "click",
        "google",
        "hypothesis",
        "jsonschema",
        "markdown_it",
        "mpmath",
        "networkx",
        "pydantic",
        "pydantic_core",
        "pygments",
        "pytest",
        "ray",
        "referencing",
        "requests",
        "rich",
        "rpds",
        "ruamel",
        "sympy",
        "torch._decomp",
        "torch._dynamo",
        "torch._export",
        "torch._functorch",
        "torch._higher_order_ops",
        "torch._inductor",
        "torch._meta_registrations",
        "torch._numpy",
        "torch._prims",
        "torch._prims_common",
        "torch._refs",
        "torch._subclasses",
        "torch.ao",
        "torch.compiler",
        "torch.export",
        "torch.fx",
        "torch.onnx",
        "torch.package",
        "torch.quantization",
        "torch.testing",
        "torchgen",
        "yaml",
    }
)
_FUNCTIONS = frozenset(
    {
        types.BuiltinFunctionType,
        types.FunctionType,
        types.MethodDescriptorType,
        types.MethodType,
        types.WrapperDescriptorType,
        classmethod,
        property,
        staticmethod,
    }
)
_IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: the attributes of such a class cannot be set


class LoadedFunctions:
    """What modules and their classes had when they were first seen here."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._classes: set[int] = set()
        self._namespaces: list[_Namespace] = []

    def learn(self) -> None:
        """Take in the modules that were loaded since."""
        self._namespaces.extend(self._new())

    def replaced(self, package: str) -> list[str]:
        """Name those that are not what they were, or are new in their class.

        package: that of the workload. A module that was loaded since, nobody knows as it was; but
        no library has functions of the workload's by itself. It counts as seen now.
        """
        found = [one for space in self._find_changed() for one in space.differences()]
        # Compiled code is a name in the module that it was compiled of, until it is forgotten.
        differences = [
            one for one in found if not (one.now is _GONE and is_of_compiler(one.before))
        ]
        by_compiler = [one for one in differences if is_of_compiler(one.now)]
        for one in by_compiler:
            one.restore_functions()
        if by_compiler:
            let_compiler_wrap_again()
        new = list(self._new())
        names = {one.name for one in differences if one not in by_compiler}
        names |= {name for space in new for name in space.names_given_by(package)}
        self._namespaces.extend(new)
        return sorted(names)

    def _new(self) -> Iterator[_Namespace]:
        for name, module in list(sys.modules.items()):
            if name in self._modules:
                continue
            self._modules.add(name)
            if isinstance(module, types.ModuleType) and not _is_of_others(name):
                yield from self._namespaces_of(name, module)

    def _find_changed(self) -> Iterator[_Namespace]:
        """Those that need a closer look: 65,000 functions are compared in 6 ms, so mostly in C."""
        for space in self._namespaces:
            _, _, entries, pick, _, values, size = space
            try:
                # Identical values are equal without being asked.
                if pick(entries) == values and (size is None or size == len(entries)):
                    continue
            except Exception:  # one is gone, or a class has an odd idea of equality
                pass
            yield space

    def _namespaces_of(self, name: str, module: types.ModuleType) -> Iterator[_Namespace]:
        classes = [value for value in _entries(module).values() if _is_class(value)]
        yield from _namespace(name, module, _is_of_module)
        for each in classes:
            if id(each) in self._classes or _read(each, "__flags__") & _IMMUTABLE:
                continue
            self._classes.add(id(each))  # which the namespace keeps alive
            label = f"{_read(each, '__module__')}.{_read(each, '__qualname__')}"
            yield from _namespace(label, each, _is_one)


_GONE = object()


class _Difference(NamedTuple):
    """before: _GONE where it is new. now: _GONE where it is there no more."""

    owner: Any
    attribute: str
    name: str
    before: Any
    now: Any

    def restore_functions(self) -> None:
        if self.before is _GONE:
            delattr(self.owner, self.attribute)
        else:
            setattr(self.owner, self.attribute, self.before)


class _Namespace(NamedTuple):
    """Of a module or class. pick: gives the values of `names` in `entries` at once.

    size: how many entries a class has.
    """

    name: str
    owner: Any
    entries: Mapping[str, Any]
    pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    names: tuple[str, ...]
    values: tuple[Any, ...]
    size: int | None

    def differences(self) -> Iterator[_Difference]:
        known = dict(zip(self.names, self.values, strict=True))
        for name, before in known.items():
            if not _is_still(before, now := self.entries.get(name, _GONE)):
                yield _Difference(self.owner, name, f"{self.name}.{name}", before, now)
        if self.size is None:
            return
        for name in self.entries.keys() - known.keys():
            now = self.entries[name]
            if type(now) in _FUNCTIONS and not _is_still(_inherit(self.owner, name), now):
                yield _Difference(self.owner, name, f"{self.name}.{name}", _GONE, now)

    def names_given_by(self, package: str) -> Iterator[str]:
        if self.name.partition(".")[0] == package:
            return
        for name, value in zip(self.names, self.values, strict=True):
            home = _read(value, "__module__")
            if isinstance(home, str) and home.partition(".")[0] == package:
                yield f"{self.name}.{name}"


def _is_of_others(module: str) -> bool:
    top, _, rest = module.partition(".")
    return top in _OF_OTHERS or f"{top}.{rest.partition('.')[0]}" in _OF_OTHERS


def _namespace(name: str, owner: Any, is_kept: Callable[[Any], bool]) -> Iterator[_Namespace]:
    entries = _entries(owner)
    kept = {key: value for key, value in entries.items() if is_kept(value)}
    if not kept:
        return
    # With a single name itemgetter gives no tuple.
    names = tuple(kept) if len(kept) > 1 else (*kept, *kept)
    values = tuple(kept[key] for key in names)
    size = len(entries) if is_kept is _is_one else None
    yield _Namespace(name, owner, entries, itemgetter(*names), names, values, size)


def _is_one(value: Any) -> bool:
    return type(value) in _FUNCTIONS


def _is_of_module(value: Any) -> bool:
    return type(value) in _FUNCTIONS or _is_class(value)


def _entries(owner: Any) -> Mapping[str, Any]:
    entries: Mapping[str, Any] = _read(owner, "__dict__")
    return entries


def _read(owner: Any, name: str) -> Any:
    """Read an attribute as Python keeps it: a metaclass may raise where a class is looked at."""
    ask = type.__getattribute__ if _is_class(owner) else getattr
    try:
        return ask(owner, name)
    except AttributeError:
        return None


def _is_class(value: Any) -> bool:
    # Not isinstance: it asks the value too, and one of torch's warns then that it is deprecated.
    return issubclass(type(value), type)


def _inherit(owner: type, name: str) -> Any:
    """Find what a class has of its bases."""
    bases = _read(owner, "__mro__")[1:]
    return next((_entries(base)[name] for base in bases if name in _entries(base)), _GONE)


def _is_still(before: Any, now: Any) -> bool:
    """Allow for the first optimizer of a class, which wraps its `step` in every process."""
    return now is before or _without_hooks(now) is _without_hooks(before)


def _without_hooks(function: Any) -> Any:
    is_hooked = getattr(function, "hooked", False) is True
    return getattr(function, "__wrapped__", function) if is_hooked else function
