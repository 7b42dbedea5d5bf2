"""Text of a sweep file for a training script; a comment on every value says where it comes from."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tula_hpc.config import ClusterSpec
from tula_hpc.formatting import plural
from tula_hpc.init.cluster_file import UNKNOWN, KeyLine, usable_cores
from tula_hpc.init.declared_options import Option
from tula_hpc.init.script_options import ScriptOptions, flags_of

# batch that is assumed if the script has no default
USUAL_BATCH = 32
# largest candidate over smallest candidate batch; more if there are more workers than this
BATCH_RANGE = 16
MOST_SIZES = 4
# many, because with small data a few epochs end before anything is measured
TRIAL_EPOCHS = 100
# for a script that counts steps and has no default number of them
TRIAL_STEPS = 1000
LARGEST_BATCH = 2**30
LARGEST_SEED = 2**31
METRIC = KeyLine(
    "metric",
    r"Acc@1 (?P<test_accuracy>[\d.]+)",
    f"how the script prints its score: {UNKNOWN}",
    asked=True,
)


class Script(NamedTuple):
    """A training script, its options, and the path of its sweep file."""

    path: Path
    options: ScriptOptions
    target: Path

    @property
    def batch(self) -> int:
        """The script's default batch."""
        return _number(self.options.batch, 2**20) or USUAL_BATCH

    @property
    def module(self) -> str | None:
        """Name for `python -m`, if the script imports from its own package; else None."""
        if not self.options.is_in_package:
            return None
        top = self.path.parent
        while (top / "__init__.py").exists():
            top = top.parent
        if top == self.path.parent:
            # a package without __init__.py
            top = Path.cwd()
        if not self.path.is_relative_to(top):
            return None
        return ".".join(self.path.relative_to(top).with_suffix("").parts)

    def trial(self) -> list[str]:
        """Return arguments with which the script runs long enough to be measured."""
        options = self.options
        values = [
            (options.batch, str(self.batch)),
            (options.epochs, str(TRIAL_EPOCHS)),
            (options.devices, "1"),
            (options.accumulation if options.shares_passes else None, "1"),
            *((each, each.example) for each in options.required),
        ]
        if options.epochs is None and _number(options.steps, 2**62) is None:
            values.append((options.steps, str(TRIAL_STEPS)))
        return options.words(values)


def sweep_file(script: Script, cluster: ClusterSpec) -> str:
    """Return the text of a sweep file, valid once the lines that end with `unknown` are filled in."""
    lines = [
        f"# Sweep of {script.path.name}, as its source describes it; the script was not run.",
        f"# Lines that begin with # and end with {UNKNOWN!r} hold what the source does not say. If",
        "# samples, epochs or arguments are among them, fill them in before the sweep.",
        "",
        name_line(script.path.stem),
        "",
        "[workload]",
        *(line.text() for line in _workload(script, cluster)),
        "",
        *search_and_training(
            cluster,
            _base_batch(script, cluster),
            _passes(script.options),
            is_known=_number(script.options.batch, LARGEST_BATCH) is not None,
        ),
        "",
    ]
    return "\n".join(lines)


def name_line(stem: str) -> str:
    """Return the line with a sweep's name, made from a script's name."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:64].lstrip("._-")
    return KeyLine("name", name or "training", "name of the run and its jobs").text()


def _workload(script: Script, cluster: ClusterSpec) -> Iterator[KeyLine]:
    options = script.options
    if script.module is not None:
        yield KeyLine("module", script.module, "run as a module, as it imports from its package")
    else:
        yield KeyLine("script", _path_of(script), "in the working directory, or beside this file")
    yield from _arguments(options, cluster)
    yield KeyLine(
        "samples",
        50_000,
        f"samples of an epoch, over all workers; tula attach fills it in: {UNKNOWN}",
        asked=True,
    )
    epochs = _number(options.epochs, 100_000)
    if epochs is None:
        words = "epochs of the whole training"
        if options.steps is not None:
            words += "; {steps} is epochs * samples / global batch"
        yield KeyLine("epochs", 90, f"{words}: {UNKNOWN}", asked=True)
    else:
        yield KeyLine("epochs", epochs, "the script's own default")
    if options.seed is not None:
        yield KeyLine("seed", _number(options.seed, LARGEST_SEED) or 0, "seed that the script gets")
    if options.accumulation is not None and not options.shares_passes:
        yield KeyLine("accumulation", _passes(options), "forward passes in a step")
    yield from resume_lines(options)
    yield METRIC


def _arguments(options: ScriptOptions, cluster: ClusterSpec) -> Iterator[KeyLine]:
    batch = options.batch
    if batch is None:
        comment = (
            "no option for the batch was found; if a file of settings has it, write one for "
            f"each batch and name it, as in batch-{{local_batch}}.yaml: {UNKNOWN}"
        )
        yield KeyLine("arguments", ["--batch-size", "{local_batch}"], comment, asked=True)
    else:
        words = options.words(
            [
                (batch, "{global_batch}" if options.is_global else "{local_batch}"),
                (options.epochs, "{epochs}"),
                (None if options.epochs else options.steps, "{steps}"),
                (options.seed, "{seed}"),
                (options.nodes, "{nodes}"),
                (options.devices_on(cluster), str(cluster.parts()[0].workers_per_node)),
                (options.accumulation, "{workers}" if options.shares_passes else "{accumulation}"),
            ]
        )
        whose = "a step over all workers" if options.is_global else "one forward pass of one worker"
        yield KeyLine("arguments", words, f"the batch is that of {whose}")
    for option in options.required:
        comment = f"the script requires {option.flag}; add it above: {UNKNOWN}"
        yield KeyLine("arguments", option.words(option.example), comment, asked=True)


def resume_lines(options: ScriptOptions) -> Iterator[KeyLine]:
    """Yield the line of `resume_arguments`; nothing for a script that keeps its state here."""
    resume = options.resume
    if options.is_kept:
        return
    if resume is None:
        comment = f"options that resume it, [] if it does by itself; else it begins anew: {UNKNOWN}"
        yield KeyLine("resume_arguments", ["--resume", "last.pt"], comment, asked=True)
    elif not resume.takes_value:
        yield KeyLine("resume_arguments", resume.words(""), "appended after an interruption")
    elif len(options.saved) == 1:
        comment = "appended after an interruption"
        if "*" in options.saved[0]:
            comment += ", with the newest such file"
        elif "." in options.saved[0]:
            comment += ", if the file is there"
        yield KeyLine("resume_arguments", resume.words(options.saved[0]), comment)
    else:
        comment = f"the checkpoint that the script saves: {UNKNOWN}"
        usual = resume.default if isinstance(resume.default, str) else ""
        yield KeyLine("resume_arguments", resume.words(usual or "last.pt"), comment, asked=True)


def search_and_training(
    cluster: ClusterSpec,
    base_batch: int,
    passes: int = 1,
    samples: int | None = None,
    *,
    is_known: bool = True,
) -> list[str]:
    """Return the lines of the tables `[search]` and `[training]`.

    `passes` is the number of forward passes in the script's steps. `base_batch` is the script's own
    global batch if it `is_known`, else a usual one.
    """
    nodes = max(map(_nodes_of, cluster.parts()))
    sizes = [2**k for k in range(MOST_SIZES) if 2**k <= nodes]
    workers = cluster.parts()[0].workers_per_node
    # each worker of the largest size needs a sample for each of its passes
    needed = passes * sizes[-1] * workers if passes > 1 else 1
    most = power_of_two(min(LARGEST_BATCH, samples or LARGEST_BATCH))
    smallest = min(most, max(power_of_two(base_batch), power_of_two(2 * needed - 1)))
    largest = min(most, smallest * max(BATCH_RANGE, sizes[-1] * workers))
    here = ", limited by this machine's cores" if _shares_cores(cluster) else ""
    words = f"nodes, of {plural(workers, 'worker')} each; at most {nodes}{here}"
    rows = [
        KeyLine("cluster_sizes", sizes, words),
        KeyLine("min_batch", smallest, "global: samples of a step over all workers"),
        KeyLine("max_batch", largest, "global; samples and memory may bound it further"),
    ]
    words = "global batch that the learning rate is for"
    if not is_known:
        words = f"{words}: {UNKNOWN}"
    training = [KeyLine("base_batch", base_batch, words, asked=not is_known)]
    if sizes[-1] * workers > 1:
        words = "scales the gradients of larger batches, which a script does not do by itself"
        training.append(KeyLine("method", "ags", words, asked=True))
    return [
        "[search]",
        *(row.text() for row in rows),
        "",
        "[training]",
        *(line.text() for line in training),
    ]


def _nodes_of(cluster: ClusterSpec) -> int:
    if not _shares_cores(cluster):
        return cluster.max_nodes
    of_node = cluster.workers_per_node * cluster.cpus_per_worker
    return max(1, min(cluster.max_nodes, usable_cores() // of_node))


def _shares_cores(cluster: ClusterSpec) -> bool:
    """Tell whether cores of this machine stand in for nodes."""
    return cluster.executor == "local" and cluster.device == "cpu"


def power_of_two(number: int) -> int:
    """Return the largest power of two that is not above a number."""
    return int(2 ** (number.bit_length() - 1))


def _base_batch(script: Script, cluster: ClusterSpec) -> int:
    """Return the script's own global batch: if its batch is a worker's, that of one node."""
    if script.options.is_global:
        return script.batch
    passes = _own_passes(script.options)
    workers = 1 if script.options.shares_passes else cluster.parts()[0].workers_per_node
    return min(script.batch * passes * workers, LARGEST_BATCH)


def _own_passes(options: ScriptOptions) -> int:
    """Return the script's default number of forward passes in a step."""
    return _number(options.accumulation, 2**20) or 1


def _passes(options: ScriptOptions) -> int:
    """Return a worker's passes rounded down to a power of two, which divides all batches."""
    return 1 if options.shares_passes else power_of_two(_own_passes(options))


def _number(option: Option | None, largest: int) -> int | None:
    value = option.default if option is not None else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= largest else None


def _path_of(script: Script) -> str:
    """Return the script's path relative to the sweep file's folder, or in full if it is outside."""
    relative = os.path.relpath(script.path, script.target.parent.absolute())
    here = Path(relative)
    # a relative path is looked for in the working directory first, where it may name another file
    is_another = here.exists() and not here.samefile(script.path)
    return str(script.path) if relative.startswith("..") or is_another else relative


def unknown_keys(text: str) -> list[str]:
    """Return the keys of a file's lines that end with `unknown`, each once."""
    lines = [line for line in text.splitlines() if line.startswith("# ") and " = " in line]
    return list(dict.fromkeys(line.split()[1] for line in lines if line.endswith(UNKNOWN)))


NO_NAMES: Mapping[str, str] = {}
# keys without which a sweep of a script does not begin, each with an example
_EXAMPLES = {"samples": 2**30, "epochs": 10, "arguments": ["{local_batch}"]}


def required_keys(text: str) -> list[str]:
    """Return the keys of a sweep file that have to be filled in."""
    # a file that `tula init` did not write may lack these two without a line that asks for them
    asked = dict.fromkeys((*unknown_keys(text), "samples", "arguments"))
    # a key that is set is not required, even if another line asks for further `arguments`
    return [key for key in asked if key in _EXAMPLES and not _has(text, key)]


def _has(text: str, key: str) -> bool:
    return re.search(rf"^\s*{key}\s*=", text, re.MULTILINE) is not None


def fill_in(text: str, known: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Fill in the keys that a sweep file lacks and that are known; return its text and these keys.

    If a step turns out to have several passes, base_batch is multiplied by their number.
    """
    keys = [key for key in required_keys(text) if key in known]
    is_asked = "base_batch" in unknown_keys(text) and not _has(text, "base_batch")
    if is_asked and known.get("base_batch"):
        keys.append("base_batch")
    if "accumulation" in known and not _has(text, "accumulation"):
        keys.append("accumulation")
        passes = known.get("passes", known["accumulation"])
        text = re.sub(
            r"^(\s*base_batch\s*=\s*)([\d_]+)",
            lambda found: f"{found[1]}{int(found[2]) * passes}",
            text,
            flags=re.MULTILINE,
        )
    filled = []
    for key in keys:
        line = KeyLine(key, known[key], "as tula attach saw it").text()
        unknown = re.search(rf"^# {key} = .*$", text, re.MULTILINE)
        table = re.search(r"^\[workload\].*\n", text, re.MULTILINE)
        if unknown is not None:
            text = text.replace(unknown[0], line, 1)
        elif table is not None:
            text = f"{text[: table.end()]}{line}\n{text[table.end() :]}"
        else:
            continue
        filled.append(key)
    return text, filled


def with_asked_arguments(text: str, line: KeyLine) -> str:
    """Replace the lines that ask for arguments by one, unless the file has arguments.

    It has the arguments of a run, and so all that the script requires.
    """
    asked = re.search(r"^# arguments = .*$", text, re.MULTILINE)
    if asked is None or _has(text, "arguments"):
        return text
    others = re.sub(r"^# arguments = .*\n", "", text[asked.end() + 1 :], flags=re.MULTILINE)
    return f"{text[: asked.start()]}{line.text()}\n{others}"


def with_shared_passes(options: ScriptOptions, arguments: Sequence[str]) -> list[str]:
    """Return arguments with {workers} for the passes that a script divides among its workers."""
    option = options.accumulation
    if option is None or not options.shares_passes:
        return list(arguments)
    found = []
    for flag, argument in zip(flags_of(arguments), arguments, strict=True):
        is_passes = flag.lstrip("-").replace("-", "_") in option.names
        shared = re.sub(r"(\d+|{accumulation})$", "{workers}", argument)
        found.append(shared if is_passes else argument)
    return found if share_passes(found) else [*found, *option.words("{workers}")]


def share_passes(arguments: Sequence[str]) -> bool:
    """Tell whether {workers} sets the passes of a step, of which each worker then takes one."""
    values = zip(flags_of(arguments), arguments, strict=True)
    return any("accum" in flag and value.endswith("{workers}") for flag, value in values)


def other_passes(text: str, seen: int, *, is_step: bool) -> str:
    """Return advice on a file whose steps have another number of passes than was `seen`; else "".

    `is_step`: the file's base_batch is that of the step that was seen.
    """
    if share_passes(_arguments_in(text)[1]):
        return ""
    before = _number_in(text, "accumulation") or 1
    took = f"a step took {plural(seen, 'forward pass')} here"
    asked = power_of_two(seen) if "{accumulation}" in text else seen
    if asked == before:
        return ""
    if asked != power_of_two(asked):
        return f"{took}, and only powers of two can be planned: give the script another number; "
    batch = _number_in(text, "base_batch")
    # the batch of one pass stays, and a step has more of them
    more = f" and base_batch to {batch * seen // before}" if batch and not is_step else ""
    return f"{took}: set accumulation to {asked}{more}; "


def with_fitting_bounds(text: str) -> tuple[str, dict[str, int]]:
    """Have the bounds of the search fit base_batch and samples; return the text and new bounds.

    Only those that `tula init` wrote are changed.
    """
    written = re.findall(r"^(min_batch|max_batch) = (\d+) +# global[:;]", text, re.MULTILINE)
    bounds = {key: int(value) for key, value in written}
    if bounds.keys() != {"min_batch", "max_batch"}:
        return text, {}
    base = _number_in(text, "base_batch")
    raised = 1
    if base > bounds["max_batch"]:
        raised = power_of_two(base) // bounds["min_batch"]
    most = power_of_two(_number_in(text, "samples") or LARGEST_BATCH)
    fitting = {key: min(value * raised, most) for key, value in bounds.items()}
    changed = dict(fitting.items() - bounds.items())
    for key, value in changed.items():
        text = re.sub(rf"^({key} = )\d+", rf"\g<1>{value}", text, flags=re.MULTILINE)
    return text, changed


def _number_in(text: str, key: str) -> int:
    """Return the number that a sweep file gives a key; 0: none."""
    found = re.search(rf"^\s*{key}\s*=\s*([\d_]+)", text, re.MULTILINE)
    return int(found[1]) if found else 0


def workers_in(text: str) -> int:
    """Return the workers per node by which `tula init` multiplied an unknown base batch; else 1."""
    usual = re.search(r"^# base_batch = (\d+) ", text, re.MULTILINE)
    if usual is None:
        return 1
    return max(1, int(usual[1]) // (USUAL_BATCH * (_number_in(text, "accumulation") or 1)))


def with_arguments(
    text: str, used: Sequence[str], names: Mapping[str, str] = NO_NAMES
) -> tuple[str, list[str]]:
    """Add to a sweep file's arguments those of a run that it lacks; return the text and these.

    An option that the file's arguments name is not added, whatever its value.
    `names` maps any name of one of the script's options to the option's longest name.
    """
    line, known = _arguments_in(text)
    if line is None:
        return text, []

    def name_of(argument: str) -> str:
        name = argument.partition("=")[0]
        return names.get(name, name)

    # a placeholder is no name: it may be the value of any option
    named = {name_of(argument) for argument in known if "{" not in name_of(argument)}
    added: list[str] = []
    # number of added positional arguments
    unnamed = 0
    for before, argument in zip(["", *used], used, strict=False):
        is_option = argument.startswith("-")
        if name_of(argument) in named or (name_of(before) in named and not is_option):
            continue
        added.append(argument)
        unnamed += not is_option and not before.startswith("-")
    # positional arguments of the file, whose places among the others the run shows
    pairs = list(zip(["", *known], known, strict=False))
    moved = [word for before, word in pairs if word in added and not before.startswith("-")]
    if len(moved) < len(added):
        kept = [word for before, word in pairs if word not in moved or before.startswith("-")]
        arguments = json.dumps([*added, *kept], ensure_ascii=False)
        text = text[: line.start(1)] + arguments + text[line.end(1) :]
    required = required_arguments(text)
    has = [name for name in required if not name.startswith("-")][:unnamed]
    given = named.union(map(name_of, added))
    has += [name for name in required if name.startswith("-") and name_of(name) in given]
    for name in has:
        text = re.sub(rf"^# arguments = .*requires {re.escape(name)};.*\n", "", text, flags=re.M)
    return text, [word for word in added if word not in moved]


def _arguments_in(text: str) -> tuple[re.Match[str] | None, list[str]]:
    """Return the line with the arguments, and these; no line if they are not a list on one line."""
    line = re.search(r"^\s*arguments\s*=\s*(\[.*\])", text, re.MULTILINE)
    try:
        return line, json.loads(line[1]) if line else []
    except ValueError:
        return None, []


def asked_batch(text: str, used: Sequence[str]) -> int | None:
    """Return the samples per forward pass that a run's arguments ask for; None if none."""
    _, known = _arguments_in(text)
    placeholder = "{local_batch}"
    names = [before for before, each in itertools.pairwise(known) if each == placeholder]
    names += [each.partition("=")[0] for each in known if each.endswith(f"={placeholder}")]
    split = [part for argument in used for part in argument.split("=", 1)]
    for name, value in itertools.pairwise(split):
        if name in names and value.isdigit():
            return int(value)
    return None


def required_arguments(text: str) -> list[str]:
    """Return the options that the script requires and the sweep file's arguments lack."""
    return re.findall(r"^# arguments = .* the script requires (\S+); add it above", text, re.M)


def filled_in(text: str) -> list[str]:
    """Return overrides with examples for the required keys, to check the rest of the file."""
    return [f"workload.{key}={json.dumps(_EXAMPLES[key])}" for key in required_keys(text)]
