"""One line of progress that is updated: in a notebook, and on a terminal."""

import io
import sys
from types import SimpleNamespace

import pytest
from builders import make_device, make_failed, make_point, make_record
from rich.console import Console

from raybench.api.progress import ConsoleListener
from raybench.api.progress_line import LineListener, NotebookLine, TerminalLine, listener_here
from raybench.job.plan import Plan
from raybench.sweep.loop import PointFinished, PointStarted

PLAN = Plan(points=tuple(make_point(batch_size=2**power) for power in range(3)), warnings=())


def swept(listener):
    """Show a sweep of three points, of which one fails."""
    listener.tell("a cluster")
    with listener.waiting("starting 1 worker"):
        pass
    with listener.progress(PLAN, 3) as progress:
        for index, point in enumerate(PLAN.points):
            progress.show(
                PointStarted(index=index, point=point, devices=(make_device(),), heat_s=0.0)
            )
            make = make_failed if index == 1 else make_record
            progress.show(PointFinished(index=index, record=make(point)))
    listener.tell("<the> end")


def test_a_notebook_shows_messages_and_one_line():
    shown = []
    swept(LineListener(NotebookLine(lambda texts, is_update: shown.append((texts, is_update)))))
    assert [is_update for _, is_update in shown] == [False] + [True] * (len(shown) - 1)
    texts = [texts["text/plain"] for texts, _ in shown]
    assert texts[:3] == ["a cluster\n", "a cluster\nstarting 1 worker", "a cluster\n0 of 3 points"]
    assert texts[3] == "a cluster\n0 of 3 points; batch 1 runs"
    assert texts[-1] == "a cluster\n<the> end\n3 of 3 points"
    assert "&lt;the&gt; end" in shown[-1][0]["text/html"]


def test_a_terminal_shows_a_line_that_disappears():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, _environ={"TERM": "xterm"})
    swept(LineListener(TerminalLine(console)))
    written = file.getvalue()
    assert "3 of 3 points" in written
    # The last thing is the erased line, then the message.
    assert written.endswith("\x1b[2K<the> end\n")


def test_streams_without_terminal_get_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    listener = listener_here()
    assert isinstance(listener, ConsoleListener)
    swept(listener)
    lines = sys.stderr.getvalue().splitlines()
    assert [line[:5] for line in lines if line.startswith("[")] == ["[1/3]", "[2/3]", "[3/3]"]
    assert capsys.readouterr().out == ""


class Handle:
    """As `IPython.display.DisplayHandle`: notes its calls."""

    calls: list[str] = []

    def display(self, texts, raw):
        self.calls.append("display")

    def update(self, texts, raw):
        self.calls.append("update")


@pytest.mark.parametrize(
    ("shell", "kind"),
    [
        (SimpleNamespace(kernel=1), LineListener),
        (SimpleNamespace(), ConsoleListener),
        (None, ConsoleListener),
    ],
)
def test_only_a_kernel_is_a_notebook(monkeypatch, shell, kind):
    module = SimpleNamespace(
        get_ipython=lambda: shell, display=SimpleNamespace(DisplayHandle=Handle)
    )
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(Handle, "calls", [])
    listener = listener_here()
    assert isinstance(listener, kind)
    swept(listener)
    assert Handle.calls[:2] == ([] if kind is ConsoleListener else ["display", "update"])
