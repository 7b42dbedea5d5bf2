"""Input files: every mistake leads to one line with file, key and what was expected, and to nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.closed_folder import close_folder
from tests.fuzzing import fuzz as examples
from tula_hpc.config import (
    MAX_FILE_BYTES,
    ClusterSpec,
    SearchSpec,
    SweepSpec,
    batches_timed_apart,
    check_together,
    hidden_peers,
    idle_keys,
    load_cluster,
    load_sweep,
    load_together,
    local_batches,
    split_overrides,
)
from tula_hpc.config.workload import DATASETS, TORCHVISION_MODELS
from tula_hpc.errors import InputError

Load = Callable[..., BaseModel]
NAME = 'name = "a"\n'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(load: Load, content: str | bytes, overrides: Sequence[str] = ()) -> str:
    path = Path("in.toml")
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as raised:
        load(path, overrides)
    return str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # unknown keys
        ('[workload]\nmodle = "resnet18"', r"workload\.modle: unknown key \(did you mean 'model'\?\)$"),
        # the place where it belongs is named before a similar key
        ("[training]\nepochs = 4", r"training\.epochs: unknown key \(did you mean workload\.epochs\?\)$"),
        ("[workload]\nlearning_rate = 0.1", r"workload\.learning_rate: unknown key \(did you mean 'lr'\?\)$"),
        ("[workload]\nbatch_size = 64", r"workload\.batch_size: unknown key; the sweep chooses the batch, "),
        ("[search]\nnodes = [1, 2]", r"search\.nodes: unknown key \(did you mean search\.cluster_sizes\?\)$"),
        ("[serach]\n", r"serach: unknown key \(did you mean 'search'\?\)$"),
        ('"a\\nb" = 1', r"'a\\nb': unknown key; valid keys: name, workload"),
        # wrong types
        ("workload = 3", "workload: expected a table, got 3"),
        ("[[workload]]\nepochs = 1", "workload: expected a table, got "),
        ('[workload]\nepochs = "ten"', 'workload.epochs: expected a whole number, got "ten"'),
        ("[workload]\nepochs = 1.5", "workload.epochs: expected a whole number, got 1.5"),
        ("[workload]\nlr = 1979-05-27", 'workload.lr: expected a number, got "1979-05-27"'),
        ("[workload]\nlr = nan", "workload.lr: expected a finite number, got NaN"),
        ("[workload]\naugment = 1", "workload.augment: expected true or false, got 1"),
        ("[workload]\nmodel = 3", "workload.model: expected text in quotes, got 3"),
        ("[search]\ncluster_sizes = 2", r"search\.cluster_sizes: expected a list in brackets, got 2"),
        # impossible values
        ("[workload]\nepochs = 0", "workload.epochs: expected at least 1, got 0"),
        ("[workload]\nepochs = 99999999999999999999", "workload.epochs: expected at most 100000, got 9"),
        ("[workload]\nlr = 0", "workload.lr: expected more than 0, got 0"),
        ("[workload]\nmomentum = 1.0", "workload.momentum: expected less than 1.0, got 1.0"),
        ('[workload]\noptimizer = "adam"', "workload.optimizer: expected 'sgd' or 'adamw', got \"adam\""),
        ('[workload]\nschedule = "step"', 'workload.milestones: schedule = "step" needs milestones, for example'),
        ("[workload]\nmilestones = [3, 2]", "workload.milestones: expected increasing epochs"),
        ("[workload]\nepochs = 4\nwarmup_epochs = 4", "workload.warmup_epochs: expected less than epochs = 4, got 4"),
        ("[training]\nwarmup_epochs = 12", "training.warmup_epochs: expected less than workload.epochs = 10, got 12"),
        ("[search]\ncluster_sizes = []", r"search\.cluster_sizes: expected at least 1 value, got \[\]"),
        ("[search]\ncluster_sizes = [1, 0]", r"search\.cluster_sizes\.1: expected at least 1, got 0"),
        ("[search]\ncluster_sizes = [2, 2]", "search.cluster_sizes: expected each cluster size once"),
        ("[search]\nmin_batch = 64\nmax_batch = 32", "search.min_batch: 64 is above max_batch = 32"),
        ("[search]\nmin_steps = 300", "search.min_steps: 300 is above max_steps = 200"),
        ("[training]\ns_min = 2.0\ns_max = 1.0", "training.s_min: 2.0 is above s_max = 1.0"),
        ('[training]\nlog_to = ["wandb", "wandb"]', "training.log_to: expected each tracker once"),
        ('[objective]\nkind = "fast"', r"objective\.kind: expected 'knee', .* or 'weighted', got \"fast\""),
        ('[objective]\ndeadline_hours = "soon"', r'objective\.deadline_hours: expected hours, .* "12h", .*got "soon"'),
        ("[objective]\nbudget = 0", "objective.budget: expected more than 0, got 0"),
        ("[objective]\ntime_weight = 0\ncost_weight = 0", "objective.time_weight: expected more than 0"),
        # models and data sets
        ('[workload]\nmodel = "resnet19"', r"workload\.model: 'resnet19' .*did you mean 'resnet18'.*function\"$"),
        ('[workload]\ndataset = "cifar"', r"workload\.dataset: 'cifar' is not a data set.* one of: digits, synthetic"),
        ('[workload]\nmodel = "a b:c"', "workload.model: 'a b:c': expected \"package.module:function\""),
        ('[workload]\nmodel = ":"', "workload.model: ':': expected \"package.module:function\""),
        ('[workload]\nmodel = "no.such:f"', r"workload\.model: no module 'no\.such' in the working"),
        ('[workload]\nmodel = "json:nothing"', r"workload\.model: .*json/__init__\.py defines no 'nothing'"),
        ('[workload]\nmodel = "__main__:f"', "workload.model: no module '__main__'"),
        # data folders
        ('[workload]\ndataset = "imagenet"', "workload.data_dir: dataset = 'imagenet' needs the folder that holds it"),
        ('[workload]\ndataset = "cifar10"\ndata_dir = "gone"', r'workload\.data_dir: no such folder: ".*/gone"'),
        ('[workload]\ndataset = "cifar10"\ndata_dir = "in.toml"', r'workload\.data_dir: ".*/in\.toml" is a file;'),
        ('[workload]\ndata_dir = ""', "workload.data_dir: expected a path, got an empty text"),
        ('[workload]\ndata_dir = "~no_such_user/x"', "workload.data_dir: no home folder for '~no_such_user'"),
        ('[workload]\ndataset = "cifar10"\ndata_dir = "a\\u0000b"', "workload.data_dir: no such folder"),
        (f'[workload]\ndataset = "cifar10"\ndata_dir = "{"x" * 5000}"', r"workload\.data_dir: .*File name too long"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_sweep_is_one_line(here: Path, text: str, message: str) -> None:
    line = complaint(load_sweep, NAME + text)
    assert re.match(rf"in\.toml: {message}", line), line
    assert line.isprintable()


@pytest.mark.parametrize("key", ["model", "module"])
def test_a_module_that_is_only_next_to_the_sweep_file_is_named_with_its_place(here: Path, key: str) -> None:
    """Jobs start in the working directory of the command, where they would not find it."""
    folder = here / "project"
    folder.mkdir()
    (folder / "net.py").write_text("def build(classes, image_size): ...")
    tables = {
        "model": '[workload]\nmodel = "net:build"\ndataset = "net:data"\n',
        "module": '[workload]\nmodule = "net"\nsamples = 100\nepochs = 1\narguments = ["{local_batch}"]\n',
    }
    (folder / "own.toml").write_text(NAME + tables[key])
    with pytest.raises(InputError) as raised:
        load_sweep(folder / "own.toml")
    # once, though two keys name the module
    assert len(str(raised.value).splitlines()) == 1
    looked = f'in the working directory, "{here}", or the installed packages; it lies beside the sweep file'
    assert str(raised.value).endswith(f'{looked}: start the command in "{folder}"')
    (folder / "net.py").unlink()
    with pytest.raises(InputError, match="packages; install it, or start the command in its folder"):
        load_sweep(folder / "own.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_nodes = 0", "max_nodes: expected at least 1, got 0"),
        ('device = "gpu"', "device: expected 'cpu' or 'cuda', got \"gpu\""),
        ('device = "cuda"\nexecutor = "slurm"', 'gres: device = "cuda" on Slurm needs gres = "gpu:1"'),
        (
            'device = "cuda"\nexecutor = "slurm"\ngres = "gpu:a100:2,nvme:8"\nworkers_per_node = 4',
            'gres: each of 4 workers_per_node needs a GPU of its own, but "gpu:a100:2,nvme:8" asks for 2',
        ),
        ("memory_gb = -1", "memory_gb: expected more than 0, got -1"),
        ('[pricing]\nbasis = "hour"', "pricing.basis: expected 'node-hour', 'memory', 'tres', 'spot' or 'energy'"),
        ('[pricing]\nbasis = "tres"', r'pricing\.tres_weights: basis = "tres" needs the billing weights, for example'),
        ('[pricing]\ntres_weights = "CPU"', "pricing.tres_weights: 'CPU' has no weight; expected for example"),
        ("[pricing]\npue = 0.5", "pricing.pue: expected at least 1.0, got 0.5"),
        ("[[partitions]]\nmax_nodes = 2", "partitions.0.partition: is required"),
        ('[[partitions]]\npartition = "a"\nnodes = 2', r"partitions\.0\.nodes: unknown key .did you mean 'max_nodes'"),
        ('[[partitions]]\npartition = "a"\npricing = {basis = "x"}', "partitions: a: pricing.basis: expected"),
        ('[[partitions]]\npartition = "a"\npricing = {bass = "x"}',
         r"partitions: a: pricing.bass: unknown key.*did you mean 'basis'"),
        ('[[partitions]]\npartition = "a"\n[[partitions]]\npartition = "a"', "partitions: 'a' is listed twice"),
        ('[[partitions]]\npartition = "a"\n[[partitions]]\npartition = "b"\npricing = '
         '{basis = "tres", tres_weights = "CPU=1"}', "partitions: some are priced in USD and some in SU"),
        ('[[partitions]]\npartition = "a"\npricing = {usd_per_node_hour = "3"}',
         "partitions: a: pricing.usd_per_node_hour: expected a number"),
        ('modules = ["cuda"]', "modules: unknown key; such commands are lines of setup$"),
        ("gpus_per_node = 4", r"gpus_per_node: unknown key \(did you mean gres\?\)$"),
        ('time = "1:00:00"', "time: unknown key; see profile_minutes and train_minutes$"),
        ('partitoin = "x"', r"partitoin: unknown key \(did you mean 'partition'\?\)"),
        ('[[partition]]\nmax_nodes = 2', r"partition: expected text .*\(did you mean \[\[partitions\]\]\?\), got \["),
        # values that become part of the job script, where a newline would start a line of its own
        ('partition = "a\\n#SBATCH --uid=0"', r'partition: expected 1 to 200 letters, .*, got "a\\n#SBATCH --uid=0"'),
        ('gres = ""', 'gres: expected 1 to 200 letters, .*, got ""'),
        ('name = "a/b"', 'name: expected at most 64 letters, .*, got "a/b"'),
        ('srun_args = ["-K1\\n"]', r'srun_args\.0: expected one line without control characters, got "-K1\\n"'),
        ('srun_args = ["-n4"]', "srun_args: -n4 is set by this program; see workers_per_node"),
        ('srun_args = ["--output=x"]', "srun_args: --output=x is set by this program; leave it out"),
        ('setup = ["a\\u0000"]', r"setup\.0: expected one line without control characters, got a value that is not"),
        ('setup = "module load x"', "setup: expected a list in brackets"),
        ('[sbatch]\nreservation = "a\\nb"', "sbatch.reservation: expected a word, a whole number, true or false"),
        ('partition = "a"\n[sbatch]\npartition = "b"', 'sbatch.partition: would replace partition = "a"; remove'),
        ('controller_partition = "a"\n[sbatch]\npart = "b"', 'sbatch.part: would replace controller_partition = "a"'),
        ('[[partitions]]\npartition = "a"\n[sbatch]\npartition = "b"', "partitions: a: sbatch.partition: would rep"),
        ('memory_gb = 4\n[sbatch]\nmem = "1G"', "sbatch.mem: would replace memory_gb = 4.0"),
        ("cpus_per_worker = 2\n[sbatch]\ncpus_per_task = 7", "sbatch.cpus_per_task: would replace cpus_per_worker = 2"),
        ("[sbatch]\nnice = 1.5", "sbatch.nice: expected a word, a whole number, true or false, got 1.5"),
        ('[sbatch]\n"a\\nb" = 1', r'sbatch: expected an option.s long name: .*, got "a\\nb"'),
        ('[environment]\n"A B" = "1"', 'environment: expected the name of a variable: .*, got "A B"'),
        ('[container]\nimage = "i"\nmounts = ["~/x"]', r'container.mounts.0: expected full paths, .*:ro, got "~/x"$'),
        ('on_event = ""', "on_event: expected text that is not empty, got a value that is not shown"),
        ("[partitions.a]", r"partitions: expected a list in brackets of tables, each written \[\[partitions\]\], got"),
        ('[environment]\nA = "1\\n2"', r"environment\.A: expected one line without control characters, got a value"),
        ("[environment]\nA = 1", "environment.A: expected text in quotes, got a value that is not shown"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_cluster_is_one_line(here: Path, text: str, message: str) -> None:
    name = "" if text.startswith("name") else NAME
    line = complaint(load_cluster, name + text)
    assert re.match(rf"in\.toml: {message}", line), line
    assert line.isprintable()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "name: is required"),
        (b'name = "x y"', 'name: expected at most 64 letters, digits, .*, got "x y"'),
        (b"a = 1\n\xff\xfe", "line 2 has a byte that is not UTF-8; save the file as UTF-8"),
        (b"name = ", r"is not valid TOML: expected a number, true, false, a list or a text in quotes \(at "),
        (b'name = "a"\nname = "b"', "is not valid TOML: a key is given twice"),
        (b"[search]\nnest = true\n[search]\n", r"is not valid TOML: a table is given twice \(at line 3, column "),
        (b"partitions = []\n[[partitions]]\n", r"is not valid TOML: a table is given twice \(at line 2, column "),
        (b"[[a.x]]\n[a.x]\n", r"is not valid TOML: a table is given twice \(at line 2, column "),
        (b'a = "x\nb = 1\n', r"is not valid TOML: a text lacks its last quote \(at line 1, column "),
        (b"a = 'x\nb = 1\n", r"is not valid TOML: a text lacks its last quote \(at end "),
        (b"a = 1, 2", r"is not valid TOML: expected nothing more on this line; a list is written \[1, 2\], a text in "),
        (b'a = "C:\\data"', "is not valid TOML: a . in a text is written twice, or the text in single quotes "),
        (b"#" * (MAX_FILE_BYTES + 1), "expected a TOML file under 1,000,000 bytes"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "is not valid TOML: maximum recursion depth"),
        (b".".join([b"a"] * 3000) + b" = 1", "is not valid TOML: a key of more than 100 parts"),
        (NAME.encode() + b"[workload]\nepochs = " + b"9" * 5000, r"is not valid TOML: [^;]*5000 digits$"),
        (NAME.encode() + b"[workload]\nepochs = 0x" + b"f" * 5000, "holds a value outside all bounds: Exceeds[^;]*$"),
    ],
    ids=range(17),
)  # fmt: skip
def test_a_file_that_is_no_sweep_is_one_line(here: Path, content: bytes, message: str) -> None:
    line = complaint(load_sweep, content)
    assert re.match(rf"in\.toml: {message}", line), line
    assert line.isprintable()


def test_several_mistakes_are_a_line_each(here: Path) -> None:
    lines = complaint(load_sweep, '[workload]\nepochs = 0\nlr = "fast"\n[serach]\n').splitlines()
    assert [line.split(": ")[1] for line in lines] == ["name", "workload.epochs", "workload.lr", "serach"]


def test_a_script_in_place_of_a_file_is_refused_with_the_command_that_writes_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    with pytest.raises(InputError, match=r"it is a script, for which \S.* init --script \S+ writes a sweep file"):
        load_sweep(tmp_path / "train.py")


def test_a_run_directory_in_place_of_a_file_is_refused_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").touch()
    with pytest.raises(InputError, match=r"is a folder; expected a TOML file, as sweep\.toml and cluster\.toml in it$"):
        load_sweep(tmp_path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.epochs", "--set: expected section.key=value, got 'workload.epochs'"),
        ("=3", "--set: expected section.key=value, got '=3'"),
        ("workload.=3", "--set: expected section.key=value, got 'workload.=3'"),
        ("workload.lr=1\nx=2", "--set: expected section.key=value, got 'workload.lr=1\\nx=2'"),
        ("workload.model=\udc80", "--set: expected section.key=value, got 'workload.model=\\udc80'"),
        ("name.x=3", "--set: name.x: 'name' is not a table"),
        (".a=3", "in.toml: '': unknown key"),
        ("workload.epoch=3", "--set: workload.epoch: unknown key (did you mean 'epochs'?)"),
        ("training.log_to=[wandb]", "--set: training.log_to: expected a list in brackets with its texts in quotes, '"),
        ("workload.epochs=many", '--set: workload.epochs: expected a whole number, got "many"'),
        ("workload.epochs=" + "9" * 5000, "--set: workload.epochs: expected a whole number, got"),
        ("workload.epochs=" + "[" * 5000, "--set: workload.epochs: expected a whole number, got"),
        ("a" + ".a" * 3000 + "=1", "in.toml: holds a value outside all bounds"),
    ],
    ids=range(13),
)
def test_a_mistake_on_the_command_line_is_one_line(here: Path, override: str, message: str) -> None:
    line = complaint(load_sweep, NAME, [override])
    assert line.startswith(message)
    assert line.isprintable()


def test_overrides_take_toml_and_bare_words(here: Path) -> None:
    Path("in.toml").write_text(NAME)
    sweep = load_sweep(
        Path("in.toml"), ["workload.model=resnet34", "workload.lr=0.5", "search.cluster_sizes=[4, 1]", "name=b"]
    )
    assert (sweep.workload.model, sweep.workload.lr, sweep.name) == ("resnet34", 0.5, "b")
    assert sweep.search.cluster_sizes == (1, 4)


FOUR_GPUS = 'device = "cuda"\nexecutor = "slurm"\nworkers_per_node = 4\n'
EACH = "each of 4 workers_per_node needs a GPU of its own"


@pytest.mark.parametrize(
    "asked",
    [
        'gres = "gpu:4"',
        'gres = "gpu:v100:4,nvme:8"',
        'gres = "gres:gpu:v100:4(S:0-1)"',
        'gres = "gpu:8"',
        # a name that the site defines
        'gres = "accelerator:4"',
        # GPUs that Slurm does not know of
        'gres = "none"',
        'exclusive = true\ngres = "gpu:4"',
        'exclusive = false\ngres = "gpu:4"',
        'exclusive = true\nsrun_args = ["--gres=gpu:4"]',
        '[sbatch]\ngres = "gpu:4"',
        "[sbatch]\ngpus_per_node = 4",
        '[sbatch]\ngpus-per-node = "v100:4"',
        '[sbatch]\ngpus-per-node = "v100:2,p100:2"',
        "[sbatch]\ngpus-per-task = 1",
        '[sbatch]\ngpus_per_task = "v100:1"',
        '[sbatch]\ntres-per-task = "cpu=8,gres/gpu=1"',
        '[sbatch]\ntres-per-task = "gres/gpu:v100:1"',
        'gres = "gpu:4"\n[sbatch]\ngpu-bind = "single:1"',
        'gres = "gpu:4"\n[sbatch]\ngpu_bind = "verbose,closest"',
        "max_nodes = 1\n[sbatch]\ngpus = 4",
        "[sbatch]\ngpus-per-socket = 2\nsockets-per-node = 2",
        # it replaces the GPUs in gres
        'gres = "gpu:1"\n[sbatch]\ngpus-per-node = 4',
    ],
)
def test_any_form_that_gives_every_worker_a_gpu_is_accepted(here: Path, asked: str) -> None:
    Path("in.toml").write_text(NAME + FOUR_GPUS + asked)
    assert load_cluster(Path("in.toml")).workers_per_node == 4


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("", 'gres: device = "cuda" on Slurm needs gres = "gpu:4"'),
        ("exclusive = true", 'gres: device = "cuda" on Slurm needs gres = "gpu:4", also with exclusive = true'),
        ('exclusive = false\ngres = "none"', 'gres: "none" needs exclusive = true, as Slurm keeps no other job'),
        ('gres = "gpu"', f'gres: {EACH}, but "gpu" asks for 1 a node'),
        ('[sbatch]\ngres = "gpu:2"', f'sbatch.gres: {EACH}, but "gpu:2" asks for 2 a node'),
        ("[sbatch]\ngpus-per-node = 1", f'sbatch.gpus-per-node: {EACH}, but "1" asks for 1 a node'),
        ('gres = "gpu:4"\n[sbatch]\ngpus_per_node = "v100:2"', f"sbatch.gpus_per_node: {EACH}"),
        ("[sbatch]\ngpus-per-task = 2", "sbatch.gpus-per-task: expected 1 GPU, since each worker uses one"),
        ('[sbatch]\ntres-per-task = "gres/gpu:2"', "sbatch.tres-per-task: expected 1 GPU, since each worker uses one"),
        ("[sbatch]\ngpus = 8", "sbatch.gpus: expected gpus-per-node = 4: jobs have 1 to 64 nodes"),
        ("max_nodes = 1\n[sbatch]\ngpus = 3", f"sbatch.gpus: {EACH}"),
        ("[sbatch]\ngpus-per-socket = 4", "sbatch.gpus-per-socket: Slurm requires sockets-per-node with it"),
        ('gres = "gpu:4"\n[sbatch]\ngpu-bind = "single:2"', 'sbatch.gpu-bind: expected "single:1", one GPU for each'),
        ('gres = "gpu:4"\nsrun_args = ["--gpu-bind=per_task:4"]', 'srun_args: expected "per_task:1"'),
        ('gres = "gpu:4"\n[sbatch]\ncpus-per-gpu = 8', "sbatch: cpus-per-gpu is set by this program; see cpus_per_w"),
    ],
)
def test_a_form_that_leaves_workers_without_a_gpu_of_their_own_is_one_line(
    here: Path, asked: str, message: str
) -> None:
    line = complaint(load_cluster, NAME + FOUR_GPUS + asked)
    assert line.startswith(f"in.toml: {message}")
    assert line.isprintable()


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        ('gres = "gpu:4"', []),
        ("[sbatch]\ngpus-per-node = 4", []),
        ('gres = "gpu:4"\n[sbatch]\ngpu-bind = "none"', []),
        ("[sbatch]\ngpus_per_task = 1", ["sbatch.gpus_per_task"]),
        ('gres = "gpu:4"\n[sbatch]\ngpu-bind = "closest"', ["sbatch.gpu-bind"]),
        ('gres = "gpu:4"\nsrun_args = ["--gpu-bind=v,single:1"]', ["srun_args"]),
        ('[sbatch]\ngpus-per-task = 1\n[[partitions]]\npartition = "a"\nworkers_per_node = 1', []),
    ],
)
def test_settings_that_hide_a_nodes_gpus_from_each_other_are_warned_of(here: Path, asked: str, keys: list[str]) -> None:
    """NCCL then has no peer-to-peer paths."""
    Path("in.toml").write_text(NAME + FOUR_GPUS + asked)
    found = list(hidden_peers(load_cluster(Path("in.toml"))))
    assert [key for key, _ in found] == keys
    assert all('gres = "gpu:4" in its place' in why for _, why in found)


def test_a_controller_asks_for_nothing_that_workers_need() -> None:
    of_workers = {
        "gpus-per-node": 4,
        "gpus_per_task": 1,
        "gpu-bind": "single:1",
        "gpus": 4,
        "sockets-per-node": 2,
        "gres": "gpu:4",
        "tres_per_task": "gres/gpu:1",
        "mem-per-gpu": "8G",
        "exclusive": True,
        "tmp": "500G",
        "cores_per_socket": 32,
    }
    anyway = {"reservation": "mlperf", "comment": "x", "nice": 10}
    srun_args = ["-K1", "-c8", "-G4", "--gres=gpu:4", "--gpu-bind=closest", "--mpi=pmix"]
    spec = {"sbatch": of_workers | anyway, "srun_args": srun_args, "gres": "gpu:4", "device": "cuda"}
    controller = ClusterSpec.model_validate(spec).controller()
    assert controller.sbatch == anyway
    assert controller.srun_args == ("-K1", "--mpi=pmix")
    assert controller.gres is None


def test_a_controller_on_a_partition_of_workers_is_billed_as_they_are() -> None:
    parts = [{"partition": "a", "account": "A"}, {"partition": "b", "account": "B", "qos": "long"}]
    cluster = {"partitions": parts, "executor": "slurm", "controller_partition": "b"}
    controller = ClusterSpec.model_validate(cluster).controller()
    assert (controller.partition, controller.account, controller.qos) == ("b", "B", "long")
    late = ClusterSpec(executor="slurm", profile_minutes=60, signal_delay_s=1800, controller_minutes=30).controller()
    assert late.signal_delay_s == 900


def test_billing_weights_may_be_those_of_each_partition_alone() -> None:
    parts = [{"partition": name, "pricing": {"tres_weights": "CPU=2"}} for name in "ab"]
    cluster = ClusterSpec.model_validate({"partitions": parts, "pricing": {"basis": "tres"}})
    assert [part.pricing.tres_weights for part in cluster.parts()] == [{"cpu": 2.0}] * 2


TWO_PARTITIONS = """
executor = "slurm"
[[partitions]]
partition = "gpu"
max_nodes = 4
[[partitions]]
partition = "gpu.large"
max_nodes = 2
pricing = { usd_per_node_hour = 9.0 }
"""


def test_an_override_reaches_one_partition_by_its_name(here: Path) -> None:
    Path("in.toml").write_text(NAME + TWO_PARTITIONS)
    asked = ["partitions.gpu.pricing.usd_per_node_hour=2", "partitions.gpu.large.max_nodes=8", "memory_gb=3"]
    small, large = load_cluster(Path("in.toml"), asked).parts()
    assert (small.max_nodes, small.pricing.usd_per_node_hour, small.memory_gb) == (4, 2.0, 3.0)
    assert (large.max_nodes, large.pricing.usd_per_node_hour, large.memory_gb) == (8, 9.0, 3.0)


@pytest.mark.parametrize(
    ("tables", "override", "message"),
    [
        (TWO_PARTITIONS, "partitions.cpu.max_nodes=3", "expected partitions.NAME.KEY=VALUE; there is gpu, gpu.large"),
        (TWO_PARTITIONS, "partitions.0.max_nodes=3", "expected partitions.NAME.KEY=VALUE; there is gpu, gpu.large"),
        ("", "partitions.gpu.max_nodes=3", "expected partitions.NAME.KEY=VALUE; there is no [[partitions]]"),
        (
            TWO_PARTITIONS,
            "max_nodes=3",
            "changes nothing: each of [[partitions]] has a value of its own; "
            "set partitions.NAME.max_nodes, NAME being gpu or gpu.large",
        ),
    ],
)
def test_an_override_that_reaches_no_partition_is_refused(here: Path, tables: str, override: str, message: str) -> None:
    line = complaint(load_cluster, NAME + tables, [override])
    assert line == f"--set: {override.partition('=')[0]}: {message}"


def test_a_key_of_a_study_that_changes_nothing_in_any_column_is_named(here: Path) -> None:
    study = """
    [workload]
    seed = 3
    [search]
    max_batch = 64
    estimate = false
    [training]
    s_max = 2.0
    [study]
    methods = ["METHOD", "lars"]
    batches = [64]
    tuning_holdout = 0.2
    [study.variants.mine]
    training.method = "lrs"
    training.small_batch = 3
    """
    always = ["workload.seed", "search.max_batch", "study.tuning_holdout", "study.variants.mine.training.small_batch"]
    for method, idle in (("ags", []), ("lbt", ["training.s_max"])):
        Path("in.toml").write_text(NAME + study.replace("METHOD", method))
        found = dict(idle_keys(load_sweep(Path("in.toml"))))
        assert sorted(found) == sorted(always + idle)
    assert found["study.tuning_holdout"] == "base_lrs is not given; give it, or remove this"


@pytest.mark.parametrize(
    ("keys", "idle"),
    [
        ('method = "static"\nsmoothing = 0.5\nscale_warmup_epochs = 2.0', ["smoothing"]),
        ('method = "ags"\nsmoothing = 0.5\nscale_warmup_epochs = 2.0', []),
        ("checkpoint_minutes = 2.0\ninterruption_hours = 3.0", ["interruption_hours"]),
        ("interruption_hours = 3.0", []),
        ('method = "lars"\nlayer_wise = true', ["layer_wise"]),
        ('method = "lbt"\nlayer_wise = true', []),
    ],
)
def test_a_key_that_another_one_leaves_without_effect_is_named(here: Path, keys: str, idle: list[str]) -> None:
    Path("in.toml").write_text(f"{NAME}[training]\n{keys}\n")
    assert list(dict(idle_keys(load_sweep(Path("in.toml"))))) == [f"training.{key}" for key in idle]


def test_overrides_of_both_files_are_distinguished_and_reach_the_default_cluster(here: Path) -> None:
    Path("in.toml").write_text(NAME)
    asked = ["workload.lr=0.5", "cluster.max_nodes=4", "pricing.basis=spot"]
    sweep, cluster = load_together(Path("in.toml"), None, asked)
    assert (sweep.workload.lr, cluster.max_nodes, cluster.pricing.basis) == (0.5, 4, "spot")
    with pytest.raises(InputError, match=r"^--set: max_node: unknown key"):
        load_together(Path("in.toml"), None, ["cluster.max_node=4"])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('dataset = "cifar10"\ndata_dir = "theirs"', r'data_dir: ".*/theirs" is not open to you; ask its owner'),
        (
            'script = "theirs/t.py"\narguments = ["{local_batch}"]\nsamples = 9\nepochs = 1',
            'script: ".*/theirs/t.py" cannot be read: Permission denied',
        ),
    ],
)
def test_a_folder_without_the_right_to_enter_it_is_a_mistake_in_its_key(
    here: Path, monkeypatch: pytest.MonkeyPatch, table: str, message: str
) -> None:
    Path("theirs").mkdir()
    # root may enter any folder
    monkeypatch.setattr(os, "access", lambda *_: False)
    close_folder("theirs", monkeypatch)
    assert re.match(rf"in\.toml: workload\.{message}", complaint(load_sweep, f"{NAME}[workload]\n{table}"))


def test_windows_files_are_read(here: Path) -> None:
    Path("in.toml").write_bytes(b'\xef\xbb\xbfname = "a"\r\n[workload]\r\nepochs = 3\r\n')
    assert load_sweep(Path("in.toml")).workload.epochs == 3


def test_a_data_folder_becomes_absolute(here: Path) -> None:
    (here / "images").mkdir()
    Path("in.toml").write_text(f'{NAME}[workload]\ndataset = "imagefolder"\ndata_dir = "images"')
    assert load_sweep(Path("in.toml")).workload.data_dir == here / "images"


@pytest.mark.parametrize(
    "source",
    [
        "def net(classes, size): ...",
        "def net(classes, /, size=32, depth=3, *more, wide=False, **other): ...",
        "def net(*sizes): ...",
        "@decorated\ndef net(): ...",
        "def net(): ...\nnet = wrapped(net)",
        "from json import loads as net",
        "import json as net",
        "net = lambda classes, size: None",
        "net: object = None",
        "class net: ...",
        "try:\n    from fast import net\nexcept ImportError:\n    from slow import net",
        "if True:\n    def net(): ...",
        "from other import *",
        "if False: ...\n" + 1200 * "elif False: ...\n" + "else:\n    def net(): ...",
    ],
)
def test_an_entry_point_is_found_without_being_imported(here: Path, source: str) -> None:
    Path("mine.py").write_text(f"{source}\nraise SystemExit('imported')")
    Path("in.toml").write_text(f'{NAME}[workload]\nmodel = "mine:net"')
    assert load_sweep(Path("in.toml")).workload.model == "mine:net"


def test_an_entry_point_is_found_where_an_editable_install_says(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such an install maps the package's name to a folder and adds no folder to the path."""
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setattr("sys.path", [folder for folder in __import__("sys").path if folder not in ("", str(root))])
    Path("in.toml").write_text(f'{NAME}[workload]\nmodel = "tula_hpc.workloads.small_cnns:compact_cnn"')
    assert load_sweep(Path("in.toml")).workload.model.endswith("compact_cnn")


def test_an_own_module_with_an_installed_ones_name_is_reported(here: Path) -> None:
    """Jobs would import the installed one."""
    Path("wave.py").write_text("def net(classes, image_size): ...")
    message = complaint(load_sweep, f'{NAME}[workload]\nmodel = "wave:net"')
    assert f"/wave.py defines no 'net'; it hides {here / 'wave.py'}, which needs another name" in message


def test_a_dot_in_place_of_the_colon_is_seen(here: Path) -> None:
    (here / "mine.py").write_text("def net(classes, image_size): ...")
    (here / "in.toml").write_text('name = "x"\n[workload]\nmodel = "mine.net"')
    with pytest.raises(InputError, match=r"'mine\.net' is not a torchvision .* \(did you mean 'mine:net'\?\)$"):
        load_sweep(here / "in.toml")


@pytest.mark.parametrize(
    "takes", ["", "classes", "a, b, c", "*, classes, image_size", "classes, size, *, depth", "**all"]
)
def test_a_function_that_cannot_be_called_as_it_will_be_is_refused_before_any_job(here: Path, takes: str) -> None:
    Path("mine.py").write_text(f"def net({takes}): ...")
    message = complaint(load_sweep, f'{NAME}[workload]\nmodel = "mine:net"')
    assert "mine.py defines it so that it cannot be called with (classes, image_size)" in message


@pytest.mark.parametrize(
    ("key", "given"), [("dataset", "(spec)"), ("loss", "(outputs, targets)"), ("metric", "(outputs, targets)")]
)
def test_each_kind_of_function_is_checked_against_its_arguments(here: Path, key: str, given: str) -> None:
    Path("mine.py").write_text("def mine(): ...")
    assert f"cannot be called with {given}" in complaint(load_sweep, f'{NAME}[workload]\n{key} = "mine:mine"')


def test_an_entry_point_that_is_bound_with_others_or_below_with_is_found(here: Path) -> None:
    Path("mine.py").write_text("net, loss = make()\nwith quiet():\n    from library import other\n")
    for name in ("net", "other"):
        Path("in.toml").write_text(f'{NAME}[workload]\nmodel = "mine:{name}"')
        assert load_sweep(Path("in.toml")).workload.model == f"mine:{name}"


@pytest.mark.parametrize(
    ("source", "message"),
    [("def other(): ...", "defines no 'net'"), ("def (", "is not valid Python"), ("\0", "Python")],
)
def test_an_entry_point_without_the_function_is_refused(here: Path, source: str, message: str) -> None:
    Path("mine.py").write_text(source)
    assert message in complaint(load_sweep, f'{NAME}[workload]\nmodel = "mine:net"')


@pytest.mark.parametrize(
    ("sweep", "cluster", "message"),
    [
        ({"search": {"cluster_sizes": [2, 8]}}, {"max_nodes": 4}, "s: search.cluster_sizes: 8 nodes, but c has max"),
        ({"workload": {"precision": "fp16"}}, {}, 's: workload.precision: fp16 needs device = "cuda"'),
        (
            {"search": {"cluster_sizes": [3], "min_batch": 32, "max_batch": 40}},
            {},
            "s: search.min_batch: no batch between 32 and 40 is a power of two times 3, the number of workers",
        ),
        (
            {"search": {"cluster_sizes": [1], "min_batch": 33, "max_batch": 40}},
            {},
            "s: search.min_batch: no batch between 33 and 40 is a power of two times 1, the number of workers",
        ),
    ],
)  # fmt: skip
def test_a_sweep_that_the_cluster_cannot_run_is_refused(
    sweep: dict[str, Any], cluster: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        check_together(
            SweepSpec.model_validate({"name": "a"} | sweep), ClusterSpec.model_validate(cluster), Path("s"), Path("c")
        )
    assert str(raised.value).startswith(message)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 5000), st.integers(0, 5000))
@settings(max_examples=100)
def test_local_batches_are_all_powers_of_two_within_the_bounds(
    nodes: int, workers: int, lowest: int, width: int
) -> None:
    search = SearchSpec(min_batch=lowest, max_batch=lowest + width)
    expected = [b for b in (2**k for k in range(15)) if lowest <= nodes * workers * b <= lowest + width]
    assert local_batches(search, nodes, workers) == expected


@pytest.mark.parametrize(
    ("changes", "nodes", "local_batch", "expected"),
    [
        ({}, 1, 512, [4, 8, 16, 32, 64, 128, 256]),
        ({}, 1, 16, [4, 8]),
        ({}, 1, 4, []),
        # one node has timed them
        ({}, 2, 512, []),
        # three nodes have no candidate
        ({"cluster_sizes": [3, 4, 8], "max_batch": 40}, 4, 8, [4]),
        ({"cluster_sizes": [2, 8]}, 2, 512, [4, 8, 16, 32, 64, 128, 256]),
        ({"mode": "full"}, 1, 512, []),
        # none has a single sample
        ({"min_batch": 2}, 1, 4, [2]),
    ],
)
def test_smaller_batches_are_timed_apart_on_the_fewest_nodes(
    changes: dict[str, Any], nodes: int, local_batch: int, expected: list[int]
) -> None:
    search = SearchSpec.model_validate({"cluster_sizes": [1, 2, 8], "min_batch": 32, "max_batch": 2048, **changes})
    assert batches_timed_apart(search, nodes, 1, local_batch) == expected


# Whatever a file contains, the result is a specification or an InputError.

keys = st.sampled_from(
    [*SweepSpec.model_fields, *SearchSpec.model_fields, *ClusterSpec.model_fields, "model", "dataset", "data_dir", "lr"]
) | st.text(max_size=5)
scalars = (
    st.none().map(lambda _: "resnet18")
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.dates()
    | st.sampled_from([*DATASETS, *TORCHVISION_MODELS[:3], "~x/y", "json:loads", "a.b:c", "/", "fp16", "slurm", "cuda"])
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)
tables = st.dictionaries(keys, values | st.dictionaries(keys, values, max_size=4), max_size=6)
fuzz = examples(30)


def load_anything(load: Load, content: bytes, overrides: Sequence[str] = ()) -> None:
    path = Path("in.toml")
    path.write_bytes(content)
    try:
        load(path, overrides)
    except InputError as error:
        lines = str(error).split("\n")
        assert all(line.startswith(("in.toml: ", "--set: ")) and line.isprintable() for line in lines), lines


@pytest.mark.parametrize("load", [load_sweep, load_cluster])
@given(table=tables)
@fuzz
def test_tables_of_all_kinds(here: Path, load: Load, table: dict[str, Any]) -> None:
    load_anything(load, tomli_w.dumps(table).encode(errors="surrogatepass"))


@given(data=st.data())
@fuzz
def test_a_good_file_with_a_damaged_place(here: Path, data: st.DataObject) -> None:
    good = (NAME + "[workload]\nepochs = 3\nlr = 5e-2\n[search]\ncluster_sizes = [1, 2]\n").encode()
    at = data.draw(st.integers(0, len(good)))
    damage = data.draw(st.binary(max_size=4) | st.sampled_from([b"[", b'"', b"=", b"\n", b".", b"{", b"#"]))
    load_anything(load_sweep, good[:at] + damage + good[at + data.draw(st.integers(0, 4)) :])


@given(override=st.text(max_size=30) | st.tuples(keys, st.text(max_size=20)).map("=".join))
@fuzz
def test_overrides_of_all_kinds(here: Path, override: str) -> None:
    load_anything(load_sweep, NAME.encode(), [override])


def test_a_file_of_the_other_kind_is_called_what_it_is(here: Path) -> None:
    assert complaint(load_cluster, NAME + "[workload]\n").startswith("in.toml: is a sweep file (it has [workload])")
    assert complaint(load_sweep, NAME + 'executor = "slurm"\n').startswith("in.toml: is a cluster file")


def test_a_cluster_of_slurm_says_so(here: Path) -> None:
    for key, text in (("partition", 'partition = "batch"\n'), ("partitions", '[[partitions]]\npartition = "a"\n')):
        message = complaint(load_cluster, text)
        assert message.startswith(
            f'in.toml: executor: is missing, and {key} is for Slurm; add executor = "slurm", or "local"'
        )
    dashes = complaint(load_cluster, 'executor = "slurm"\n[sbatch]\n"--mail-type" = "ALL"\n')
    assert dashes == 'in.toml: sbatch: options are written without dashes: mail-type, not "--mail-type"'


def test_a_misspelt_cluster_in_an_override_is_reported() -> None:
    with pytest.raises(InputError, match=r"^--set: clutser: unknown key \(did you mean 'cluster'\?\)$"):
        split_overrides(["clutser.exclusive=false"])
