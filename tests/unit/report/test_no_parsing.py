"""Reports, analyses, health checks and commands decide by data and never look into a sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "raybench"
ROOMS = ("report", "analysis", "health", "cli")
LOOKS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition"}

# Where a text is looked into, and what text: markup, input of the user, names of columns, ids.
# A sentence of raybench is not among them.
ALLOWED = {
    ("report/charts/grammar.py", "_COLOR_RULE"): "style sheet",
    ("report/charts/grammar.py", "_USED_VARIABLE"): "SVG",
    ("report/charts/grammar.py", "_UNNEEDED_SVG"): "SVG",
    ("report/documents.py", "_SPECIAL"): "Markdown",
    ("report/documents.py", "_BACKTICKS"): "Markdown",
    ("report/documents.py", "_UNIT"): "number and unit in a sentence that is laid out",
    ("report/documents.py", "metric_column"): "full stop where a sentence is laid out",
    ("report/documents.py", "_heading_lines"): "line breaks of a heading",
    ("report/export.py", "_NUMBER"): "cell of CSV",
    ("report/export.py", "_csv_cell"): "cell of CSV",
    ("report/formatting.py", "_BREAKS"): "line breaks",
    ("report/formatting.py", "metric"): "collective in front of NCCL's choice",
    ("report/formatting.py", "rate"): "heading of a metric",
    ("report/formatting.py", "setting"): "name of a setting",
    ("report/formatting.py", "heading"): "name of a setting",
    ("report/formatting.py", "ranks_words"): "plural of a noun",
    ("report/formatting.py", "sentence"): "capital and full stop where a sentence is laid out",
    ("report/formatting.py", "run_title"): "run id",
    ("report/messages.py", "shortened"): "full stop where a sentence is laid out",
    ("report/page.py", "_QUOTED"): "markup of code in a sentence that is laid out",
    ("report/page.py", "_FOLD_AFTER"): "name of a setting",
    ("report/page.py", "_PERCENT"): "number and unit in a sentence that is laid out",
    ("report/page.py", "value_text"): "name of a setting",
    ("report/page.py", "cell"): "name of a setting",
    ("report/show.py", "_fact_lines"): "name of a column",
    ("report/words/answer.py", "_OPTION"): "word of a command",
    ("analysis/run_data.py", "has_other_world_sizes"): "name of a setting",
    ("report/words/failures.py", "_ESTIMATE"): "message of an exception",
    ("report/words/failures.py", "_OUT_OF_MEMORY"): "message of an exception",
    ("report/words/failures.py", "_reason"): "message of an exception",
    ("report/words/health.py", "meaning_of_tests"): "name of a test",
    ("report/words/quick.py", "short_name"): "name of a device",
    ("report/words/references.py", "standing_text"): "name of a device",
    ("analysis/answer.py", "_next_command"): "word of a command",
    ("analysis/compare.py", "_short_commit"): "git commit",
    ("analysis/references.py", "_make_entry"): "ids of devices",
    ("analysis/references.py", "_count_hosts"): "host and index of a device",
    ("analysis/references.py", "_uuids"): "ids of devices",
    ("analysis/references.py", "find"): "fabric of a reference file",
    ("analysis/references.py", "shipped"): "name of a device",
    ("analysis/references.py", "quote"): "YAML",
    ("analysis/references.py", "largest_of_tests"): "name of a test in a reference file",
    ("analysis/rounds.py", "_combine"): "name of a column",
    ("health/readings.py", "_with_conditions"): "NCCL's transport",
    ("analysis/rows.py", "_SIZE_WITH_UNIT"): "value of a setting",
    ("health/collection.py", "_short"): "domain of a host",
    ("health/node_files.py", "_HOST"): "name of a host",
}


def looks(node: ast.AST, owner: str = "") -> Iterator[str]:
    """Yield the function, class or constant of each look into a text."""
    for child in ast.iter_child_nodes(node):
        name = owner
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = child.name
        elif isinstance(child, ast.Assign) and not owner and isinstance(child.targets[0], ast.Name):
            name = child.targets[0].id
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            of = child.func.value
            if child.func.attr in LOOKS or (isinstance(of, ast.Name) and of.id == "re"):
                yield name
        elif isinstance(child, ast.Compare) and isinstance(child.ops[0], ast.In | ast.NotIn):
            text = child.left.value if isinstance(child.left, ast.Constant) else None
            if isinstance(text, str) and not text.isidentifier() and "-" not in text:
                yield name
        yield from looks(child, name)


def test_no_room_looks_into_a_sentence():
    found = set()
    for room in ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            module = path.relative_to(PACKAGE).as_posix()
            found |= {(module, name) for name in looks(ast.parse(path.read_text()))}
    # Commands read what the user types.
    of_reports = {place for place in found if not place[0].startswith("cli/")}
    assert of_reports == set(ALLOWED)


def test_commands_look_for_no_words():
    for path in (PACKAGE / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                words = [one.value for one in node.args if isinstance(one, ast.Constant)]
                is_look = node.func.attr in LOOKS
                assert not (is_look and any(" " in word.strip() for word in words)), words
