"""The workload `function`: a step as a Python function, which `raybench.measure` sends."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PositiveFloat

from raybench.errors import UsageError
from raybench.workloads.base import Context, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFunctions:
    """A step and its set-up."""

    # Gets what `setup` returns, if there is a set-up.
    step: Callable[..., object]
    # Gets the Context if it has a parameter without a default.
    setup: Callable[..., object] | None = None

    def bind(self, context: Context) -> Callable[[], object]:
        """Run the set-up and return the step without arguments."""
        if self.setup is None:
            return self.step
        return partial(self.step, self.setup(context) if self.takes_context else self.setup())

    @property
    def takes_context(self) -> bool:
        """Whether the set-up has a parameter without a default."""
        if self.setup is None:
            return False
        try:
            parameters = inspect.signature(self.setup).parameters.values()
        except ValueError:  # some built-in functions have no signature
            return False
        by_position = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        return any(p.kind in by_position and p.default is p.empty for p in parameters)


class Function(Workload):
    """Times a function that `raybench.measure` sends from Python; no job can name it."""

    title = "function"
    takes_batch_size = False
    takes_precision = False

    # Set by `of` on a subclass, because a worker calls the class with context and parameters only.
    functions: ClassVar[StepFunctions | None] = None

    def __init__(
        self,
        context: Context,
        *,
        items_per_step: Annotated[
            PositiveFloat | None, Field(description="Items that a step finishes on one rank.")
        ] = None,
    ) -> None:
        if self.functions is None:
            raise UsageError(
                "workload function: is for raybench.measure(step, workers=N) in Python; a job "
                "names a class, as package.module:Class"
            )
        self.items_per_step = items_per_step
        # Replace the method, so that no additional call is timed.
        step: Any = self.functions.bind(context)
        self.step = step  # type: ignore[method-assign]

    @classmethod
    def of(cls, functions: StepFunctions) -> type[Self]:
        """Return a class that times these functions."""
        return type(cls.__name__, (cls,), {"functions": functions})

    @classmethod
    def of_pickled(cls, pickled: bytes) -> type[Self]:
        """Return a class that times pickled functions; they must come from this run."""
        functions = pickle.loads(pickled)
        assert isinstance(functions, StepFunctions)
        return cls.of(functions)

    def step(self) -> None:
        """Do one iteration; `__init__` replaces this."""
        raise AssertionError("replaced")
