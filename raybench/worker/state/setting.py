"""One thing that a process remembers, with how it is read and how it is put back."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, MutableSequence
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """name: a noun phrase. read: a value that compares equal while nothing has changed.

    write: takes what `read` gave; None where a process cannot change it back.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object] | None


def attribute(name: str, owner: object, attribute_name: str) -> Setting:
    """Make the setting of an attribute of a module or an object."""
    return Setting(
        name,
        lambda: getattr(owner, attribute_name),
        lambda value: setattr(owner, attribute_name, value),
    )


def mapping(name: str, owner: MutableMapping[Any, Any]) -> Setting:
    """Make one of the entries of a mapping that others hold on to. Only what differs is touched."""

    def write(before: dict[Any, Any]) -> None:
        for key in owner.keys() - before.keys():
            del owner[key]
        for key, value in before.items():
            if key not in owner or owner[key] != value:
                owner[key] = value

    return Setting(name, lambda: dict(owner), write)


def sequence(name: str, owner: MutableSequence[Any]) -> Setting:
    """Make one of the entries of a list that others hold on to."""

    def write(before: list[Any]) -> None:
        owner[:] = before

    return Setting(name, lambda: list(owner), write)
