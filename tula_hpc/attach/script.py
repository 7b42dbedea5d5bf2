"""A user's training script: its command line for a configuration, its place, and its run here.

A script finds its place among the workers in the variables of torchrun. It runs in a folder of its
own with links to the files of the working directory, so that configurations do not collide.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import runpy
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tula_hpc.config import SweepSpec
from tula_hpc.config.workload import PLACEHOLDER
from tula_hpc.env import WorkerEnvironment, granted_gpus
from tula_hpc.init.script_options import collects_rollouts, flags_of, is_batch_of_all
from tula_hpc.records import Configuration

if TYPE_CHECKING:
    from tula_hpc.attach.processes import Meeting

# how far, relative to the batch asked for, the mean of batches that are drawn at random may lie
NEAR = 0.1


class Script(NamedTuple):
    """Script to be run as the main program, with its arguments filled in."""

    # the script's file, or else the module's name, as for `python -m`
    path: Path | None
    module: str | None
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name for messages."""
        return self.path.name if self.path is not None else str(self.module)

    def run(self, home: Path) -> None:
        """Run it as `python FILE ARGUMENTS` or, from `home`, `python -m MODULE ARGUMENTS` would.

        Raises:
            SystemExit: The script has ended by it; any other exception is the script's as well.
        """
        sys.argv = [str(self.path or self.module), *self.arguments]
        sys.path.insert(0, str(home if self.path is None else self.path.parent))
        if self.path is not None:
            runpy.run_path(str(self.path), run_name="__main__")
        else:
            runpy.run_module(str(self.module), run_name="__main__", alter_sys=True)


def script_of(sweep: SweepSpec, configuration: Configuration, run_dir: Path) -> Script:
    """Return a sweep's script as it is started for a configuration, in the folder `run_dir`."""
    work = sweep.workload
    values = values_of(sweep, configuration, run_dir)
    return Script(work.script, work.module, filled(work.arguments, values))


def values_of(sweep: SweepSpec, configuration: Configuration, run_dir: Path) -> dict[str, str]:
    """Return the value of each placeholder, see `config.workload.PLACEHOLDERS`."""
    work = sweep.workload
    return {
        "local_batch": str(forward_batch(sweep, configuration)),
        "global_batch": str(configuration.global_batch),
        "accumulation": str(work.accumulation),
        "nodes": str(configuration.nodes),
        "workers": str(configuration.world_size),
        "epochs": str(work.epochs),
        "steps": str(max(1, work.epochs * (work.samples or 0) // configuration.global_batch)),
        "lr_scale": f"{lr_scale(sweep, configuration.global_batch):.10g}",
        "seed": str(work.seed),
        "run_dir": str(run_dir),
    }


def forward_batch(sweep: SweepSpec, configuration: Configuration) -> int:
    """Return the samples of one forward pass of one worker."""
    return configuration.local_batch // sweep.workload.accumulation


def counts_steps(sweep: SweepSpec) -> bool:
    """Tell whether the script's arguments set the optimizer steps of all its epochs."""
    return any("{steps}" in text for text in sweep.workload.arguments)


def typical_batch(sizes: Counter[int], asked: int | None, *, has_loader: bool = True) -> int:
    """Return the samples of a forward pass; 0 if there was no pass, or no tensor shows them.

    Batches that are drawn at random, as by Poisson sampling, or cut by their tokens, differ in
    size: the result is their mean, or the batch that was asked for if the mean is near it, within
    its own error. Without a loader of torch's, sizes that differ may count anything, such as nodes
    of a graph: the result is 0 instead of the mean.
    """
    usual = max(sizes, key=sizes.__getitem__, default=0)
    # packed documents have one of several numbers; it is the mean that may be what was asked for
    is_one_of_many = asked is not None and len(sizes) > 2 and 4 * sizes[usual] < 3 * sizes.total()
    if not (varies(sizes) or is_one_of_many):
        # of an epoch's two batches the second is shorter, and may have been seen once more
        if asked is not None and asked > usual and sizes[asked] >= max(1, sizes[usual] - 1):
            return asked
        return usual
    seen = list(sizes.elements())
    mean = statistics.fmean(seen)
    error = 2.0 * statistics.stdev(seen) / math.sqrt(len(seen))
    if asked is not None and abs(mean - asked) <= NEAR * asked + error:
        return asked
    return round(mean) if has_loader else 0


def varies(sizes: Counter[int]) -> bool:
    """Tell whether no single number of samples occurs in half of the passes."""
    return 2 * max(sizes.values(), default=0) < sizes.total()


def batch_share(sizes: Counter[int], asked: int | None, mean: float) -> float:
    """Return the mean samples of batches that vary, over those that were asked for; else 1.

    `mean` is the loader's for a whole epoch, of which a profile sees only a part; 0: unknown. If it
    is far from the batch asked for, the sampler draws another number of samples than the data set
    has, and the passes seen count instead.
    """
    is_asked = typical_batch(sizes, asked, has_loader=False) == asked
    if asked is None or not is_asked or not varies(sizes):
        return 1.0
    average = mean if abs(mean - asked) <= NEAR * asked else statistics.fmean(sizes.elements())
    return average / asked


def remedy_of_batch(script: str, asked: int, got: int, configuration: Configuration) -> str:
    """Return advice for a script whose forward pass got another batch than was asked for."""
    nodes = configuration.nodes
    of_node = "{local_batch}"
    if configuration.workers_per_node > 1:
        of_node = f"{{local_batch*{configuration.workers_per_node}}}"
    if got * configuration.world_size == asked:
        if nodes == 1 < configuration.workers_per_node:
            return (
                f"it divides its batch among its workers: give it {of_node} if among those of a "
                "node, {global_batch} if among all"
            )
        return "it divides its batch among its workers: give it {global_batch}"
    of_each_node = (asked // configuration.workers_per_node, asked * nodes)
    if nodes > 1 and got in of_each_node:
        return f"it takes the batch of a node: give it {of_node}"
    of_each, rest = divmod(got, asked)
    # a power of two has an exact reciprocal
    if of_each > 1 and not rest and not of_each & (of_each - 1):
        return (
            f"if each of its samples is {of_each} for the model, as two views of an image or the "
            f"points of a ray are, give it {{local_batch*{1 / Decimal(of_each):f}}}, and multiply "
            f"workload.samples, search.min_batch and search.max_batch by {of_each}; otherwise look "
            f"at how {script} takes its batch"
        )
    return f"look at how {script} takes its batch, and at {{local_batch}} and {{global_batch}}"


def remedy_of_passes(
    passes: int, parts: int, batch: int, asked: int | None, world: int, *, other: str = ""
) -> str:
    """Return advice for a script that takes `passes` in a step where `parts` were asked for.

    A pass has `batch` samples where `asked` were asked for; None: any number. `other` is another
    model that an optimizer trains.
    """
    if asked is not None and batch != asked and batch * passes == asked * parts:
        return (
            f"it cuts {batch * passes} samples by itself into passes of {batch}; keep to batches "
            "that it takes in one pass, by {local_batch} and search.max_batch"
        )
    if world > 1 and passes == max(1, parts // world):
        return (
            f"it seems to divide its passes among its {world} workers: give {{workers}} to the "
            "argument that sets them, so that each takes one, and set workload.accumulation = 1; "
            "other arguments need another --run-dir"
        )
    if passes & (passes - 1):
        counted = f"; {counting(other, 'profile')} if each step of that takes one batch"
        return f"only powers of 2 can be planned{counted if other else ''}"
    fewer = ""
    if passes < parts:
        fewer = "; if it takes fewer at its beginning, as YOLO does, shorten that warm-up"
    return (
        f"set workload.accumulation = {passes} if it always takes that many{fewer}; if one of its "
        "arguments sets all samples of a step, give it {global_batch}, for tokens as in "
        "{global_batch*1024}"
    )


def counting(other: str, mode: str) -> str:
    """Return advice on how to have the steps of another model count, in a mode of `ChildSpec`."""
    key = f'set workload.counted_model = "{other}"'
    if mode != "look":
        return key
    # the reader of `tula attach` may have no sweep file yet
    return f"{key} in a sweep file, which tula init --script writes, and name that file by --into"


def why_no_passes(
    model: str, methods: Sequence[str], *, has_repeated: bool, other: str = ""
) -> str:
    """Return the reason why no forward pass counts, and advice.

    Args:
        model: Class of the model that counts.
        methods: Methods that this class itself defines, of which the script may call one.
        has_repeated: There were passes over a batch that had had one in an earlier step.
        other: Advice on how to have the steps of another model count; "" if none is trained.
    """
    if has_repeated:
        return "several of its steps pass over one batch; expected a new one of the loader in each step"
    method = methods[0] if len(methods) == 1 else "METHOD"
    how = f"end its class with `forward = {method}`, and write `model(…)` for `model.{method}(…)`"
    if not methods:
        how = "write `model(…)` for `model.forward(…)`, `model.module(…)` or calls of its parts"
    return (
        f"expected forward passes of {model} in a step, found none; call the model itself, as "
        f"DistributedDataParallel asks too, and none of its methods or parts: {how}"
        f"{other and f'; or, if it calls another model, {other}'}"
    )


def lr_scale(sweep: SweepSpec, global_batch: int) -> float:
    """Return the factor of the learning rate from training.base_batch to a batch.

    B/base for `lrs` (Goyal et al., arXiv 1706.02677), its root for `sqrt` (Krizhevsky, arXiv
    1404.5997), else 1.
    """
    ratio = global_batch / sweep.training.base_batch
    scales = {"lrs": ratio, "sqrt": math.sqrt(ratio)}
    return scales.get(sweep.training.method, 1.0)


def filled(arguments: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return arguments with each known `{name}` and `{name*factor}` replaced; others stay."""

    def value(match: re.Match[str]) -> str:
        name, factor = match.groups()
        if name not in values or factor is None:
            return values.get(name, match[0])
        # exact, and without an exponent, which a script's int() would refuse
        return f"{(Decimal(values[name]) * Decimal(factor)).normalize():f}"

    return tuple(PLACEHOLDER.sub(value, text) for text in arguments)


def variables_of(
    env: WorkerEnvironment, workers_per_node: int, meeting: Meeting, device: str = "cpu"
) -> dict[str, str]:
    """Return the variables by which a script's process finds its place among the others.

    Ranks go node by node. Most of these variables are torchrun's; scripts of Slurm sites look for
    those of srun instead.
    """
    node, local_rank = divmod(env.rank, workers_per_node)
    nodes = -(-env.world_size // workers_per_node)
    own_gpu = local_rank
    gpus = granted_gpus()
    if 0 < gpus < workers_per_node:
        # Slurm binds each task to GPUs of its own, and a script takes its device by its local rank
        own_gpu = local_rank % gpus
    # the job id of an array's task ends with the task's index
    job_id = env.job_id.partition("_")[0] or "0"
    values: list[tuple[object, list[str]]] = [
        (env.rank, ["RANK", "ROLE_RANK", "SLURM_PROCID"]),
        (own_gpu, ["LOCAL_RANK"]),
        (local_rank, ["SLURM_LOCALID"]),
        (env.world_size, ["WORLD_SIZE", "ROLE_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS"]),
        (workers_per_node, ["LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"]),
        (node, ["NODE_RANK", "GROUP_RANK", "SLURM_NODEID"]),
        (nodes, ["GROUP_WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"]),
        (",".join(env.hosts[:nodes]), ["SLURM_NODELIST", "SLURM_JOB_NODELIST"]),
        (job_id, ["SLURM_JOB_ID", "SLURM_JOBID"]),
        ("default", ["ROLE_NAME"]),
        (meeting.host, ["MASTER_ADDR"]),
        (meeting.port, ["MASTER_PORT"]),
        (meeting.run_id, ["TORCHELASTIC_RUN_ID"]),
        (0, ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]),
    ]
    if device == "cpu":
        # as `accelerate launch --cpu` sets it: else accelerate and Trainer take several workers
        # without GPUs for a single one
        values.append(("true", ["ACCELERATE_USE_CPU"]))
    return {name: str(value) for value, names in values for name in names}


class ParsedOptions(NamedTuple):
    """Options of the parsers by which a script reads its arguments."""

    # name of each option, with "batch" or the longest, by any name; "=" ends it before a value
    names: dict[str, str]
    # values that are whole numbers above 0, by these names
    values: dict[str, int]

    def add(self, names: Sequence[str], value: object) -> None:
        """Note an option by its names, as they are typed, and its value."""
        name = max(names, key=lambda each: ("batch" in each, len(each)))
        self.names.update(dict.fromkeys(names, name))
        if isinstance(value, int | float) and value > 0 and float(value).is_integer():
            self.values[name] = int(value)

    def batches(self) -> list[int]:
        """Return the values of options that are named after a batch."""
        return [value for name, value in self.values.items() if is_batch(name.lower())]


NO_OPTIONS = ParsedOptions({}, {})


def watch_parsers() -> ParsedOptions:
    """Note the options of every argparse parser from now on, in the object that is returned."""
    options = ParsedOptions({}, {})
    original = argparse.ArgumentParser.parse_known_args

    @wraps(original)
    def parse_known_args(self: Any, *args: Any, **kwargs: Any) -> Any:
        parsed = original(self, *args, **kwargs)
        for action in self._actions:
            # a positional argument has no name but its own; subcommands and lists have other nargs
            if names := action.option_strings or [action.dest] * (action.nargs is None):
                options.add(names, getattr(parsed[0], action.dest, None))
        return parsed

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign] # to be told
    return options


def note_parsed(options: ParsedOptions) -> None:
    """Add the options of click and typer, and the keys of OmegaConf and Hydra, as they are set."""
    configs: list[Any] = []
    for instance in gc.get_objects():
        # by its type alone: to ask a lazy object for an attribute would load it
        kind = (str(type(instance).__module__).rpartition("_")[2], type(instance).__name__)
        if kind == ("click.core", "Context"):
            for option in instance.command.params:
                # positional arguments have no dash
                if names := [name for name in option.opts if name.startswith("-")]:
                    options.add(names, instance.params.get(option.name))
        elif kind == ("omegaconf.dictconfig", "DictConfig") and instance._get_parent() is None:
            to_container = sys.modules["omegaconf"].OmegaConf.to_container
            configs.append(_keys_in(to_container(instance, resolve=False)))
    # leave out Hydra's own configuration; the one merged of files and command line has most keys
    of_script = [keys for keys in configs if not any(key.startswith("hydra") for key in keys)]
    for key, value in max(of_script, key=len, default={}).items():
        options.add([f"{key}="], value)


def _keys_in(config: object, within: str = "") -> dict[str, object]:
    """Return the values of a nested configuration by their dotted keys."""
    if not isinstance(config, dict):
        return {within.removesuffix("."): config}
    values: dict[str, object] = {}
    for key, value in config.items():
        values |= _keys_in(value, f"{within}{key}.")
    return values


def worded(name: str, value: str) -> list[str]:
    """Return the words of a command line that give an option this value."""
    return [f"{name}{value}"] if name.endswith("=") else [name, value]


# parts of the names of options for a batch, not for a number of them, and for an evaluation
OF_BATCH = ("batch(?!es)", "(?<![a-z])bsz?(?![a-z])", "(sample|ima?ge?)s[-_]per[-_]gpu")
OF_EVALUATION = ("eval", "val", "test")
# whole names of options for the number of epochs
OF_EPOCHS = re.compile(r"(--|([\w.]+\.)?)((n|num|number[_-]of|max|total|train)[_-]?)*epochs=?")
# whole names of options for nodes: the cluster's if the default is 1, else perhaps a graph's
OF_NODES = re.compile(r"(--|([\w.]+\.)?)(((n|num)[_-]?)?nodes|nnodes)=?")
# parts of the names of options that set the steps of the whole training
OF_STEPS = ("(max|total|train)[_-](step|iter)", "num[_-](step|iter)", r"\bn[_-]?iter")
# option for the batch of a step over all workers, which may be counted in tokens
OF_TOTAL = re.compile(r"(total|global|effective)\w*batch|batch\w*(total|global|effective|tokens)")


def with_placeholders(
    arguments: Sequence[str], batch: int, passes: int, options: ParsedOptions = NO_OPTIONS
) -> list[str]:
    """Return arguments with placeholders for the batch and the epochs, or all steps.

    Options that were left at the parser's defaults are added. The arguments are those of a run of
    one worker, whose steps had `passes` forward passes of `batch` samples each.
    """
    replaced = list(arguments)
    placed = {str(n): name for name, n in options.values.items() if name.isidentifier()}
    parted = zip(flags_of(arguments), arguments, strict=True)
    flags = [options.names.get(f, placed.get(word, f)).lower() for f, word in parted]
    values = [re.fullmatch(r"(.*=)?(\d+)", argument) for argument in arguments]
    # options for the batch of all workers last, as that of a worker may have the same value
    order = sorted(range(len(flags)), key=lambda index: is_batch_of_all(flags[index]))
    numbers = {index: int(match[2]) for index in order if (match := values[index])}

    def valued(names: Sequence[str]) -> Iterator[int]:
        return (n for i, n in numbers.items() if _is_of(flags[i], names))

    of_steps = _of_steps([*options.names, *flags])
    epochs = next(valued(("epoch",)), None)
    steps = next(valued(of_steps), None) if epochs is None else None
    # batches that are drawn at random vary about this number
    near = next((n for n in valued(OF_BATCH) if abs(n - batch) <= NEAR * n), None)
    for names, value, placeholder in (
        (OF_BATCH, batch, "{local_batch}"),
        (OF_BATCH, batch * passes, "{global_batch}"),
        (("epoch",), epochs, "{epochs}"),
        (of_steps, steps, "{steps}"),
        (("accum", "grad(ient)?[-_]?acc"), passes if passes > 1 else 0, "{accumulation}"),
        (OF_BATCH, near, "{local_batch}"),
        (("",), batch, "{local_batch}"),
    ):
        # a batch of 0 is unknown
        fits = [i for i, n in numbers.items() if 0 < n == value and _is_of(flags[i], names)]
        kind = placeholder.rpartition("_")[2]
        # whatever name is before it, a number must be the only one of its value
        is_certain = names != ("",) or len(fits) == 1
        if fits and is_certain and not any(kind in argument for argument in replaced):
            replaced[fits[0]] = re.sub(r"\d+$", placeholder, replaced[fits[0]])
    for index, number in numbers.items():
        # options for the batch of a whole step, beside that of a pass, or in place of it
        is_whole = passes > 1 or is_batch_of_all(flags[index])
        if is_whole and number == batch * passes and is_batch(flags[index]):
            replaced[index] = re.sub(r"\d+$", "{global_batch}", arguments[index])
        if tokens := _of_a_sample(flags[index], number, batch * passes):
            replaced[index] = re.sub(r"\d+$", f"{{global_batch*{tokens}}}", replaced[index])
    return [*replaced, *_defaults(replaced, batch, passes, options)]


def steps_asked(arguments: Sequence[str], options: ParsedOptions) -> set[int]:
    """Return the steps of a whole training that arguments, or the parser's defaults, ask for."""
    flags = flags_of(arguments)
    last = [argument.rpartition("=")[2] for argument in arguments]
    typed = [
        (options.names.get(f, f), int(n)) for f, n in zip(flags, last, strict=True) if n.isdigit()
    ]
    of_steps = _of_steps([*options.names, *flags])
    return {number for flag, number in (*options.values.items(), *typed) if _is_of(flag, of_steps)}


def _of_steps(flags: Sequence[str]) -> Sequence[str]:
    """Return parts of the names of options for all steps, by all options of the script."""
    # where rollouts are collected, numbers of steps or iterations may be those of a rollout
    return OF_STEPS[:1] if collects_rollouts(flags) else OF_STEPS


def _of_a_sample(flag: str, total: int, samples: int) -> int:
    """Return the tokens of a sample, if the option sets the tokens of a step; else 0."""
    is_named = OF_TOTAL.search(flag.replace("-", "_")) is not None
    # with 0 samples the batch is unknown
    is_total = is_named and 0 < samples < total and total % samples == 0
    return total // samples if is_total else 0


def _defaults(
    arguments: Sequence[str], batch: int, passes: int, options: ParsedOptions
) -> list[str]:
    """Return options left at their defaults, with placeholders for batch, epochs and nodes."""
    given = " ".join(arguments)
    wanted = {}
    for name, value in options.values.items():
        tokens = _of_a_sample(name.lower(), value, batch * passes)
        if tokens and name not in given:
            wanted[f"{{global_batch*{tokens}}}"] = [name]
    batches = {name: n for name, n in options.values.items() if is_batch(name.lower())}
    whole = [name for name, n in batches.items() if n == batch * passes]
    if passes == 1:
        whole = list(filter(is_batch_of_all, whole))
    if "{global_batch" not in given:
        wanted["{global_batch}"] = whole
    if "batch}" not in given:
        sizes = [name for name, n in batches.items() if n == batch and name not in whole]
        wanted["{local_batch}"] = sizes
    if "{epochs}" not in given and "{steps}" not in given:
        wanted["{epochs}"] = [name for name in options.values if OF_EPOCHS.fullmatch(name)]
    ones = [name for name, value in options.values.items() if value == 1 and name not in given]
    wanted["{nodes}"] = [name for name in ones if OF_NODES.fullmatch(name)]
    added: list[str] = []
    for placeholder, names in wanted.items():
        # a positional argument has no default
        if len(names) == 1 and not names[0].isidentifier():
            added += worded(names[0], placeholder)
    return added


def is_batch(flag: str) -> bool:
    """Tell whether an option of this name, in lower case, sets a batch of training."""
    return _is_of(flag, OF_BATCH) and not _is_of(flag, OF_EVALUATION)


def _is_of(flag: str, names: Sequence[str]) -> bool:
    return any(re.search(name, flag) for name in names)
