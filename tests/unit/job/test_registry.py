"""Loading workloads and reading their parameters."""

from __future__ import annotations

import inspect
import itertools
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from commands import refusal_of
from pydantic import AfterValidator, Field, PositiveInt

from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.model import answer_of_run
from raybench.job.point import SCRIPT
from raybench.job.settings import parameters_of_class, settings_of_class

if TYPE_CHECKING:
    from raybench.workloads.base import Context

_numbers = itertools.count()


class Declared:
    """Every kind of parameter that a job file can give."""

    def __init__(
        self,
        context: Context,
        *,
        width: Annotated[PositiveInt, Field(description="Width of it.")] = 8,
        rate: Annotated[float, Field(gt=0, description="How fast.")] = 1e-3,
        mode: Literal["a", "b"] = "a",
        limit: int | None = None,
        is_fast: bool = False,
        label: Annotated[str, AfterValidator(lambda one: sys.exit(one) if one[0] == "!" else one)],
        grad_accumulation: int = 1,
    ) -> None: ...

    def step(self) -> None: ...


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a user into the current directory and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(text: str) -> str:
        name = f"user_workload_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


@pytest.mark.parametrize("name", registry.BUILTIN)
def test_builtin_workloads_declare_parameters(name):
    workload_class = registry.load_workload(name)
    parameters = parameters_of_class(workload_class)
    trains = getattr(workload_class, "takes_batch_size", True) and name != SCRIPT
    assert ("grad_accumulation" in {parameter.name for parameter in parameters}) is trains
    assert ("batch_size" in settings_of_class(workload_class)) is (trains or name == SCRIPT)
    assert all(parameter.description for parameter in parameters)
    assert [parameter.name for parameter in parameters if parameter.is_required] == (
        ["path"] if name == SCRIPT else []
    )


def test_parameters_have_type_default_and_description():
    found = {parameter.name: parameter for parameter in parameters_of_class(Declared)}
    assert list(found) == list(inspect.signature(Declared).parameters)[1:]
    assert (found["width"].type, found["width"].default) == ("integer > 0", 8)
    assert found["width"].description == "Width of it."
    assert found["rate"].description == "How fast."
    assert found["mode"].type == "'a' | 'b'"
    assert found["limit"].type == "integer | none"
    assert (found["label"].is_required, found["limit"].is_required) == (True, False)
    assert found["label"].complaint("").startswith("cannot be checked: IndexError: string index")
    assert found["label"].complaint("!") == "cannot be checked: SystemExit: !"
    assert found["grad_accumulation"].type == "integer >= 1"
    either = settings_of_class(registry.load_workload("transformer"))["activation_checkpointing"]
    assert either.complaint("ful").startswith("must be 'none', 'selective' or 'full', given 'ful'")
    assert either.complaint(3) == "must be true or false, given 3"
    # So that ids agree.
    assert isinstance(found["rate"].accept(1), float)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mpl", "unknown workload 'mpl'; did you mean 'mlp'?"),
        ("yolo", "unknown workload 'yolo'; known: collective, "),
        ("no_such_module_x:Class", "ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("raybench.workloads.networks:Mpl", "unknown class 'Mpl'; did you mean 'Mlp'?"),
        ("networks.no_class:", "package.module:Class, given 'networks.no_class:'"),
        ("pathlib:Path", "pathlib:Path has no method step()"),
    ],
)
def test_invalid_workload_is_refused_with_reason(kind, message):
    assert message in refusal_of(UsageError, registry.load_workload, kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two"),
        ("class Mute(Exception):\n    def __str__(self): raise ValueError\nraise Mute", "Mute"),
        ("def (", "SyntaxError"),
        ("import raybench\nraybench.Answer(metric='m', over='n')", "over must be a tuple"),
    ],
)
def test_failing_import_is_one_line(module, text, message):
    assert message in refusal_of(UsageError, registry.load_workload, f"{module(text)}:Mine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("self", "must be declared as __init__(self, context, *, parameters...)"),
        ("self, context, width=3", "must be declared as"),
        ("self, context, *, width=3", "parameter width has no type"),
        ("self, context, *, width: 'Nothing' = 3", "has a type that cannot be read"),
        ("self, context, *, width: list = []", "must be an int, float, bool, str or Literal"),
        ("self, context, *, w: D = (D := __import__('decimal').Decimal)()", "becomes a Decimal"),
        ("self, context, *, width: int = 'x'", "default that is not allowed: must be an integer"),
        ("self, context, *, world_size: int = 1", "parameter world_size has a name that is"),
        ("self, context, **options", "**options must be declared as Unpack[...] of a TypedDict"),
        ("self, context, **options: int", "**options must be declared as Unpack[...]"),
    ],
)
def test_parameters_that_no_job_could_give_are_refused(module, arguments, message):
    name = module(f"class Mine:\n    def __init__({arguments}): ...\n    def step(self): ...\n")
    mine = registry.load_workload(f"{name}:Mine")
    assert message in refusal_of(UsageError, parameters_of_class, mine)


def test_output_of_imported_module_is_on_stderr(module, capfd):
    name = module("print('by print')\nclass Mine:\n    def step(self): ...\n")
    print("before")
    registry.load_workload(f"{name}:Mine")
    print("after")
    said = capfd.readouterr()
    assert said.out == "before\nafter\n"
    assert said.err == "by print\n"


@pytest.mark.parametrize("given", ["None", "('step_ms_p50', 3)", "raybench.Answer(metric='zeta')"])
def test_unrelated_class_attributes_are_ignored(module, given):
    body = f"answers = {given}; metrics = {{'a': 1}}; step = items = lambda self: 3"
    kind = module(f"import raybench\nclass Mine: {body}") + ":Mine"
    found = answer_of_run(f"workload: {{kind: '{kind}'}}", (), ["precision"])
    assert (found.metric, found.items) == ("zeta" if "zeta" in given else "speed_up", "samples")
