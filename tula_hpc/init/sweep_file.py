"""Text of a sweep file for a training script, with a comment on every value and its source."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tula_hpc.config import ClusterSpec
from tula_hpc.init.cluster_file import UNKNOWN, Line
from tula_hpc.init.script_options import Option, ScriptOptions

# where the script has no default
USUAL_BATCH = 32
# batches up to so many times the script's own are candidates, or one of its own for each worker
BATCH_RANGE = 16
MOST_SIZES = 4
LARGEST_BATCH = 2**30
LARGEST_SEED = 2**31


class Script(NamedTuple):
    """Training script, its options, and the sweep file that is to name it."""

    path: Path
    options: ScriptOptions
    target: Path

    @property
    def batch(self) -> int:
        """Batch that the script takes by itself."""
        return _number(self.options.batch, 2**20) or USUAL_BATCH

    def trial(self) -> list[str]:
        """Return arguments with which the script can be looked at."""
        batch = self.options.batch
        return [] if batch is None else batch.words(str(self.batch))


def sweep_file(script: Script, cluster: ClusterSpec) -> str:
    """Return the text of a sweep file, valid once the lines that end with `unknown` are filled in."""
    lines = [
        f"# Sweep of {script.path.name}, as its source describes it: nothing of it was run.",
        f"# Lines that begin with # and end with {UNKNOWN!r} hold what the source does not say. Those",
        "# of samples, epochs and arguments have to be filled in.",
        "",
        Line("name", _name(script.path), "of the run and its jobs").text(),
        "",
        "[workload]",
        *(line.text() for line in _workload(script)),
        "",
        "[search]",
        *(line.text() for line in _search(script, cluster)),
        "",
        "[training]",
        Line(
            "base_batch", _base_batch(script, cluster), "global batch that the learning rate is for"
        ).text(),
        "",
    ]
    return "\n".join(lines)


def _workload(script: Script) -> Iterator[Line]:
    options = script.options
    yield Line("script", _path_of(script), "in the working directory, or beside this file")
    yield from _arguments(options)
    yield Line(
        "samples",
        50_000,
        f"of an epoch, over all workers; tula attach says it: {UNKNOWN}",
        asked=True,
    )
    epochs = _number(options.epochs, 100_000)
    if epochs is None:
        yield Line("epochs", 90, f"of the whole training: {UNKNOWN}", asked=True)
    else:
        yield Line("epochs", epochs, "the script's own default")
    if options.seed is not None:
        yield Line("seed", _number(options.seed, LARGEST_SEED) or 0, "of the script")
    if options.accumulation is not None:
        yield Line("accumulation", _passes(options), "forward passes of a step")
    yield from _resume(options)
    if options.resume is None and not options.is_kept:
        yield Line(
            "resume_arguments",
            ["--resume", "last.pt"],
            f"options that resume it, without which it begins anew: {UNKNOWN}",
            asked=True,
        )
    yield Line(
        "metric",
        r"Acc@1 (?P<test_accuracy>[\d.]+)",
        f"how it prints its score: {UNKNOWN}",
        asked=True,
    )


def _arguments(options: ScriptOptions) -> Iterator[Line]:
    batch = options.batch
    if batch is None:
        comment = f"no option of it names a batch: {UNKNOWN}"
        yield Line("arguments", ["--batch-size", "{local_batch}"], comment, asked=True)
        return
    carrier = "{global_batch}" if options.is_global else "{local_batch}"
    words = batch.words(carrier)
    for option, value in (
        (options.epochs, "{epochs}"),
        (options.seed, "{seed}"),
        (options.accumulation, "{accumulation}"),
    ):
        words += option.words(value) if option is not None else []
    whose = "a step over all workers" if options.is_global else "one forward pass of one worker"
    yield Line("arguments", words, f"the batch is that of {whose}")
    for option in options.required:
        comment = f"the script requires {option.flag}; add it above: {UNKNOWN}"
        yield Line("arguments", [*option.words("...")], comment, asked=True)


def _resume(options: ScriptOptions) -> Iterator[Line]:
    resume = options.resume
    if resume is None or options.is_kept:
        return
    if not resume.takes_value:
        yield Line("resume_arguments", resume.words(""), "appended after an interruption")
    elif len(options.saved) == 1:
        comment = "appended after an interruption, if the file is there"
        yield Line("resume_arguments", resume.words(options.saved[0]), comment)
    else:
        comment = f"the checkpoint that it saves: {UNKNOWN}"
        yield Line("resume_arguments", resume.words("last.pt"), comment, asked=True)


def _search(script: Script, cluster: ClusterSpec) -> Iterator[Line]:
    sizes = _sizes(cluster)
    base = _base_batch(script, cluster)
    workers = cluster.workers_per_node
    yield Line(
        "cluster_sizes", sizes, f"nodes, of {workers} workers each; at most {cluster.max_nodes}"
    )
    smallest = 2 ** (base.bit_length() - 1)
    yield Line("min_batch", smallest, "global: samples of a step over all workers")
    largest = min(LARGEST_BATCH, smallest * max(BATCH_RANGE, sizes[-1] * workers))
    yield Line("max_batch", largest, "global; samples and memory may bound it further")


def _sizes(cluster: ClusterSpec) -> list[int]:
    return [2**k for k in range(MOST_SIZES) if 2**k <= cluster.max_nodes]


def _base_batch(script: Script, cluster: ClusterSpec) -> int:
    """Return the global batch that the script has by itself, on one node where it is of a worker."""
    if script.options.is_global:
        return script.batch
    batch = script.batch * _passes(script.options) * cluster.workers_per_node
    return min(batch, LARGEST_BATCH)


def _passes(options: ScriptOptions) -> int:
    """Return the forward passes of a step by the script's default, as a power of two."""
    given = _number(options.accumulation, 2**20) or 1
    return int(2 ** (given.bit_length() - 1))


def _number(option: Option | None, largest: int) -> int | None:
    value = option.default if option is not None else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 < value <= largest else None


def _path_of(script: Script) -> str:
    """Return the script's path from the sweep file's folder, or in full where it is elsewhere."""
    relative = os.path.relpath(script.path, script.target.parent.absolute())
    return str(script.path) if relative.startswith("..") else relative


def _name(path: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem)[:64].lstrip("._-")
    return name or "training"


def unknown_keys(text: str) -> list[str]:
    """Return the keys of a file's lines that end with `unknown`, each once."""
    lines = [line for line in text.splitlines() if line.startswith("# ") and " = " in line]
    return list(dict.fromkeys(line.split()[1] for line in lines if line.endswith(UNKNOWN)))


# keys without which a sweep of a script does not begin
_EXAMPLES = {"samples": 2**30, "epochs": 10, "arguments": ["{local_batch}"]}


def required_keys(text: str) -> list[str]:
    """Return the unknown keys of a sweep file that have to be filled in."""
    asked = [key for key in unknown_keys(text) if key in _EXAMPLES]
    # what else the script requires is a line with the key of those that are known
    return [key for key in asked if not re.search(rf"^{key} = ", text, re.MULTILINE)]


def filled_in(text: str) -> list[str]:
    """Return example values for the required keys, as overrides under which the rest is valid."""
    return [f"workload.{key}={json.dumps(_EXAMPLES[key])}" for key in required_keys(text)]
