"""List every message that a user can meet from the code: errors that are raised, and lines that are written.

    python -m tests.messages [FOLDER]

Values appear in braces, as in the code. Read the list once before a release.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tula_hpc"
# functions and methods whose text arguments a user reads
SPOKEN = frozenset(
    {"print", "write", "write_out", "_say", "say", "Verdict", "failed", "warning", "ok", "Note", "error"}
)
# variables to which a message is assigned before it is raised or written
CARRIERS = frozenset({"message", "words", "why", "remedy", "reason", "expected"})


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each message in a file."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts(node.exc, node.lineno)
        elif isinstance(node, ast.Call) and _name(node.func) in SPOKEN:
            yield from _texts(node, node.lineno)
        elif isinstance(node, ast.Yield | ast.Assign) and _carries(node) and node.value is not None:
            yield from _texts(node.value, node.lineno)


def _carries(node: ast.Yield | ast.Assign) -> bool:
    return isinstance(node, ast.Yield) or any(_name(target) in CARRIERS for target in node.targets)


def _texts(node: ast.expr, line: int) -> Iterator[tuple[int, str]]:
    values = [*node.args, *(keyword.value for keyword in node.keywords)] if isinstance(node, ast.Call) else [node]
    for value in values:
        text = _text(value)
        # a single word is a key, a name or a suffix, not a message
        if " " in text.strip():
            yield line, text.strip()


def _text(node: ast.expr) -> str:
    """Return a string or f-string with its values in braces; empty for any other expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return f"{{{ast.unparse(node.value)}}}" if isinstance(node, ast.FormattedValue) else ""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def main() -> int:
    """Print every message with its place; return 0."""
    folder = PACKAGE / sys.argv[1] if len(sys.argv) > 1 else PACKAGE
    for path in sorted({*PACKAGE.glob("*.py"), *(PACKAGE / "analysis").rglob("*.py"), *folder.rglob("*.py")}):
        if path.is_relative_to(folder):
            for line, text in dict.fromkeys(messages(path)):
                sys.stdout.write(f"{path.relative_to(PACKAGE)}:{line}: {' '.join(text.split())}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
