"""Progress of a sweep as one line that is updated, in a notebook or on a terminal."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raybench.api.progress import ConsoleListener, PointProgress
from raybench.job.plan import Plan
from raybench.report.console import make_console, say
from raybench.report.formatting import plain
from raybench.sweep.listener import Listener
from raybench.sweep.loop import Event


def listener_here() -> Listener:
    """Return the listener for this process: for a notebook, a terminal or another stream.

    A notebook or a terminal shows one line that is updated, another stream a line for each point.
    Nothing goes to stdout.
    """
    if (display := _notebook_display()) is not None:
        return LineListener(NotebookLine(display))
    console = make_console()
    return LineListener(TerminalLine(console)) if console.is_terminal else ConsoleListener(console)


class UpdatedLine(Protocol):
    """A line of text that can be replaced, below lines that stay."""

    def keep(self, text: str) -> None:
        """Add a line that stays; any thread may call it."""

    def update(self, make_text: Callable[[], str]) -> None:
        """Replace the line; `make_text` may be called again to refresh the text."""

    def close(self) -> None:
        """Stop replacing the line."""

    def show_cursor(self) -> None:
        """Show a cursor that the line hides; any thread may call it."""


class LineListener:
    """Shows messages as lines that stay, and the progress of a sweep as one updated line."""

    def __init__(self, line: UpdatedLine) -> None:
        self._line = line

    def tell(self, line: str) -> None:
        """Show a line that stays; any thread may call it."""
        self._line.keep(line)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show what the user waits for, during the context."""
        self._line.update(lambda: what)
        try:
            yield
        finally:
            self._line.close()

    def progress(self, plan: Plan, trials: int) -> LineProgress:
        """Return a context whose `show` takes each event of a sweep."""
        return LineProgress(self._line, plan, trials)

    def show_cursor(self) -> None:
        """Show the cursor, which a line on a terminal hides."""
        self._line.show_cursor()


class LineProgress:
    """Updates a line with the counts of points, a running point and the time left."""

    def __init__(self, line: UpdatedLine, plan: Plan, trials: int) -> None:
        self._line = line
        # Counts the points, and prints nothing.
        self._points = PointProgress(plan, Console(quiet=True, force_interactive=False), trials)

    def __enter__(self) -> Self:
        self._line.update(self._points.line)
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def show(self, event: Event) -> None:
        """Count an event and update the line."""
        self._points.show(event)
        self._line.update(self._points.line)


class TerminalLine:
    """A line on a terminal; it disappears when it is closed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._make_text: Callable[[], str] = str

    def keep(self, text: str) -> None:
        """Print a line that stays."""
        say(self._console, text)

    def update(self, make_text: Callable[[], str]) -> None:
        """Replace the line, which is drawn twice a second with the text of the last `make_text`."""
        self._make_text = make_text
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._picture,
                refresh_per_second=2,
                transient=True,
                # Output that the caller prints meanwhile must stay on stdout.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def close(self) -> None:
        """Remove the line."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show_cursor(self) -> None:
        """Show the cursor."""
        self._console.show_cursor()

    def _picture(self) -> Text:
        return Text(plain(self._make_text()), no_wrap=True, overflow="ellipsis")


class NotebookLine:
    """Lines in the output of a notebook's cell; `update` replaces the last line.

    Args:
        display: shows texts by MIME type; if its flag is set, they replace the texts before.
    """

    def __init__(self, display: Callable[[dict[str, str], bool], None]) -> None:
        self._display = display
        self._is_shown = False
        self._kept: list[str] = []
        self._text = ""

    def keep(self, text: str) -> None:
        """Add a line that stays."""
        self._kept.append(plain(text))
        self._show()

    def update(self, make_text: Callable[[], str]) -> None:
        """Replace the line."""
        self._text = plain(make_text())
        self._show()

    def close(self) -> None:
        """Keep the line."""

    def show_cursor(self) -> None:
        """Do nothing: a cell has no cursor."""

    def _show(self) -> None:
        text = "\n".join([*self._kept, self._text])
        page = f'<pre style="white-space: pre-wrap">{html.escape(text)}</pre>'
        self._display({"text/plain": text, "text/html": page}, self._is_shown)
        self._is_shown = True


def _notebook_display() -> Callable[[dict[str, str], bool], None] | None:
    """Return a function that shows texts in the current cell; None outside of a notebook."""
    # A notebook has imported IPython already, so other programs need not import it.
    module: Any = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    if not hasattr(shell, "kernel"):
        return None
    handle: Any = module.display.DisplayHandle()

    def display(texts: dict[str, str], is_update: bool) -> None:
        (handle.update if is_update else handle.display)(texts, raw=True)

    return display
