"""Validate tables of input files: base class, one line per mistake, hidden values.

The keys of a file are checked in this order:

1. `loading.py` reads the TOML and enters `--set` into its tables (`load_together`, `load_sweep`,
   `load_cluster`).
2. `_parse` there passes them to the type of the file, a subclass of `Spec` (below): `SweepSpec` in
   `sweep.py` with the tables of `workload.py`, `search.py`, `training.py` and `study.py`;
   `ClusterSpec` in `cluster.py`, with `gpus.py`. Each field has its type and bounds. Validators in
   these types, and functions that they call, check how keys of one table or one file fit
   together: they raise a ValueError whose message begins with the key. Unknown keys are refused.
3. `explain` (below) makes one line of each mistake: file, key, expected value, likely intention.
4. In `sweep.py`, `check_columns` checks each column of a study, and `check_together` checks the
   sweep against the cluster. `changes.py` checks a resumed run against what it has measured.

Data and models are tried later, see `stages/rehearsal.py`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from tula_hpc.errors import InputError
from tula_hpc.own_sources import can_be_given, find_module, find_source, module_files

GIB = 1024**3
MOST_GIB = 1e9
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
WORD_PATTERN = r"^[A-Za-z0-9_.,:/@+=%*&|()\[\]-]{1,200}$"
PARTITION_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9_.,:@+=-]{0,63}$"
LINE_PATTERN = r"^[\t\P{Cc}--\x{2028}\x{2029}]*$"
OPTION_PATTERN = r"^[a-z][a-z0-9_-]{0,63}$"
MOUNT_PATTERN = r"^/[^,:\x00-\x1f]*(:/[^,:\x00-\x1f]*(:r[ow])?)?$"
VARIABLE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]{0,99}$"
MODULE_PATTERN = r"^[^\W\d]\w*(\.[^\W\d]\w*)*$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
# a word for #SBATCH lines: ASCII, no blanks and no line ends
SlurmWord = Annotated[str, Field(pattern=WORD_PATTERN)]
# a partition's name, which is also part of file names
PartitionName = Annotated[str, Field(pattern=PARTITION_PATTERN)]
# one line: no control characters except the tab, and none of Unicode's line ends
Line = Annotated[str, Field(pattern=LINE_PATTERN, max_length=1000)]
# long name of an sbatch option; `cluster.py` refuses the options that this program sets itself
SbatchOption = Annotated[str, Field(pattern=OPTION_PATTERN)]
# PATH, PATH:PATH-INSIDE, or the latter with :ro or :rw; paths may hold neither comma nor colon, as
# container runtimes separate mounts by these
Mount = Annotated[str, Field(pattern=MOUNT_PATTERN, max_length=1000)]
VariableName = Annotated[str, Field(pattern=VARIABLE_PATTERN)]


class Spec(BaseModel):
    """Base of all input tables: immutable, no unknown keys, no numbers from strings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    # keys that other tools use, each with the end of the message that names the key to use here
    foreign_keys: ClassVar[Mapping[str, str]] = {}


class Needs(NamedTuple):
    """Mark of a key that counts only if another key of its table has one of `values`.

    Without `values`, any value of the other key will do, except an empty one.
    """

    key: str
    values: tuple[object, ...] = ()

    def reason(self, table: Spec) -> str:
        """Return why the marked key changes nothing in this table; empty if it counts."""
        value = getattr(table, self.key)
        if value in self.values or (value and not self.values):
            return ""
        if not self.values:
            return f"{self.key} is not given; give it, or remove this"
        remedy = "remove it"
        if len(self.values) == 1:
            remedy = f"set {self.key} = {shown(self.values[0])}, or remove it"
        return f"{self.key} = {shown(value)} does not use it; {remedy}"


def given_keys(table: Spec) -> Iterator[tuple[str, str]]:
    """Yield each key that has not its default, with why it changes nothing ("" if it counts)."""
    for key, field in type(table).model_fields.items():
        if getattr(table, key) != field.default:
            reasons = (mark.reason(table) for mark in field.metadata if isinstance(mark, Needs))
            yield key, next(filter(None, reasons), "")


def leaves(
    values: Mapping[str, Any], prefix: str = "", whole: Collection[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with dotted keys; keys in `whole` are not split."""
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in whole:
            yield from leaves(value, f"{prefix}{key}.", whole)
        else:
            yield f"{prefix}{key}", value


# keys and tables whose values may hold passwords
HIDDEN = ("environment", "on_event", "setup")
# key of a list of tables, each with a name
PARTITIONS = "partitions"
VALUE = "a value that is not shown"


def is_hidden(key: Sequence[str]) -> bool:
    """Tell whether the value of a key, given in parts, is never shown.

    The parts of a partition's key are "partitions", the partition's name, and the key.
    """
    # a partition's name may hold dots and thus be several parts
    own = key[2:] if key and key[0] == PARTITIONS else key[:1]
    return not set(HIDDEN).isdisjoint(own)


def hide(value: Any) -> Any:
    """Return tables without hidden values; names of variables and numbers of lines stay."""
    if isinstance(value, list):
        return list(map(hide, value))
    if not isinstance(value, dict):
        return value
    return {key: _names_of(inner) if key in HIDDEN else hide(inner) for key, inner in value.items()}


def _names_of(value: Any) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value, "not shown")
    if isinstance(value, list):
        return [f"not shown, line {number}" for number in range(1, len(value) + 1)]
    return "not shown"


def exposure_warning(overrides: Sequence[str]) -> str:
    """Return a warning about hidden values given by `--set` on the command line; "" without any."""
    exposed = []
    for text in overrides:
        key = text.partition("=")[0].strip()
        if is_hidden(key.removeprefix("cluster.").split(".")):
            exposed.append(key if key.isprintable() else ascii(key))
    if not exposed:
        return ""
    return (
        f"--set: {', '.join(exposed)}: a command line is visible to everybody on this machine; "
        "put secrets into the cluster file"
    )


# message for each of pydantic's error types, in terms of TOML
_EXPECTED = {
    "extra_forbidden": "unknown key",
    "model_type": "expected a table",
    "dict_type": "expected a table",
    "tuple_type": "expected a list in brackets",
    "string_type": "expected text in quotes",
    "int_type": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_type": "expected a number",
    "finite_number": "expected a finite number",
    "bool_type": "expected true or false",
    "literal_error": "expected {expected}",
    "greater_than": "expected more than {gt:g}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
    "too_short": "expected at least {min_length} value",
    "too_long": "expected at most {max_length} values",
    "string_too_short": "expected text that is not empty",
    "string_too_long": "expected at most {max_length} characters",
}
_PATTERNS = {
    NAME_PATTERN: "expected at most 64 letters, digits, '.', '_' and '-', a letter or digit first",
    WORD_PATTERN: "expected 1 to 200 letters, digits and characters of _.,:/@+=%*&|()[]-, no blanks",
    PARTITION_PATTERN: (
        "expected at most 64 letters, digits and characters of _.,:@+=-, a letter, digit or _ first"
    ),
    LINE_PATTERN: "expected one line without control characters",
    OPTION_PATTERN: (
        "expected an option's long name: lower-case letters, digits, '-' and '_', a letter first"
    ),
    MOUNT_PATTERN: "expected full paths, as in /data, /data:/inside or /data:/inside:ro",
    VARIABLE_PATTERN: "expected the name of a variable: letters, digits and '_', no digit first",
    MODULE_PATTERN: "expected the name of a module, for example package.train",
}
SHORT_LIST = 20
# names that pydantic appends to the location of a mistake in `sbatch`, whose values are a union
_UNION_MEMBERS = ("constrained-str", "constrained-int", "int", "bool")


def explain(kind: type[Spec], path: Path | str, item: Mapping[str, Any]) -> str:
    """Return one line for a pydantic error, "file: key: mistake"."""
    location = list(map(str, item["loc"]))
    if location[:1] == ["sbatch"] and location[-1] in _UNION_MEMBERS:
        message = f"expected a word, a whole number, true or false, got {shown(item['input'])}"
        return line_of(path, location[:-1], message)
    if item["type"] == "extra_forbidden":
        return line_of(path, location, f"unknown key{valid_keys(kind, location)}")
    if item["type"] == "missing":
        return line_of(path, location, "is required; add it")
    if item["type"] == "value_error":
        return line_of(path, *_own_message(location, message_of(item)))
    is_key = location[-1] == "[key]"
    # pydantic's input is the key itself if the mistake is in a key
    got = VALUE
    if is_key or not is_hidden(location):
        got = shown(item["input"])
    if "pattern" in item["type"]:
        table = location[:-2] if is_key else location
        return line_of(path, table, f"{_PATTERNS[item['ctx']['pattern']]}, got {got}")
    meant = _tables_meant(kind, location, item["input"])
    return line_of(path, location, f"{message_of(item)}{meant}, got {got}")


def _own_message(location: list[str], message: str) -> tuple[list[str], str]:
    """Move the key with which a model validator begins its message to the end of the location."""
    field, colon, rest = message.partition(": ")
    if not colon or not field.isidentifier():
        return location, message
    return [*location, field], rest


def _tables_meant(kind: type[Spec], location: Sequence[str], value: object) -> str:
    if location == [PARTITIONS] and isinstance(value, dict):
        return f" of tables, each written [[{PARTITIONS}]]"
    # [[tables]] under a key that takes no tables: the key is probably misspelt
    if len(location) > 1 or not isinstance(value, list):
        return ""
    if not any(isinstance(table, dict) for table in value):
        return ""
    return nearest(location[0], kind.model_fields.keys() - {location[0]}, "[[{}]]")


def message_of(item: Mapping[str, Any]) -> str:
    """Return the message of a pydantic error: that of `_EXPECTED`, else the validator's own."""
    form = _EXPECTED.get(item["type"])
    if form is None:
        return str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "tuple_type" and str(item["input"]).startswith("["):
        # the shell has taken the quotes of --set KEY=["a"]
        form += """ with its texts in quotes, '["a", "b"]' in a shell"""
    return form.format(**item.get("ctx", {}))


def line_of(path: Path | str, location: Sequence[str], message: str) -> str:
    """Return one line for a mistake, "file: key: message"."""
    key = ".".join(map(printable_part, location))
    return str(InputError(message, source=path, key=key))


def printable_part(part: str) -> str:
    """Return text from an input file in a form that fits into a line of a message."""
    if not part or not part.isprintable():
        part = ascii(part)
    if len(part) > 100:
        return f"{part[:97]}..."
    return part


def shown(value: object, most: int = 80) -> str:
    """Return a value as TOML writes it, cut to `most` characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    if not text.isprintable():
        text = json.dumps(value, default=str)
    if len(text) > most:
        return f"{text[: most - 3]}..."
    return text


def valid_keys(kind: type[Spec], location: Sequence[str]) -> str:
    """Return the end of a message on an unknown key: the likely key, or all keys of its table."""
    if (meant := kind.foreign_keys.get(location[-1])) is not None:
        return meant
    return _own_keys(kind, location)


def _own_keys(kind: type[BaseModel], location: Sequence[str]) -> str:
    in_sections = []
    for name, field in kind.model_fields.items():
        if any(location[-1] in table.model_fields for table in _tables_of(field)):
            in_sections.append(f"{name}.{location[-1]}")
    for part in location[:-1]:
        # an index in a list of tables
        if not part.isdigit() and (tables := _tables_of(kind.model_fields[part])):
            kind = tables[-1]
    valid = list(kind.model_fields)
    # a misspelt key of this table, such as seed for seeds, is likelier than a key of another table
    is_slip = difflib.get_close_matches(location[-1], valid, n=1, cutoff=0.8)
    if in_sections and not is_slip:
        return f" (did you mean {' or '.join(in_sections)}?)"
    return nearest(location[-1], valid) or f"; valid keys: {', '.join(valid)}"


def _tables_of(field: FieldInfo) -> list[type[BaseModel]]:
    """Return the types of the tables that a field holds."""
    kinds = (field.annotation, *get_args(field.annotation))
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


def nearest(word: str, valid: Iterable[str], form: str = "{!r}") -> str:
    """Return " (did you mean …?)" with the nearest valid word in this form; "" if none is near."""
    valid = list(valid)
    # swapped letters are the likeliest slip; initials find lr for learning_rate
    initials = "".join(part[:1] for part in word.split("_"))
    close = [other for other in valid if sorted(other) == sorted(word) or other == initials]
    if not close and len(word) <= 100:
        close = difflib.get_close_matches(word, valid, n=1)
    if not close:
        return ""
    return f" (did you mean {form.format(close[0])}?)"


def known_or_entry_point(
    value: str,
    known: Iterable[str],
    what: str,
    called_with: Sequence[str],
    context: Mapping[str, Any] | None,
) -> str:
    """Return the value if it is one of the known names or a user's "package.module:function".

    Messages call it `what`. The function is looked up unless `check_paths` of the validation's
    context is False, and has to take the arguments `called_with`.

    Raises:
        ValueError: It is neither, or the function does not exist or takes other arguments.
    """
    if ":" in value:
        if (context or {}).get("check_paths", True):
            _check_entry_point(value, called_with, (context or {}).get("sweep_folder"))
        return value
    if value not in known:
        module, _, function = value.rpartition(".")
        if module and _defines(module, function):
            raise ValueError(f"{value!r} is not {what} (did you mean '{module}:{function}'?)")
        meant = nearest(value, known)
        # a suggestion says more than a long list
        listed = known and not (meant and len(list(known)) > SHORT_LIST)
        names = f" or one of: {', '.join(known)}" if listed else ""
        raise ValueError(
            f'{value!r} is not {what}{meant}; expected "package.module:function"{names}'
        )
    return value


def _check_entry_point(value: str, called_with: Sequence[str], sweep_folder: Path | None) -> None:
    """Refuse a function that its module's source does not define, or that takes other arguments."""
    module, _, function = value.partition(":")
    if not _are_identifiers(module, function):
        raise ValueError(f'{value!r}: expected "package.module:function"')
    source = find_source(module)
    if source is None and module.endswith(".py") and find_module(module.removesuffix(".py")):
        meant = f"{module.removesuffix('.py')}:{function}"
        raise ValueError(f"{value!r}: a module's name has no .py; did you mean {meant!r}?")
    if source is None:
        raise ValueError(f"no module {module!r} {where_looked(module, sweep_folder)}")
    if function not in source.names and "*" not in source.names:
        meant = nearest(function, source.names) + _hidden(module, source.path)
        raise ValueError(f"{value!r}: {source.path} defines no {function!r}{meant}")
    if function in source.takes and not can_be_given(source.takes[function], len(called_with)):
        raise ValueError(
            f"{value!r}: {source.path} defines it so that it cannot be called with "
            f"({', '.join(called_with)})"
        )


def where_looked(module: str, sweep_folder: Path | None) -> str:
    """Say where a module was looked for in vain, and what to do.

    It is looked for only where jobs find it: they start in the command's working directory.
    """
    looked = f"in the working directory, {shown(str(Path.cwd()), 400)}, or the installed packages"
    if sweep_folder is not None and module_files(sweep_folder, module):
        folder = shown(str(sweep_folder.resolve()), 400)
        return f"{looked}; it lies beside the sweep file: start the command in {folder}"
    return f"{looked}; install it, or start the command in its folder"


def _defines(module: str, function: str) -> bool:
    if not _are_identifiers(module, function):
        return False
    try:
        source = find_source(module)
    except ValueError:
        # the module is not valid Python
        return False
    return source is not None and function in source.names


def _are_identifiers(module: str, function: str) -> bool:
    return all(part.isidentifier() for part in [*module.split("."), function])


def _hidden(module: str, found: Path) -> str:
    # jobs import the installed module, not a module of the same name in the working directory
    own = [path for path in module_files(Path.cwd(), module) if not path.samefile(found)]
    return f"; it hides {own[0]}, which needs another name" if own else ""
