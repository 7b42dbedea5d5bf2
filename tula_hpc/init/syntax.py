"""Facts of a program's syntax tree: names, literal values, imports, what it computes itself."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

# name of a file, perhaps with *; not below a folder whose first part is computed
_FILE = re.compile(r"[\w./-][\w./*-]*\.[a-z]+")


def keys_of(node: ast.AST) -> list[str]:
    """Return the names of `a.b.c`; an empty list for any other expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := keys_of(node.value)):
        return [*before, node.attr]
    return []


def nodes_in(tree: ast.AST, kind: type[T]) -> list[T]:
    """Return all nodes of a kind in a syntax tree."""
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def imported_by(tree: ast.Module) -> set[str]:
    """Return the names of modules, and of things in them, that a program imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def computed_in(tree: ast.Module) -> set[str]:
    """Return the attributes that a program sets without using what they were before."""
    attributes: set[str] = set()
    for node in nodes_in(tree, ast.Assign):
        used = {each.attr for each in nodes_in(node.value, ast.Attribute)}
        attributes |= {each.attr for each in node.targets if isinstance(each, ast.Attribute)} - used
    return attributes


def compared_in(tree: ast.Module, names: Collection[str]) -> set[str]:
    """Return the texts with which a program compares a variable or attribute of these names."""
    texts: set[str] = set()
    for name, values in _comparisons(tree):
        if name in names:
            texts |= {value for value in values if isinstance(value, str) and value}
    return texts


def compared_with(tree: ast.Module, text: str) -> set[str]:
    """Return the names of variables and attributes that a program compares with a text."""
    return {name for name, values in _comparisons(tree) if text in values}


def _comparisons(tree: ast.Module) -> Iterator[tuple[str, list[Any]]]:
    """Yield what stands on the left of each comparison by its last name, and the other values."""
    for node in nodes_in(tree, ast.Compare):
        yield last_name(node.left), [value_of(other, {}) for other in node.comparators]


def saved_in(tree: ast.Module) -> list[str]:
    """Return the names of files that a program passes to a `save` function.

    Without a plain name they are patterns, with "*" for each value that is formatted into a name.
    """
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and last_name(node.func) == "save":
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            found += filter(_FILE.fullmatch, map(_pattern_of, given))
    return [name for name in found if "*" not in name] or found


def _pattern_of(node: ast.expr) -> str:
    found = ""
    if isinstance(node, ast.JoinedStr):
        found = "".join(map(_pattern_of, node.values))
    elif isinstance(node, ast.FormattedValue):
        found = "*"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        found = re.sub(r"%(?:\(\w+\))?[-+ #0]*\d*(?:\.\d+)?[a-z]", "*", _pattern_of(node.left))
    elif isinstance(node, ast.Call):
        found = _pattern_of(node.func)
    elif isinstance(node, ast.Attribute) and node.attr == "format":
        found = re.sub(r"\{[^}]*\}", "*", _pattern_of(node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = node.value
    return found


def constants_of(tree: ast.Module) -> dict[str, Any]:
    """Return the values of a program's constants: names set to a literal outside any function."""
    constants: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants |= {
                each.id: node.value.value for each in node.targets if isinstance(each, ast.Name)
            }
    return constants


def value_of(node: ast.expr | None, constants: dict[str, Any]) -> Any:
    """Return the value of a literal, a constant's name or a product; None for anything else."""
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = [value_of(side, constants) for side in (node.left, node.right)]
        is_product = all(isinstance(factor, int | float) for factor in factors)
        return math.prod(factors) if is_product else None
    try:
        return None if node is None else ast.literal_eval(node)
    # TypeError: a list as a key, which the script itself would not survive
    except (ValueError, TypeError):
        return None


def last_name(node: ast.AST | None) -> str:
    """Return the last name of `a.b.c` or of a call of it; "" for any other expression."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def given_in(tree: ast.Module, keyword: str) -> list[Any]:
    """Return the literal values that calls in a program give to a keyword."""
    values = []
    for call in nodes_in(tree, ast.Call):
        given = keywords_of(call)
        if keyword in given:
            values.append(value_of(given[keyword], {}))
    return values


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return what a call gives to its keywords."""
    return {each.arg: each.value for each in call.keywords if each.arg}


def holder_of(function: ast.expr) -> str:
    """Return the variable whose method this is; "" if it is not a method of a variable."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id
    return ""


def divided_by(workers: re.Pattern[str], tree: ast.Module) -> set[str]:
    """Return the names of what the script divides by its number of workers."""
    quotients: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.FloorDiv | ast.Div):
            quotients.append((node.target, node.value))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Div):
            quotients.append((node.left, node.right))
    return {last_name(of) for of, by in quotients if workers.search(ast.unparse(by))}
