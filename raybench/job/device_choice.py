"""Which devices a point may use, as a job asks for them: any, those of a model, or some by number.

Numbers count the devices of the cluster in the order of ranks: by node, then by index. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# The whole cluster.
ANY = "any"
_NUMBERS = re.compile(r"\d+(/\d+)*")


def are_devices(value: str) -> bool:
    """Check what a job asks for. Raises ValueError with the rule."""
    names = numbers(value)
    if value.strip() and len(set(names)) == len(names):
        return True
    raise ValueError(f"must be {ANY}, a model as in H200, or different numbers as in 0/2")


def numbers(choice: str) -> tuple[int, ...]:
    """Return the numbers that are asked for; none where a model is, or any device."""
    return tuple(map(int, choice.split("/"))) if _NUMBERS.fullmatch(choice) else ()


def choose(choice: str, models: Sequence[str]) -> list[int]:
    """Return the numbers of the devices that are meant, of all devices with these models."""
    if asked := numbers(choice):
        return [number for number in asked if number < len(models)]
    return [
        number
        for number, model in enumerate(models)
        if choice == ANY or choice.casefold() in model.casefold()
    ]


def devices_needed(choice: str, world_size: int) -> int:
    """Count the devices that a cluster needs for them, as far as that is known."""
    return max(world_size, *(number + 1 for number in numbers(choice)), 0)


def why_too_few(choice: str, world_size: int) -> str | None:
    """Why so many ranks cannot have the devices, as far as that is known before any is seen."""
    asked = numbers(choice)
    if asked and len(asked) < world_size:
        return f"devices: {choice} are {len(asked)}, world_size is {world_size}"
    return None
