"""Folders and files that others own or can change, and inputs that claim to be more than they are."""

from __future__ import annotations

import ast
import io
import os
import re
import shlex
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_checkpoint import forge, torch_bytes, zipped
from tests.fuzzing import fuzz
from tests.known import known
from tula_hpc.analysis.report.output import replace_files
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import ClusterSpec, load_cluster, load_sweep
from tula_hpc.errors import CheckpointError, InputError, RunDirectoryError, StorageError
from tula_hpc.files import foreign_link
from tula_hpc.launch.launcher import Launcher
from tula_hpc.launch.slurm_executor import trust_folder
from tula_hpc.records import RunDirectory
from tula_hpc.sweep import main

PACKAGE = Path(__file__).resolve().parents[1] / "tula_hpc"
STRANGER = 12345
SWEEP = 'name = "s"\n[search]\ncluster_sizes = [1]\nmin_batch = 32\nmax_batch = 64\n'
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(SWEEP)
    return tmp_path


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line with which the command refuses."""
    assert main(["sweep.toml", *arguments]) == 2
    output = capsys.readouterr().err
    assert output.endswith("\n")
    line = output[:-1]
    assert line.isprintable(), output
    assert len(line) < 500
    return line


# --- folders


def test_a_run_directory_is_private_whatever_the_umask_is(tmp_path: Path, open_umask: None) -> None:
    run = RunDirectory(tmp_path / "run").create()
    run.make_train("study/ags-b256-s0")
    CheckpointStore(run.train().checkpoints / "rounds").save({"x": 1}, samples_seen=1)
    folders = [run.root, *(path for path in run.root.rglob("*") if path.is_dir())]
    assert len(folders) == 9
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


def make_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER)


def make_file(path: Path) -> None:
    path.rmdir()
    path.touch()


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "group-writable": (lambda path: path.chmod(0o770), "others may write to it"),
    "world-writable": (lambda path: path.chmod(0o707), "others may write to it"),
    "sticky": (lambda path: path.chmod(0o1777), "others may write to it"),
    "another user's": (give_away, f"belongs to user id {STRANGER}"),
    "a link": (make_link, "is a symbolic link"),
    "a file": (make_file, "is not a folder"),
}
faults = [pytest.param(name, marks=needs_root if name == "another user's" else ()) for name in FAULTS]


@pytest.mark.parametrize("fault", faults)
@pytest.mark.parametrize("room", ["profile", "slurm", "train", "report"])
def test_a_room_that_may_not_be_trusted_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], room: str, fault: str
) -> None:
    run = RunDirectory(here / "run").create()
    run.report.mkdir(mode=0o700)
    run.sweep_file.touch()
    spoil, words = FAULTS[fault]
    spoil(run.root / room)
    assert f"{run.root / room}: {words}" in refusal(capsys, "--run-dir", "run").replace(
        "cannot be made: File exists", words
    )


@pytest.mark.parametrize("fault", faults)
@pytest.mark.parametrize("label", ["main", "study/ags-b256-s0"])
def test_a_training_folder_that_may_not_be_trusted_is_refused(tmp_path: Path, label: str, fault: str) -> None:
    run = RunDirectory(tmp_path / "run").create()
    spoil, words = FAULTS[fault]
    spoil(run.make_train(label).root)
    with pytest.raises((RunDirectoryError, StorageError), match=f"{words}|File exists"):
        run.make_train(label)


@pytest.mark.parametrize("fault", [name for name in faults if name.values[0] not in ("a link", "a file")])
def test_a_run_directory_that_may_not_be_trusted_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    run = RunDirectory(here / "run").create()
    run.sweep_file.touch()
    spoil, words = FAULTS[fault]
    spoil(run.root)
    assert words in refusal(capsys, "--run-dir", "run")
    assert run.sweep_file.read_text() == ""


def test_a_run_directory_behind_a_link_of_ones_own_is_fine(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    run = RunDirectory(tmp_path / "link" / "run").create()
    assert (tmp_path / "real" / "run" / "profile").is_dir()
    assert run.root == tmp_path / "link" / "run"


@needs_root
@pytest.mark.parametrize("where", ["the directory", "a folder above", "behind a link of ours", "by way of .."])
def test_a_strangers_link_is_not_followed(here: Path, capsys: pytest.CaptureFixture[str], where: str) -> None:
    (here / "real" / "run").mkdir(parents=True)
    for name in ("real/link", "link"):
        (here / name).symlink_to(here / "real")
        os.lchown(here / name, STRANGER, STRANGER)
    (here / "direct").symlink_to(here / "real" / "run")
    os.lchown(here / "direct", STRANGER, STRANGER)
    (here / "ours").symlink_to(here / "real" / "link")
    (here / "sub").mkdir()
    path = {
        "the directory": "direct",
        "a folder above": "link/run",
        "behind a link of ours": "ours/run",
        "by way of ..": "sub/../link/run",
    }[where]
    assert "on the way to it belongs to another user" in refusal(capsys, "--run-dir", path)
    assert not any((here / "real" / "run").iterdir())


def shared(folder: Path, mode: int) -> Path:
    folder.mkdir()
    folder.chmod(mode)
    return folder


@pytest.mark.parametrize("path", ["open/run", "open/ours/run", "link/run"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "old"])
def test_a_folder_above_in_which_anybody_can_exchange_the_run_directory_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], path: str, there: bool
) -> None:
    shared(shared(here / "open", 0o777) / "ours", 0o700)
    (here / "link").symlink_to(here / "open" / "ours")
    if there:
        (here / path).mkdir(mode=0o700)
    message = refusal(capsys, "--run-dir", path)
    assert f"chmod o-w {here / 'open'}, or chmod +t it" in message
    assert (here / path).exists() == there
    (here / "open").chmod(0o1777)
    RunDirectory(here / path).create()


def test_all_folders_that_others_may_write_to_are_refused_at_once(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(here / "shared" / "run").create()
    run.sweep_file.touch()
    # an empty one, too
    for folder in (run.profile, run.root, here / "shared"):
        folder.chmod(0o777)
    message = refusal(capsys, "--run-dir", str(run.root))
    command = f"chmod go-w {run.root} {run.profile} && chmod o-w {here / 'shared'}"
    assert f"if you trust it: {command}; or use another --run-dir" in message
    for words in command.split(" && "):
        subprocess.run(words.split(), check=True)
    run.create()


def test_a_run_directory_may_lie_in_a_projects_folder(tmp_path: Path, open_umask: None) -> None:
    """The folder is writable for a group, or for all with the sticky bit; the folders that are made are private."""
    for name, mode in (("project", 0o2770), ("scratch", 0o1777)):
        folder = shared(tmp_path / name, mode)
        assert RunDirectory(folder / "new" / "run").create().root.is_dir()
        assert (folder / "new").stat().st_mode & 0o777 == 0o700
        RunDirectory(folder / "new" / "run").create()


def test_links_that_lead_in_a_circle_are_no_endless_walk(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert foreign_link(tmp_path / "a" / "run") is not None


@pytest.mark.parametrize("name", ["a%jb", "a\\b", "a\nb", "a\rb", "a\x1bb", "a\x85b", "a\u2028b", "a\udcffb", "%"])
def test_a_path_that_a_job_script_would_read_otherwise_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for dry in ([], ["--dry-run"]):
        assert "a run directory's path may not hold" in refusal(capsys, "--run-dir", name, *dry)
    assert [path.name for path in here.iterdir()] == ["sweep.toml"]


@pytest.mark.parametrize("label", ["../x", "/etc", "a/../../x", ".."])
def test_a_label_does_not_lead_out_of_the_run_directory(tmp_path: Path, label: str) -> None:
    with pytest.raises(RunDirectoryError, match="is no name of a training"):
        RunDirectory(tmp_path).train(label)


def test_a_report_is_not_written_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "knee.svg").touch()
    (tmp_path / "report").symlink_to(tmp_path / "mine")
    with pytest.raises(RunDirectoryError, match="is a symbolic link"):
        replace_files(tmp_path / "report", ["knee"], {"report.html": b"x"})
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["knee.svg"]


# --- pickles and checkpoints


@needs_root
def test_a_job_does_not_load_a_pickle_from_a_folder_that_was_exchanged(tmp_path: Path) -> None:
    """A user who may write above a run directory can replace it while the job waits."""
    folder = tmp_path / "it's ours"
    folder.mkdir()
    script = "\n".join(["set -u", *trust_folder(folder), "echo loaded"])
    assert subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout == "loaded\n"
    give_away(folder)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{folder}: is not yours" in done.stderr


# torch's collectives of objects, as `all_gather_object`, unpickle what peers send
FORBIDDEN = re.compile(
    r"(cloud)?pickle\.loads?|marshal\.|shelve\.|eval$|exec$|os\.system|os\.popen|.*_object(_list|s)?$"
)
# a job's pickle, once it is known to be the one that was submitted
ALLOWED = {"job_files.py": {"pickle.loads"}, "find_model.py": {"gc.get_objects"}, "script.py": {"gc.get_objects"}}
ONLY_WITH = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False", "numpy.load": "allow_pickle=False"}


def dangers(path: Path) -> Iterator[str]:
    """Yield calls of a module that could run what it reads."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called, words = ast.unparse(node.func), {ast.unparse(word) for word in node.keywords}
            is_forbidden = FORBIDDEN.match(called) and called not in ALLOWED.get(path.name, ())
            if is_forbidden or "shell=True" in words or ONLY_WITH.get(called, called) not in {called, *words}:
                yield ast.unparse(node)


@pytest.mark.processes
def test_nothing_here_unpickles_or_evaluates() -> None:
    found = {str(path): list(dangers(path)) for path in PACKAGE.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize("fault", faults)
def test_checkpoints_in_a_folder_that_may_not_be_trusted_are_refused(tmp_path: Path, fault: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save({"x": 1}, samples_seen=1)
    spoil, words = FAULTS[fault]
    if fault == "a file":
        path.unlink()
    spoil(store.folder)
    for attempt in (store.load_latest, lambda: store.save({"x": 2}, samples_seen=2)):
        with pytest.raises(CheckpointError, match=f"{words}|File exists"):
            attempt()
    if fault != "a file":
        with pytest.raises(CheckpointError, match=words):
            CheckpointStore.load(path)


@needs_root
def test_a_strangers_checkpoint_is_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    good, bad = (store.save({"x": samples}, samples_seen=samples) for samples in (1, 2))
    give_away(bad)
    loaded = known(store.load_latest())
    assert (loaded.path, loaded.rejected) == (good, [(bad, f"belongs to user id {STRANGER}, not to you")])


def ask(name: str, argument: bytes) -> bytes:
    """Return a pickle {"x": NAME(argument)}."""
    module, _, function = name.rpartition(".")
    return b"\x80\x02}X\x01\x00\x00\x00x" + f"c{module}\n{function}\n".encode() + argument + b"\x85Rs."


def huge_tensor() -> bytes:
    """Return a tensor of four bytes whose storage claims two gibibytes."""
    whole = torch_bytes({"x": torch.zeros(1)})
    with zipfile.ZipFile(io.BytesIO(whole)) as opened:
        contents = {entry.filename: opened.read(entry) for entry in opened.infolist()}
    name = next(name for name in contents if name.endswith("data.pkl"))
    contents[name] = contents[name].replace(b"K\x01tq", b"J\x00\x00\x00\x20tq", 1)
    assert contents[name] != zipfile.ZipFile(io.BytesIO(whole)).read(name)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for entry, content in contents.items():
            made.writestr(entry, content)
    return file.getvalue()


# more names and numbers than are accepted
MANY = 40_000
TEN_GIB = b"\x8a\x05\x00\x00\x00\x80\x02"
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "bytearray": (lambda: zipped(ask("builtins.bytearray", TEN_GIB)), "a reference to builtins.bytearray"),
    "tensor": (lambda: zipped(ask("torch.Tensor", TEN_GIB)), "a reference to torch.Tensor"),
    "old tensor": (lambda: zipped(ask("torch.FloatTensor", TEN_GIB)), "a reference to torch.FloatTensor"),
    "storage": (lambda: zipped(ask("torch.storage.UntypedStorage", TEN_GIB)), "torch.storage.UntypedStorage"),
    "parameter": (lambda: zipped(ask("torch.nn.parameter.Parameter", TEN_GIB)), "torch.nn.parameter.Parameter"),
    "packed": (lambda: zipped(b"\x80\x02}.", packed=True, more={"archive/data/0": bytes(10**7)}), "is compressed"),
    "two pickles": (lambda: zipped(b"\x80\x02}.", more={"other/data.pkl": b"\x80\x02}."}), "does not hold"),
    "beyond its file": (huge_tensor, "does not match expected size"),
    "expanded": (lambda: torch_bytes({"x": torch.zeros(1).expand(10**10)}), "larger than the file"),
    "many values": (lambda: zipped(b"\x80\x02}X\x01\x00\x00\x00x](" + b"}" * MANY + b"es."), "too many names"),
    "a set": (lambda: zipped(b"\x80\x04}X\x01\x00\x00\x00x\x8fs."), "a set"),
    "nested": (lambda: zipped(b"\x80\x02}X\x01\x00\x00\x00x" + b"]" * 999 + b"a" * 998 + b"s."), "nested deeper"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_small_checkpoint_cannot_ask_for_a_large_memory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, words = BOMBS[kind]
    monkeypatch.setattr("tula_hpc.checkpoint.payload.MAX_INSTRUCTIONS", MANY)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save({"x": 1}, samples_seen=1)
    forge(store.folder / "checkpoint-r0000-000000000002.tula", make())
    loaded = known(store.load_latest())
    assert loaded.samples_seen == 1
    assert words in loaded.rejected[0][1]


# --- job scripts

SEPARATORS = ["\n", "\r\n", "\x00", "\x0b", "\x1b", "\x7f", "\x85", "\u2028"]
WORDS = ["partition", "account", "qos", "gres", "constraint", "controller_partition", "name"]
SHELLS = [" --uid=0", ";id", "$(id)", "`id`", "'x'", '"x"', "\\", ">x", "~x", "ü", "{x}", "#x"]


def refused(load: Callable[[Path], object], tables: dict[str, Any]) -> str:
    Path("in.toml").write_text(tomli_w.dumps(tables))
    with pytest.raises(InputError) as raised:
        load(Path("in.toml"))
    line = str(raised.value)
    assert line.isprintable(), line
    assert line.startswith("in.toml: ")
    return line


@pytest.mark.parametrize("separator", SEPARATORS, ids=ascii)
def test_no_value_starts_a_line_of_its_own(here: Path, separator: str) -> None:
    text = f"a{separator}#SBATCH --uid=0"
    places: list[dict[str, Any]] = [{key: text} for key in WORDS]
    places += [{"partitions": [{"partition": "p", key: text}]} for key in ("account", "qos", "gres", "constraint")]
    places += [{"partitions": [{"partition": text}]}, {"srun_args": [f"-{text}"]}, {"setup": [text]}]
    places += [{"sbatch": {"comment": text}}, {"sbatch": {text: "x"}}, {"sbatch": {f"comment{separator}x": 1}}]
    places += [{"environment": {"A": text}}, {"environment": {text: "x"}}, {"environment": {f"A{separator}B": "x"}}]
    for tables in places:
        refused(load_cluster, tables)
    refused(load_sweep, {"name": text})


@pytest.mark.parametrize("text", SHELLS)
def test_no_word_is_more_than_a_word(here: Path, text: str) -> None:
    for key in WORDS:
        refused(load_cluster, {key: f"a{text}"})
    for tables in ({"partitions": [{"partition": text}]}, {"sbatch": {"comment": text}}, {"sbatch": {text: 1}}):
        refused(load_cluster, tables)
    refused(load_cluster, {"environment": {f"A{text}": "x"}})


NAMES = ["../x", "/x", "..", ".x", "-x", "", "a\\b", "~", "a:b", "a*", "x" * 65, "a\u202eb", "\uff0e\uff0e", "a%j"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_leads_to_another_folder(here: Path, name: str) -> None:
    refused(load_sweep, {"name": name})
    refused(load_cluster, {"name": name})
    study: dict[str, Any] = {"batches": [128]}
    refused(load_sweep, {"name": "s", "study": {**study, "variants": {name: {"training": {"delta": 0.1}}}}})
    refused(load_sweep, {"name": "s", "study": {**study, "methods": [name]}})
    # an account or host may follow
    if name != "a:b":
        refused(load_cluster, {"partitions": [{"partition": name}]})


# in full, in short, and with the other line between words
OWN = ["array", "arr", "job-name", "job_name", "ntasks_per_node", "time", "dep", "wrap", "test-only", "input"]


@pytest.mark.parametrize("option", OWN)
def test_what_the_program_sets_is_not_set_twice(here: Path, option: str) -> None:
    assert f"sbatch: {option} is set by this program" in refused(load_cluster, {"sbatch": {option: 1}})


@pytest.mark.parametrize("line", ["#SBATCH --uid=0", "  #SBATCH -p x", "# sbatch x", "#PBS -l x", "#BSUB -q x"])
def test_setup_is_for_the_shell(here: Path, line: str) -> None:
    assert "expected lines for the shell" in refused(load_cluster, {"setup": [line]})


@pytest.mark.parametrize("word", ["bash", "", "-", "--", "x -K1", "/bin/sh", "$X", "-1", "--mpi pmix"])
def test_srun_runs_nothing_else(here: Path, word: str) -> None:
    assert "expected options with their values in one word" in refused(load_cluster, {"srun_args": [word]})


def script_of(tables: dict[str, Any], root: Path) -> list[str]:
    cluster = ClusterSpec.model_validate({"executor": "slurm", **tables})
    launcher = Launcher(cluster, RunDirectory(root), "tula-x")
    return launcher.script(stage="train", nodes=1, minutes=60, tasks=2).split("\n")


LINES = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\u2028\u2029"), max_size=30)


@given(value=LINES, place=LINES)
@fuzz(25)
def test_whatever_is_accepted_stays_in_its_place(value: str, place: str) -> None:
    """The script has the same lines, and the shell and sbatch read every value as it was given."""
    root = Path("/runs") / place.replace("%", "").replace("\\", "").replace("/", "")
    plain = script_of({"environment": {"A": "x"}, "srun_args": ["--x="], "sbatch": {"comment": "x"}}, Path("/runs/x"))
    tables = {"environment": {"A": value}, "srun_args": [f"--x={value}"], "sbatch": {"comment": "a=b,c"}}
    script = script_of(tables, root)
    assert len(script) == len(plain)
    directives = [line for line in script if line.startswith("#SBATCH")]
    assert [line.partition("=")[0] for line in directives] == [
        line.partition("=")[0] for line in plain if line.startswith("#SBATCH")
    ]
    assert f"--x={value}" in shlex.split(next(line for line in script if line.startswith("srun")))
    output = next(line for line in directives if "--output=" in line)
    assert shlex.split(output.removeprefix("#SBATCH "))[0].startswith(f"--output={root}")


# --- sizes and kinds of files

ABSURD = [
    "[workload]\nlr = 1e400",
    "[workload]\nlr = 1e31",
    f"[workload]\nepochs = 1{'0' * 4000}",
    f"[workload]\nepochs = 1{'0' * 5000}",
    "[workload]\nepochs = 100001",
    "[workload]\nsamples = 9999999999999999",
    "[workload]\nclasses = 10000000",
    f"[workload]\nmodel = '{'x' * 100_000}'",
    f"[workload]\ndata_dir = '~{'x' * 100_000}/a'",
    f"[workload]\nmilestones = [{','.join(map(str, range(2000)))}]",
    f"[search]\ncluster_sizes = [{','.join(map(str, range(66_000)))}]",
    f"[objective]\ndeadline_hours = '{'1' * 100_000}h'",
    "[objective]\ntime_weight = 1e9",
    "[objective]\nmax_global_batch = 99999999999999999999",
    "[training]\nmax_requeues = 99999999999",
    f"[study]\nmethods = ['lbt']\nbatches = {list(range(1, 102))}\nseeds = {list(range(1000))}",
    f"[study]\nmethods = ['lbt']\nbatches = [64]\nbase_lrs = [{','.join(f'0.{n}' for n in range(1, 1000))}]",
    "[study]\nbatches = [64]\n" + "".join(f"[study.variants.v{n}]\ntraining.delta = 1.0\n" for n in range(1001)),
    "".join(f"k{n} = 1\n" for n in range(5000)),
    f"{'k' * 100_000} = 1",
    f"a = {'[' * 20_000}",
    f"a = {'{a = ' * 20_000}",
    f"{'a.' * 100_000}a = 1",
    ".".join(['"="'] * 50_000) + " = 1",
    f"[{'.'.join(['a'] * 5000)}]",
    f"a = '{'x' * 100_000}",
    'a = "\x00"',
    "\ufeff\ufeffx = 1",
]


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=[pytest.mark.processes] * (len(text) > 300_000)) for text in ABSURD],
    ids=range(len(ABSURD)),
)
def test_an_absurd_sweep_is_refused_in_a_few_short_lines(
    here: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path("sweep.toml").write_text(f'name = "s"\n{text}', encoding="utf-8")
    assert main(["sweep.toml", "--dry-run"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 21
    assert all(line.isprintable() and len(line) < 2000 and line.startswith("sweep.toml: ") for line in lines)


ABSURD_CLUSTERS = [
    "memory_gb = 1e308",
    "memory_gb = 1e10",
    f"memory_gb = 1{'0' * 4000}",
    "train_minutes = 999999999999",
    "signal_delay_s = 65536",
    "setup = [" + '"x",' * 2000 + "]",
    f"setup = ['{'x' * 1001}']",
    f"[sbatch]\nnice = 1{'0' * 100}",
    "[sbatch]\nnice = 4294967296",
    "[sbatch]\n" + "".join(f"k{n} = 1\n" for n in range(101)),
    "[environment]\n" + "".join(f"K{n} = '1'\n" for n in range(1001)),
    f"[pricing]\nbasis = 'tres'\ntres_weights = 'CPU={'1' * 500_000}x'",
    "[pricing]\nusd_per_node_hour = 1e31",
    "".join(f"[[partitions]]\npartition = 'p{n}'\n" for n in range(101)),
]


@pytest.mark.parametrize("text", ABSURD_CLUSTERS, ids=range(len(ABSURD_CLUSTERS)))
def test_an_absurd_cluster_is_refused_in_a_short_line(here: Path, text: str) -> None:
    Path("in.toml").write_text(text)
    with pytest.raises(InputError) as raised:
        load_cluster(Path("in.toml"))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def make_sparse(path: Path, size: int) -> None:
    path.write_bytes(b"")
    os.truncate(path, size)


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "100 MB": (lambda path: make_sparse(path, 100_000_000), "expected a TOML file under 1,000,000 bytes"),
    "a terabyte": (lambda path: make_sparse(path, 10**12), "expected a TOML file under 1,000,000 bytes"),
    "folder": (lambda path: path.mkdir(), "is a folder; expected a TOML file"),
    "pipe": (os.mkfifo, "found a pipe or a device"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "found a pipe or a device"),
    "circle": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "binary": (lambda path: path.write_bytes(bytes(range(256))), "save the file as UTF-8"),
    "latin": (lambda path: path.write_bytes('name = "ü"'.encode("latin-1")), "save the file as UTF-8"),
    "utf-16": (lambda path: path.write_bytes(SWEEP.encode("utf-16")), "save the file as UTF-8"),
    "gone": (lambda path: None, "no such file"),
}


@pytest.mark.parametrize("option", [(), ("--cluster", "sweep.toml")], ids=["sweep", "cluster"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_input_file_is_refused_without_being_read(
    here: Path, capsys: pytest.CaptureFixture[str], kind: str, option: tuple[str, ...]
) -> None:
    make, words = KINDS[kind]
    if option:
        Path("good.toml").write_text(SWEEP)
    Path("sweep.toml").unlink()
    make(Path("sweep.toml"))
    tracemalloc.start()
    assert main(["good.toml" if option else "sweep.toml", *option, "--dry-run"]) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    output = capsys.readouterr().err
    assert output.startswith("sweep.toml: ")
    assert words in output
    assert output.count("\n") == 1
    assert peak < 20_000_000


@pytest.mark.parametrize(
    "override",
    ["name=../x", "name=a\nb", "cluster.sbatch.comment=a b", "workload.lr=1e400", "a" + ".a" * 20_000 + "=1"],
)
def test_overrides_have_the_same_limits(here: Path, capsys: pytest.CaptureFixture[str], override: str) -> None:
    Path("c.toml").write_text('name = "c"')
    assert refusal(capsys, "--cluster", "c.toml", "--set", override, "--dry-run")
