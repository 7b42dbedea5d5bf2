"""First contact with a training script: run it here for some steps, and write its sweep file.

    tula attach train.py --batch-size 64 --epochs 100
    tula attach -m package.train --batch-size 64 --epochs 100
    tula attach --into train.toml train.py --epochs 100

One worker runs it, in a folder of its own with links to the files of the working directory. The
output is a sweep file that would profile it on a cluster; its comments hold the observations.
Values that were not observed are in lines that end with `unknown`, as in the file of `tula init
--script`. With `--into` the values that the named file lacks are written into it, and only the
observations are printed.

`--json`, before the script, prints one JSON object with these keys:

    schema_version
    model, optimizer     names of their classes; "and" joins optimizers that step together
    wrapped              whether the model is in DistributedDataParallel
    others               optimizers whose steps are not counted, with the classes of their models
    forward_batch        samples in a forward pass; 0: unknown
    accumulation         forward passes in an optimizer step
    samples              samples in an epoch; 0: unknown
    loader_workers       loader processes
    options              of the script's parser (argparse, click, typer, OmegaConf): `names` has for
                         each name of an option the one with "batch", or the longest; `values` has
                         the whole numbers by these
    device               "cpu" or "cuda"
    measurement          as a line of a run's measurements: times, memory, identity, noise_scale
    workload             the table [workload] of a sweep file, as far as it is known
    unknown              keys of that table that have to be filled in or corrected
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tula_hpc.attach.script import ParsedOptions, Script, is_batch, with_placeholders, worded
from tula_hpc.command_errors import CommandParser, exit_code_of
from tula_hpc.config import ClusterSpec, SearchSpec
from tula_hpc.config.loading import read_toml
from tula_hpc.config.validation import shown
from tula_hpc.config.workload import SETTINGS, find_script
from tula_hpc.env import stay_on_loopback
from tula_hpc.errors import InputError, TulaError
from tula_hpc.files import write_out
from tula_hpc.formatting import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    plural,
    printable_output,
)
from tula_hpc.init import sweep_file
from tula_hpc.init.cluster_file import UNKNOWN, KeyLine
from tula_hpc.init.script_options import ScriptOptions, read_options
from tula_hpc.own_sources import find_module, program_of, source_of
from tula_hpc.records import Measurement, write_atomically

# width of the step time's interval, relative to that time, above which steps are called uneven
UNEVEN = 0.3
# commands that start a script, which users may put before it
LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|srun")


@printable_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0 measured, 1 not measurable, 2 wrong input."""
    interrupted = "interrupted: the script has ended, and no sweep file was written"
    return exit_code_of(_run, _parser().parse_args(arguments), interrupted)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="tula attach",
        description="Run a training script here for some steps, and say what was seen: its "
        "optimizer, batch, memory, and the time of a step and its parts. The output is a sweep "
        "file; in lines that end with 'unknown' it has values that the run did not show.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--into", type=Path, metavar="SWEEP.toml", help="complete this file of tula init"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("script", metavar="SCRIPT", help="a file, or with -m the name of a module")
    rest = parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script"
    )
    # else, where SCRIPT is missing, argparse would also ask for ARGUMENTS
    rest.required = False
    return parser


def _run(options: argparse.Namespace) -> int:
    script, module = None, options.script
    if not options.is_module:
        script, module = Path(options.script).absolute(), None
        _check_script(script)
    elif find_module(module) is None:
        raise InputError(f"no module {module!r} here or installed", source="SCRIPT")
    counted = None
    if options.into is not None:
        counted = _check_into(options.into, script or module)
    folder = Path(tempfile.mkdtemp(prefix="tula-attach-"))
    sys.stderr.write(
        f"running {options.script} until it is measured, with learning rates of 0; its output: "
        f"{folder} ...\n"
    )
    result = _look(Script(script, module, tuple(options.arguments)), counted, options, folder)
    if isinstance(result, TulaError):
        sys.stderr.write(f"{result}\n")
        given = {argument.partition("=")[0] for argument in options.arguments}
        if options.into is None and "--into" in given:
            sys.stderr.write(
                f"--into stands after {options.script} and went to it: write it before "
                f"{options.script}\n"
            )
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    draft = _Draft(options, result)
    completed = ""
    if options.into is not None:
        asked = draft.batch_asked(options.into)
        # 0: no tensor shows the batch
        if asked is not None and draft.batch not in (0, asked):
            sys.stderr.write(
                f"asked for {plural(asked, 'sample')} a forward pass, the model got {draft.batch}: "
                f"look at how {options.script} takes its batch; {options.into} stays as it is\n"
            )
            return 1
        completed = draft.complete(options.into)
    if options.json:
        more = {"workload": draft.table, "unknown": list(draft.unknown)}
        lines = [json.dumps({"schema_version": 1, **result, **more}, indent=1)]
    elif completed:
        lines = [*_observations(result), completed]
    else:
        lines = [
            f"# Sweep of {options.script}, as one worker ran it here. Fill in what is {UNKNOWN!r}.",
            *(f"# {line}" for line in _observations(result)),
            "",
            *draft.lines(),
        ]
    write_out("\n".join(lines) + "\n")
    return 0


def _check_script(script: Path) -> None:
    if not script.is_file():
        message = f"no such file: {script}"
        if script.is_dir():
            message = f"{script} is a folder; expected a training script"
        if LAUNCHER.fullmatch(script.name):
            message = f"tula attach starts Python itself; leave out {script.name} and its options"
        raise InputError(message, source="SCRIPT")
    if script.suffix == ".toml":
        raise InputError(
            f"{script.name} is a sweep or cluster file; expected a training script in Python",
            source="SCRIPT",
        )
    try:
        source_of(script)
    except ValueError as error:
        raise InputError(str(error), source="SCRIPT") from None


def _check_into(path: Path, run: Path | str) -> str | None:
    """Refuse a file that is not the sweep file of the script, or of the module, that is run.

    The file may still lack required keys. Return its `workload.counted_model`, None without one.
    """
    if not path.is_file():
        message = "no such file; tula init --script writes it; without --into it is printed"
        raise InputError(message, source=path)
    table = read_toml(path).get("workload")
    workload = table if isinstance(table, dict) else {}
    key = "script" if isinstance(run, Path) else "module"
    named = workload.get(key)
    is_same = named == run
    if isinstance(run, Path) and isinstance(named, str):
        # the text may be no possible path, or name no file
        with contextlib.suppress(OSError, ValueError):
            is_same = find_script(Path(named), path.parent).samefile(run)
    if not is_same:
        found = "is missing" if named is None else f"is {shown(named)}"
        message = f"{found}; expected the sweep file of {run}, which is run here"
        raise InputError(message, source=path, key=f"workload.{key}")
    counted = workload.get("counted_model")
    return counted if isinstance(counted, str) else None


def _look(
    script: Script, counted: str | None, options: argparse.Namespace, folder: Path
) -> dict[str, Any] | TulaError:
    """Return the result of the script's process, or the reason why it could not be measured."""
    import torch

    from tula_hpc.attach.processes import error_of
    from tula_hpc.attach.reporting import ChildSpec, end_of
    from tula_hpc.attach.script_profile_job import measure_here

    stay_on_loopback()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    spec = ChildSpec(
        mode="look",
        program=script,
        message_file=folder / "said",
        device=device,
        counted_model=counted,
    )
    outcome = measure_here(spec, SearchSpec(), folder / "first")
    if shorter := outcome.message.result.get("search"):
        steps = plural(outcome.message.steps, "step")
        if others := outcome.message.result["others"]:
            steps += f" and others of {', '.join(others)}, which do not count"
        sys.stderr.write(f"it ended after {steps}; running it again to measure fewer of them ...\n")
        outcome = measure_here(spec, SearchSpec.model_validate(shorter), folder / "again")
    if not outcome.is_done:
        sys.stderr.write(end_of(Path(outcome.log)))
        return error_of(outcome, "")
    return {**outcome.message.result, "device": device}


def _observations(result: dict[str, Any]) -> Iterator[str]:
    measured = Measurement.model_validate(result["measurement"])
    times, memory, identity = measured.times, measured.memory, measured.identity
    if times is None or memory is None or identity is None:
        return
    wrapped = "in" if result["wrapped"] else "run here as a single worker, without"
    size = (
        f"{identity.parameters:,} parameters, a gradient of {format_bytes(identity.gradient_bytes)}"
    )
    yield f"model       {result['model']}, {size}, {wrapped} DistributedDataParallel"
    optimizer = result["optimizer"]
    if result["others"]:
        optimizer += f"; not counted: {', '.join(result['others'])}"
    yield f"optimizer   {optimizer}"
    passes = plural(result["accumulation"], "forward pass")
    samples = plural(result["forward_batch"], "sample")
    if not result["forward_batch"]:
        samples = "an unknown number of samples"
    yield f"batch       {samples} a forward pass, {passes} a step"
    low, high = format_duration(times.step_time_low_s), format_duration(times.step_time_high_s)
    yield f"step        {format_duration(times.step_time_s)} (95 %: {low} to {high})"
    if times.step_time_high_s - times.step_time_low_s > UNEVEN * times.step_time_s:
        yield "            uneven: its steps differ, or this machine is busy with something else"
    parts = {
        "waiting for data": times.data_time_s,
        "computation": times.compute_time_s,
        "optimizer": times.optimizer_time_s,
    }
    for name, seconds in parts.items():
        share = format_percent(seconds / times.step_time_s)
        yield f"            {format_duration(seconds)} {name}, {share}"
    yield f"loader      {plural(result['loader_workers'], 'process')}"
    # reserved memory comes first: plans and memory limits refer to it
    held = format_bytes(memory.reserved_bytes)
    own = format_bytes(memory.peak_bytes)
    yield f"memory      {held} at the peak of a step, {own} of it by the model and its steps"
    noise = "not measured"
    if measured.noise_scale:
        noise = f"{format_number(measured.noise_scale, 3)} samples, at the initial weights"
    elif measured.noise_samples:
        noise = f"too large to measure with {measured.noise_samples:,} samples"
    yield f"noise scale {noise}"
    if measured.one_iterator:
        # imported late, as it needs NumPy, which --help and completions do without
        from tula_hpc.analysis.planning.warnings import ONE_ITERATOR

        yield f"resume      {ONE_ITERATOR}"


def _read_source(options: argparse.Namespace) -> ScriptOptions | None:
    """Return the options in the script's source; None if it cannot be read here."""
    program = program_of(options.script) if options.is_module else Path(options.script)
    with contextlib.suppress(ValueError):
        takes_keys = _gives_keys(options.arguments)
        return read_options(program, takes_keys=takes_keys) if program else None
    return None


def _gives_keys(arguments: Sequence[str]) -> bool:
    """Tell whether arguments are keys of a configuration, as in `train.lr=0.1`."""
    return any(re.match(r"[^-=]+=", argument) for argument in arguments)


class _Draft:
    """Table `[workload]` that would profile the script, as far as its run here shows it.

    Attributes:
        table: Keys that are known; its arguments may lack the batch.
        unknown: Lines for keys that have to be filled in or corrected.
    """

    def __init__(self, options: argparse.Namespace, result: dict[str, Any]) -> None:
        self.options = options
        self.result = result
        self.known = ParsedOptions(**result["options"])
        self.source = _read_source(options)
        # samples of a forward pass; 0: no tensor shows them
        self.batch = int(result["forward_batch"])
        self.passes = int(result["accumulation"])
        given = options.arguments
        # `HfArgumentParser` refuses options beside its file
        is_alone = len(given) == 1 and not self.known.names and Path(given[0]).suffix in SETTINGS
        # file of settings that the script takes instead of options; "": it takes options
        self.settings = given[0] if is_alone else ""
        self.unknown: dict[str, KeyLine] = {}
        arguments = with_placeholders(given, self.batch, self.passes, self.known)
        if self.source is not None:
            arguments = sweep_file.with_shared_passes(self.source, arguments)
            if self.passes == 1:
                arguments = self.source.for_all_workers(arguments)
        key = "module" if options.is_module else "script"
        self.table: dict[str, Any] = {key: options.script, "arguments": arguments}
        if not any("batch}" in argument for argument in arguments):
            self._ask("arguments", *self._carrying(arguments))
        self._add_samples()
        # the epochs of this run are not used, as it was only a trial
        words = "of the whole training"
        joined = " ".join(arguments)
        if "{steps}" in joined:
            words += "; {steps} is epochs * samples / global batch"
        elif "{epochs}" not in joined:
            words += (
                "; put {epochs} into the argument that sets them, or {steps} where steps are set"
            )
        self._ask("epochs", 90, words)
        passes = 1 if sweep_file.share_passes(arguments) else self.passes
        planned = sweep_file.power_of_two(max(1, passes))
        if passes != planned and "{accumulation}" not in joined:
            words = f"a step took {passes} forward passes here; only powers of two can be planned"
            self._ask("accumulation", planned, words)
        elif planned > 1:
            self.table["accumulation"] = planned

    def _ask(self, key: str, value: Any, words: str) -> None:
        self.unknown[key] = KeyLine(key, value, f"{words}: {UNKNOWN}", asked=True)

    def _add_samples(self) -> None:
        samples = self.result["samples"] or 0
        if samples >= max(1, self.batch):
            self.table["samples"] = samples
            return
        words = "of an epoch, over all workers; the loader does not say"
        if samples:
            words = (
                f"of an epoch, over all workers, as the {self.batch} of a pass are counted: the "
                f"data set has only {samples} items"
            )
        self._ask("samples", 50_000, words)

    @property
    def step_batch(self) -> int:
        """Samples in a step of the one worker that ran; 0: no tensor shows them."""
        return self.passes * self.batch

    def _carrying(self, arguments: list[str]) -> tuple[list[str], str]:
        """Return arguments that might carry the batch, which none of the run's is, and why."""
        got = self.batch
        words = (
            f"no argument is {got}, the batch that the model got: put {{local_batch}} into the one "
            "that sets it, and check that the script's loader uses it"
        )
        if not got:
            words = "no tensor shows the batch: put {local_batch} into the argument that sets it"
        elif not (arguments or self.known.names or self._in_source()):
            words = (
                f"the script was given no arguments and parses none: its batch, {got}, is set in "
                "its source or environment; give it an option for that"
            )
        carrying = self._with_batch(arguments)
        file = next((each for each in arguments if Path(each).suffix in SETTINGS), "")
        of_batch = str(Path(file).with_stem(f"{Path(file).stem}-{{local_batch}}")) if file else ""
        by_file = [of_batch if each == file else each for each in arguments]
        if got and file and not carrying:
            carrying = by_file
            words = (
                f"no argument is {got}, the batch that the model got: write one "
                f"{Path(file.rpartition('=')[2]).name} for each batch that is tried, if it is set "
                "there"
            )
        if got and self.settings:
            carrying = by_file
            words = (
                f"the script was given only {self.settings} and parsed no options: write one such "
                "file for each batch that is tried"
            )
        # the batch in the name of a file
        pattern = rf"(?<!\d){got}(?!\d)(?=[^/]*\.[a-z]\w*$)"
        named = [re.sub(pattern, "{local_batch}", argument) for argument in arguments]
        if got and named != arguments:
            carrying = named
            words = (
                f"a file is named after {got}, the batch: write one for each batch that is tried"
            )
        return carrying or [*arguments, "--batch-size", "{local_batch}"], words

    def _with_batch(self, arguments: list[str]) -> list[str]:
        """Return the arguments with {local_batch} in an option of the run, else of the script.

        Return [] if none is known.
        """
        for place, argument in enumerate(arguments):
            name, equals, _ = argument.partition("=")
            if is_batch(name.lower()) and (equals or name.startswith("-")):
                carrying = [f"{name}={{local_batch}}"] if equals else [name, "{local_batch}"]
                return [*arguments[:place], *carrying, *arguments[place + 2 - len(equals) :]]
        # without positional arguments, which have no name to type
        typed = (name for name in self.known.names.values() if not name.isidentifier())
        own = next((name for name in typed if is_batch(name.lower())), None)
        if own is not None:
            return [*arguments, *worded(own, "{local_batch}")]
        if in_source := self._in_source():
            return [*arguments, *in_source]
        if _gives_keys(arguments):
            return [*arguments, "batch_size={local_batch}"]
        return []

    def _in_source(self) -> list[str]:
        """Return the words for {local_batch} by an option in the source; [] without one."""
        source = self.source
        if source is None or source.batch is None:
            return []
        return source.for_all_workers(source.batch.words("{local_batch}"))

    def lines(self) -> Iterator[str]:
        """Yield the lines of a sweep file, valid once those that end with `unknown` are filled."""
        script = self.options.script
        stem = script.rpartition(".")[2] if self.options.is_module else Path(script).stem
        yield from (sweep_file.name_line(stem), "", "[workload]")
        # numbers, strings and lists of strings are written in TOML as in JSON
        for name, value in self.table.items():
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
            if name == "arguments" and "{local_batch}" in line:
                line += (
                    " # {global_batch} instead, if the script divides its batch among all workers"
                )
            if name not in self.unknown:
                yield line
        lines = [*self.unknown.values()]
        # a state that is kept here needs no arguments, even if another file of the script keeps it
        if self.source is not None and not self.result["measurement"].get("kept"):
            lines += sweep_file.resume_lines(self.source)
        yield from (line.text() for line in (*lines, sweep_file.METRIC))
        yield ""
        yield from sweep_file.search_and_training(
            ClusterSpec(device=self.result["device"]),
            max(1, self.step_batch),
            self.table.get("accumulation", 1),
            self.table.get("samples"),
        )

    def batch_asked(self, path: Path) -> int | None:
        """Return the samples of a pass that the run was to have by a sweep file; None: any."""
        names = self.known.names
        used = [names.get(argument, argument) for argument in self.options.arguments]
        return sweep_file.asked_batch(path.read_text(), used)

    def complete(self, path: Path) -> str:
        """Write values that a sweep file lacks; say in a sentence what was added and is missing."""
        text = path.read_text()
        table = {key: value for key, value in self.table.items() if key not in self.unknown}
        base_batch = self.step_batch * sweep_file.workers_in(text)
        table |= {"passes": self.passes, "base_batch": base_batch}
        text, keys = sweep_file.fill_in(text, table)
        # the arguments may lack the batch here and have it in the file
        asked = self.unknown.get("arguments")
        # arguments that only the user can write; those in the file are no use
        by_hand = asked if self.settings else None
        used = () if by_hand else self.table["arguments"]
        text, added = sweep_file.with_arguments(text, used, self.known.names)
        if asked is not None:
            text = sweep_file.with_asked_arguments(text, asked)
        if keys:
            text, bounds = sweep_file.with_fitting_bounds(text)
            table |= bounds
            keys += sorted(bounds, reverse=True)
        if text != path.read_text():
            write_atomically(path, text)
        got = [f"{key} = {json.dumps(table[key], ensure_ascii=False)}" for key in keys]
        if added:
            got.append(f"arguments with {' '.join(added)}")
        done = f"filled in {', '.join(got)}" if got else "nothing to fill in"
        lacking = [*sweep_file.required_keys(text), *sweep_file.required_arguments(text)]
        if by_hand is not None:
            value = json.dumps(by_hand.value, ensure_ascii=False)
            why = by_hand.comment.removesuffix(f": {UNKNOWN}")
            lacking.append(f"arguments = {value} ({why})")
        ready = f"fill in {' and '.join(lacking)} by hand" if lacking else "it is complete"
        advice = sweep_file.other_passes(text, self.passes, is_step="base_batch" in keys)
        return f"{path}: {done}; {advice}{ready}."


if __name__ == "__main__":
    sys.exit(main())
