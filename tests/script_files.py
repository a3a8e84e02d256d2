"""Scripts for tests of how one is run: beside a `torch` that has the hooks of optimizers alone.

A process of Python with it starts in no time; tests/scripts has scripts of the real one.
"""

from pathlib import Path
from textwrap import dedent

_OPTIMIZER = """
import itertools

_hooks = {}
_numbers = itertools.count()


def register_optimizer_step_post_hook(hook):
    _hooks[next(_numbers)] = hook


class Optimizer:
    param_groups = ({"params": []},)

    def step(self):
        for hook in [*_hooks.values()]:
            hook(self, (), {})


class SGD(Optimizer): ...


class Adam(Optimizer): ...
"""
_PREAMBLE = """
import os, sys, time
from torch.optim.optimizer import SGD, Adam

rank = int(os.environ["RANK"])
optimizer = SGD()


def steps(count):
    for _ in range(count):
        time.sleep(0.0005)
        optimizer.step()
"""


def write_script(folder: Path, text: str) -> Path:
    """Write a script of this text, which has `rank`, an `optimizer` and `steps(count)`."""
    package = folder / "torch" / "optim"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "torch" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(_OPTIMIZER, encoding="utf-8")
    script = folder / "train.py"
    script.write_text(_PREAMBLE + dedent(text), encoding="utf-8")
    return script
