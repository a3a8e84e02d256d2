"""The report of a collection of nodes: the answer, and each node that does not simply pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raybench.health.collection import NodeCollection, SilenceKind, SilentNode
from raybench.records.node_report import NodeState
from raybench.report.documents import (
    SETTING_CHARS,
    Block,
    Document,
    Line,
    ShownColumn,
    Table,
    Tone,
)
from raybench.report.formatting import counted, some
from raybench.report.words import nodes as words

# The table shows this number of nodes of each list.
_MOST_ROWS = 20
_TONES: Mapping[int, Tone] = {0: "good", 1: "alarm", 3: "advice"}
_Row = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionReport(Document):
    """What the nodes of a folder reported: a document (see `raybench.report.documents`)."""

    folder: Path
    collection: NodeCollection

    def blocks(self) -> Iterator[Block]:
        """Yield the answer, the nodes that fail, are silent, untested or suspect, and the files."""
        lists = self.collection.lists
        suspect = self.collection.hosts(NodeState.SUSPECT)
        tone = _TONES[self.collection.exit_code]
        yield Line(text=words.collected(lists, suspect), tone=tone)
        rows: list[_Row] = []
        for of_list in self._rows():
            rows += of_list[:_MOST_ROWS]
            if len(of_list) > _MOST_ROWS:
                _, result, _ = of_list[0]
                rows.append((f"and {len(of_list) - _MOST_ROWS} more", result, ""))
        if rows:
            columns = (
                ShownColumn(title="node", is_text=True, min_chars=SETTING_CHARS),
                ShownColumn(title="result", is_text=True),
                ShownColumn(title="why", is_text=True, min_chars=SETTING_CHARS),
            )
            yield Table(columns=columns, rows=tuple(rows))
        files = ", ".join(f"{name}.txt ({len(hosts)})" for name, hosts in lists.items())
        yield Line(text=f"Written to {self.folder}: {files}", is_apart=True)
        if others := self.collection.others:
            reports = counted(len(others), "report")
            yield Line(text=f"{reports} of other nodes not counted: {some(others)}", tone="aside")

    def _rows(self) -> Iterator[list[_Row]]:
        """Yield the rows of each list, the most urgent list first."""
        collection = self.collection
        for result, state in (
            ("failing", NodeState.DRAIN),
            ("silent", None),
            ("untested", NodeState.UNTESTED),
            ("suspect", NodeState.SUSPECT),
        ):
            if state is None:
                yield [(node.host, result, _silence(node)) for node in collection.silent]
            else:
                yield [
                    (host, result, words.why(collection.reports[host]))
                    for host in collection.hosts(state)
                ]

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object: the lists, and why a node is in its list."""
        collection = self.collection
        return {
            "exit_code": collection.exit_code,
            **collection.lists,
            "suspect": collection.hosts(NodeState.SUSPECT),
            "why": {host: why for rows in self._rows() for host, _, why in rows},
            "others": collection.others,
            "unreadable": {str(one.path): one.reason for one in collection.unreadable},
        }


def _silence(node: SilentNode) -> str:
    """Return why a node is silent."""
    text = node.kind.value
    if node.kind is SilenceKind.OLD:
        return f"{text}: its check ended {words.age(node.age_s)} ago"
    if node.kind is SilenceKind.AHEAD:
        return f"{text}: the clock of the node is {words.age(node.age_s)} ahead"
    return text
