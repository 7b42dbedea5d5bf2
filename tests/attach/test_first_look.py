"""`python -m tula_hpc.attach` prints a sweep file for a script."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from tests.attach.script_runs import SCRIPTS
from tests.forked_jobs import run_command, start_command
from tula_hpc.attach.__main__ import main
from tula_hpc.attach.reporting import end_of
from tula_hpc.attach.script import ParsedOptions, note_parsed, watch_parsers, with_placeholders
from tula_hpc.config import ClusterSpec, check_together, load_sweep, load_together
from tula_hpc.errors import InputError
from tula_hpc.init.__main__ import main as init
from tula_hpc.init.script_options import read_options

# a script that notes its process and does not end by itself
SLEEPING = """
import os, sys, time
with open(sys.argv[1], "w") as file:
    print(os.getpid(), file=file)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def outputs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have runs that fail leave their output in a folder of the tests, with a short path for sockets."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("look")))


def look(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fork, as the script's process runs."""
    return run_command(main, arguments, folder)


def test_what_a_script_opens_for_collectives_listens_on_this_machine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others on a login node must not reach a process group that the script makes."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    (tmp_path / "train.py").write_text("import os\nraise RuntimeError(os.environ['GLOO_SOCKET_IFNAME'])\n")
    assert "RuntimeError: lo\n" in look(tmp_path, "train.py").stderr


def test_the_output_is_a_sweep_file_that_lacks_only_the_epochs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text((SCRIPTS / "plain.py").read_text())
    options = ["--batch-size", "16", "--epochs", "2", "--samples", "640"]
    done = look(tmp_path, "train.py", *options)
    assert done.returncode == 0, done.stderr
    assert "it ended after 80 steps; running it again to measure fewer of them" in done.stderr
    assert "16 samples a forward pass, 1 forward pass a step" in done.stdout
    # one for the whole process, one for this rank
    held, own = re.findall(r"[\d.]+ [MG]iB", next(line for line in done.stdout.splitlines() if "memory " in line))
    assert held != own
    path = tmp_path / "mine.toml"
    path.write_text(done.stdout)
    # these values of the look are not those of the training
    with pytest.raises(InputError, match="epochs: is required with a script"):
        load_sweep(path)
    sweep = load_sweep(path, ["workload.epochs=90"])
    check_together(sweep, ClusterSpec(max_nodes=len(os.sched_getaffinity(0))), path, "this machine")
    work = sweep.workload
    assert (sweep.name, work.script, work.samples) == ("train", script, 640)
    assert work.arguments == ("--batch-size", "{local_batch}", "--epochs", "{epochs}", "--samples", "640")
    assert (sweep.search.min_batch, sweep.training.base_batch) == (16, 16)
    assert [line.split()[1] for line in done.stdout.splitlines() if line.endswith("unknown")] == [
        "epochs",
        "resume_arguments",
        "metric",
    ]


def test_the_file_of_init_gets_its_missing_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text((SCRIPTS / "plain.py").read_text())
    assert init(["--script", "train.py"]) == 0
    (needs,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train.toml")]
    assert needs == "train.toml: a sweep of train.py. It still needs samples; tula attach fills in what it sees."
    before = (tmp_path / "train.toml").read_text()
    done = look(tmp_path, "--into", "train.toml", "train.py", "--batch-size", "16", "--epochs", "500")
    assert done.stdout.splitlines()[-1] == "train.toml: filled in samples = 2048; it is complete."
    assert done.stdout.startswith("model       ")
    sweep, _ = load_together(tmp_path / "train.toml", tmp_path / "cluster.toml")
    assert sweep.workload.samples == 2048
    after = (tmp_path / "train.toml").read_text()
    changed = [new for old, new in zip(before.splitlines(), after.splitlines(), strict=True) if old != new]
    assert [line.split()[0] for line in changed] == ["samples"]
    done = look(tmp_path, "--into", "train.toml", "train.py", "--batch-size=16", "--epochs", "500", "--samples", "640")
    assert done.stdout.splitlines()[-1] == "train.toml: filled in arguments with --samples 640; it is complete."
    sweep, _ = load_together(tmp_path / "train.toml", tmp_path / "cluster.toml")
    assert sweep.workload.arguments[:2] == ("--samples", "640")
    # no argument of the run carries the batch, because it comes from the file
    done = look(tmp_path, "--into", "train.toml", "train.py", "--epochs", "500", "--lr", "0.01")
    assert done.stdout.splitlines()[-1] == "train.toml: filled in arguments with --lr 0.01; it is complete."
    sweep, _ = load_together(tmp_path / "train.toml", tmp_path / "cluster.toml")
    seen: dict[str, object] = {"forward_batch": 64, "accumulation": 2, "samples": None, "others": []}
    seen["measurement"] = {"status": "oom", "nodes": 1, "workers_per_node": 1, "local_batch": 1, "finished_at": 0.0}
    seen["options"] = {"names": {}, "values": {}}
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    for argument in (["--batch-size=32"], ["--batch-size", "32"]):
        assert main(["--into", "train.toml", "train.py", *argument]) == 1
        assert "asked for 32 samples a forward pass, the model got 64: look at" in capsys.readouterr().err
    assert main(["--into", "train.toml", "train.py", "--batch-size", "64"]) == 0
    assert "train.toml: filled in accumulation = 2; it is complete." in capsys.readouterr().out
    base_batch = sweep.training.base_batch
    sweep, _ = load_together(tmp_path / "train.toml", tmp_path / "cluster.toml")
    assert (sweep.workload.accumulation, sweep.training.base_batch) == (2, 2 * base_batch)
    text = (tmp_path / "train.toml").read_text()
    (tmp_path / "train.toml").write_text(text.replace("accumulation = 2 ", "accumulation = 1 "))
    assert main(["--into", "train.toml", "train.py", "--batch-size", "64"]) == 0
    advice = f"a step took 2 forward passes here: set accumulation to 2 and base_batch to {4 * base_batch}; it is"
    assert advice in capsys.readouterr().out
    seen["device"] = "cpu"
    assert main(["train.py", "configs/b64.yaml"]) == 0
    printed = capsys.readouterr().out
    assert 'arguments = ["configs/b{local_batch}.yaml"]' in printed
    assert "a file is named after 64, the batch: write one for each batch that is tried" in printed
    with pytest.raises(SystemExit, match="2"):
        main(["--into"])
    assert main(["--into", "gone.toml", "train.py"]) == 2
    assert "gone.toml: no such file; tula init --script writes it" in capsys.readouterr().err


def test_an_interrupt_ends_the_script_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPING)
    noted = tmp_path / "process"
    noted.touch()
    # in the background of a shell the signal would be ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = start_command(main, ["train.py", str(noted)], tmp_path, tmp_path / "output")
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        ends = time.monotonic() + 240
        while not noted.read_text():
            assert command.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.02)
        command.send_signal(signal.SIGINT)
        assert command.wait() == 130
    finally:
        command.kill()
    assert not Path("/proc", noted.read_text().strip()).exists()
    message = "\ninterrupted: the script has ended, and no sweep file was written\n"
    assert (tmp_path / "output").read_text().endswith(message)


@pytest.mark.parametrize("option", [["--into", "train.toml"], ["--into=train.toml"]])
def test_an_option_behind_the_script_is_recognized_when_the_script_refuses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: InputError("unrecognized arguments: --into"))
    assert main(["train.py", *option]) == 1
    advice = "--into stands after train.py and went to it: write it before train.py\n"
    assert capsys.readouterr().err.endswith(advice)
    # one of the script's own
    Path("train.toml").write_text('[workload]\nscript = "train.py"')
    assert main(["--into", "train.toml", "train.py", *option]) == 1
    assert advice not in capsys.readouterr().err


def test_a_module_whose_source_cannot_be_read_gets_its_sweep_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("of_another_python.py").write_text("print 1")
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of())
    assert main(["-m", "of_another_python", "--batch-size", "7"]) == 0
    assert 'arguments = ["--batch-size", "{local_batch}"]' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "lines", "is_advised"),
    [
        ("train.py", "world_size = 1\nassert world_size > 1", True),
        # as in MoCo's
        ("train.py", 'raise NotImplementedError("Only DistributedDataParallel is supported.")', True),
        ("train.py", "import torch.distributed\ntorch.distributed.get_rank()", True),
        ("world_size_utils.py", "raise KeyError", False),
        ("train.py", "import torch.distributed.no_such", False),
    ],
)
def test_a_script_for_several_workers_is_recognized_by_its_code(
    tmp_path: Path, name: str, lines: str, is_advised: bool
) -> None:
    (tmp_path / name).write_text(f"{lines}\n")
    done = look(tmp_path, name)
    assert done.returncode == 1
    assert ("complete the sweep file of tula init --script without" in done.stderr) == is_advised


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[workload]\nscript = "z.py"', 'workload.script: is "z.py"; expected the sweep file of '),
        ('[workload]\nscript = "~nobody-here/z.py"', "workload.script: is "),
        ("[workload]\nepochs = 3", "workload.script: is missing; expected the sweep file of "),
        ('executor = "local"', "workload.script: is missing"),
        ("[workload", "is not valid TOML"),
    ],
)
def test_the_file_of_another_script_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "z.py"):
        Path(name).touch()
    Path("other.toml").write_text(text)
    assert main(["--into", "other.toml", "train.py", "--epochs", "2"]) == 2
    assert capsys.readouterr().err.startswith(f"other.toml: {message}")
    assert Path("other.toml").read_text() == text


def test_json_has_the_same_in_one_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    seen: dict[str, object] = {
        "forward_batch": 64,
        "accumulation": 1,
        "samples": None,
        "others": ["Critic"],
        "measurement": {},
        "options": {"names": {}, "values": {}},
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    assert main(["--json", "train.py", "--bs", "64", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["workload"]["arguments"] == ["--bs", "{local_batch}", "--json"]
    assert (output["unknown"], output["others"], output["schema_version"]) == (["samples", "epochs"], ["Critic"], 1)
    assert not {"samples", "epochs"} & output["workload"].keys()


@pytest.mark.parametrize(
    ("arguments", "names", "suggested"),
    [
        ("--batch-size 128 --lr 1", {}, ["--batch-size", "{local_batch}", "--lr", "1"]),
        ("--batch=128 --lr 1", {}, ["--batch={local_batch}", "--lr", "1"]),
        ("--lr 1", {"-b": "--batch_size"}, ["--lr", "1", "--batch_size", "{local_batch}"]),
        ("--lr 1", {}, ["--lr", "1", "--batch-size", "{local_batch}"]),
        ("--eval-batch-size 9", {"--n-minibatches": "--n-minibatches", "--mini-batch": "--mini-batch"},
         ["--eval-batch-size", "9", "--mini-batch", "{local_batch}"]),
    ],
)  # fmt: skip
def test_without_an_argument_for_the_batch_an_option_of_the_script_is_suggested(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    names: dict[str, str],
    suggested: list[str],
) -> None:
    seen: dict[str, object] = {"forward_batch": 7, "accumulation": 2, "samples": 640, "others": [], "device": "cpu"}
    seen["measurement"] = {"status": "oom", "nodes": 1, "workers_per_node": 1, "local_batch": 1, "finished_at": 0.0}
    seen["options"] = {"names": names, "values": {}}
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    assert main([str(SCRIPTS / "plain.py"), *arguments.split()]) == 0
    assert f"arguments = {json.dumps(suggested)}" in capsys.readouterr().out


def seen_of(**facts: object) -> dict[str, object]:
    """What a run of a script might show, with these facts."""
    failed = {"status": "oom", "nodes": 1, "workers_per_node": 1, "local_batch": 1, "finished_at": 0.0}
    seen: dict[str, object] = {"forward_batch": 7, "accumulation": 1, "samples": 640, "others": [], "device": "cpu"}
    return {**seen, "measurement": failed, "options": {"names": {}, "values": {}}, **facts}


@pytest.mark.parametrize(
    ("source", "resume"),
    [
        ('parser.add_argument("--resume")\ntorch.save(model, "last.pt")', 'resume_arguments = ["--resume", "last.pt"]'),
        ('parser.add_argument("--resume", action="store_true")', 'resume_arguments = ["--resume"]'),
        ("", '# resume_arguments = ["--resume", "last.pt"] # options that resume it, [] if it does by itself; '),
        ("import tula_hpc.attach as tula\ntula.keep(model=model)", ""),
    ],
)
def test_what_is_printed_says_how_the_script_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str, resume: str
) -> None:
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of())
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    for arguments in (["train.py"], ["-m", "train"]):
        assert main([*arguments, "--bs", "7", "--max_steps", "9"]) == 0
        printed = capsys.readouterr().out
        assert ("resume_arguments" in printed) == bool(resume)
        assert f"\n{resume}" in printed
        assert re.search(r"\n# epochs = .*; {steps} is epochs \* samples / global batch: unknown\n", printed)


@pytest.mark.parametrize(("option", "line"), [("--accum 3", "accumulation = 2"), ("", "# accumulation = 2 ")])
def test_passes_that_cannot_be_planned_are_not_printed_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, line: str
) -> None:
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of(accumulation=3))
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["train.py", "--bs", "7", *option.split()]) == 0
    printed = capsys.readouterr().out
    assert f"\n{line}" in printed
    Path("train.toml").write_text(printed)
    sweep = load_sweep(Path("train.toml"), ["workload.epochs=9"])
    assert (sweep.workload.accumulation, sweep.training.base_batch) == (2 if option else 1, 21)
    Path("train.toml").write_text(printed.replace("accumulation = 2", "accumulation = 1"))
    assert main(["--into", "train.toml", "train.py", "--bs", "7", *option.split()]) == 0
    advice = "set accumulation to 2 and base_batch to 63" if option else "and only powers of two can be planned: give"
    assert advice in capsys.readouterr().out


@pytest.mark.parametrize("given", ["--accum=4", ""])
def test_passes_that_a_script_divides_among_its_workers_are_as_many_as_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    """nanoGPT does so. A run of one worker takes all of them, which says nothing about several workers."""
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of(accumulation=4))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    source = "batch = 7\naccum = 4\nexec(open('configurator.py').read())\naccum //= world_size\n"
    Path("train.py").write_text(source)
    run = ["train.py", "--batch=7", *given.split()]
    assert main(run) == 0
    printed = capsys.readouterr().out
    assert '\narguments = ["--batch={local_batch}", "--accum={workers}"]' in printed
    assert "\naccumulation" not in printed
    assert init(["--script", "train.py"]) == 0
    assert main(["--into", "train.toml", *run]) == 0
    assert "passes" not in capsys.readouterr().out.splitlines()[-1]


def test_a_pass_of_more_samples_than_the_data_set_has_items_leaves_the_samples_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The items may be several views of an image; the batch of the step is within the bounds."""
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of(forward_batch=1024))
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["train.py", "--batch", "1024"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"\n# samples = .* of a pass are counted: the data set has only 640 items: unknown\n", printed)
    Path("train.toml").write_text(printed)
    sweep = load_sweep(Path("train.toml"), ["workload.epochs=9", "workload.samples=655360"])
    assert sweep.search.min_batch == sweep.training.base_batch == 1024
    assert sweep.search.max_batch > 1024


def test_an_option_that_only_the_source_shows_is_named_to_carry_the_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags of absl are in no parser that is watched, and the run may have left them at their defaults."""
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of())
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('from absl import flags\nflags.DEFINE_integer("batch_size", 7, "")\n')
    assert main(["train.py"]) == 0
    asked = '\n# arguments = ["--batch_size", "{local_batch}"] # no argument is 7, the batch that the model got: '
    assert asked in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "suggested"),
    [
        (["--config", "conf/base.yaml"], ["--config", "conf/base-{local_batch}.yaml"]),
        (["--config=base.yml", "--debug"], ["--config=base-{local_batch}.yml", "--debug"]),
        (["--debug"], ["--debug", "--batch-size", "{local_batch}"]),
    ],
)
def test_a_file_of_settings_may_set_the_batch_of_a_script_without_an_option_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: list[str],
    suggested: list[str],
) -> None:
    seen = seen_of(options={"names": {"--config": "--config", "--debug": "--debug"}, "values": {}})
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    (tmp_path / "train.py").touch()
    assert main([str(tmp_path / "train.py"), *given]) == 0
    printed = capsys.readouterr().out
    assert f"\n# arguments = {json.dumps(suggested)} # no argument is 7, the batch that the model got" in printed
    assert (" for each batch that is tried, if it is set there: unknown\n" in printed) == (given != ["--debug"])


def test_where_the_script_has_no_option_for_its_batch_the_file_gets_the_runs_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = seen_of(options={"names": {"--lr": "--lr"}, "values": {}})
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text('parser.add_argument("--lr")\nparser.add_argument("data")\n')
    assert init(["--script", "train.py"]) == 0
    assert main(["--into", "train.toml", "train.py", "pictures", "--lr", "1"]) == 0
    assert capsys.readouterr().out.endswith("; fill in arguments and epochs by hand.\n")
    asked = '\n# arguments = ["pictures", "--lr", "1", "--batch-size", "{local_batch}"] # no argument is 7, the batch '
    text = Path("train.toml").read_text()
    assert (asked in text, text.count("# arguments = ")) == (True, 1)


@pytest.mark.parametrize("parsed", [False, True])
def test_a_script_that_takes_only_a_file_of_settings_is_given_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, parsed: bool
) -> None:
    seen: dict[str, object] = {"forward_batch": 7, "accumulation": 1, "samples": 640, "others": [], "device": "cpu"}
    seen["measurement"] = {"status": "oom", "nodes": 1, "workers_per_node": 1, "local_batch": 1, "finished_at": 0.0}
    seen["options"] = {"names": {"--batch": "--batch"} if parsed else {}, "values": {}}
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    own = '["--batch", "{local_batch}"]'
    Path("train.toml").write_text(f'name = "a"\n[workload]\nscript = "train.py"\narguments = {own}\n')
    assert main(["--into", "train.toml", "train.py", "args.json"]) == 0
    printed = capsys.readouterr().out
    both = '["args.json", "--batch", "{local_batch}"]'
    assert f"arguments = {both if parsed else own}" in Path("train.toml").read_text()
    by_hand = 'fill in arguments = ["args-{local_batch}.json"] (the script was given only args.json and parsed no '
    assert (by_hand in printed, "it is complete" in printed) == (not parsed, parsed)


@pytest.mark.parametrize(
    ("source", "suggested"),
    [
        ("", {"train.batch_size=128 lr=1": "train.batch_size={local_batch} lr=1"}),
        ("", {"lr=1 epochs=9": "lr=1 epochs={epochs} batch_size={local_batch}"}),
        ("", {"--lr=1": "--lr=1 --batch-size {local_batch}"}),
        (
            "load(cfg.data.batch)",
            {"lr=1": "lr=1 data.batch={local_batch}", "--lr=1": "--lr=1 --batch-size {local_batch}"},
        ),
        ("import hydra\n@hydra.main()\ndef f(cfg): load(cfg.data.batch)", {"lr=1": "lr=1 data.batch={local_batch}"}),
    ],
)
def test_a_script_that_takes_keys_is_suggested_one_for_its_batch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    suggested: dict[str, str],
) -> None:
    seen: dict[str, object] = {"forward_batch": 7, "accumulation": 1, "samples": 640, "others": [], "device": "cpu"}
    seen["measurement"] = {"status": "oom", "nodes": 1, "workers_per_node": 1, "local_batch": 1, "finished_at": 0.0}
    seen["options"] = {"names": {"--help": "--help"}, "values": {}}
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen)
    (tmp_path / "train.py").write_text(source)
    for arguments, expected in suggested.items():
        assert main([str(tmp_path / "train.py"), *arguments.split()]) == 0
        assert f"arguments = {json.dumps(expected.split())}" in capsys.readouterr().out


@pytest.mark.parametrize("before", ["epoch 1\n" * 9, ""])
def test_a_traceback_is_shown_from_its_first_line_on(tmp_path: Path, before: str) -> None:
    frames = "".join(f'  File "train.py", line {n}, in f\n    f()\n' for n in range(20))
    traceback = f"Traceback (most recent call last):\n{frames}ValueError: no such key\n"
    log = tmp_path / "rank-0.log"
    log.write_text(before + traceback)
    assert end_of(log) == traceback
    log.write_text(traceback + "  a list\n" * 11 + "epoch 2\n")
    assert end_of(log) == "  a list\n" * 11 + "epoch 2\n"


def test_a_script_that_fails_gives_one_line(tmp_path: Path) -> None:
    done = look(tmp_path, str(SCRIPTS / "misbehaving.py"), "imports nothing", "4")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ModuleNotFoundError: No module named 'no_such_module' (misbehaving.py:" in done.stderr.splitlines()[-1]
    # as Python shows it, without the functions that have called the script
    assert 'Traceback (most recent call last):\n  File "' + str(SCRIPTS / "misbehaving.py") in done.stderr


@pytest.mark.parametrize(("case", "is_told"), [("one iterator", True), ("shared", False)])
def test_an_iterator_that_continues_over_epochs_is_reported(tmp_path: Path, case: str, *, is_told: bool) -> None:
    options = ["--batch-size", "8", "--epochs", "100", "--log", "log", case]
    done = look(tmp_path, str(SCRIPTS / "odd_loops.py"), *options)
    assert done.returncode == 0, done.stderr
    assert ("# resume      after an interruption the script may continue with other samples" in done.stdout) is is_told


def test_without_a_sweep_file_the_message_says_where_to_choose_the_model_that_counts(tmp_path: Path) -> None:
    done = look(tmp_path, str(SCRIPTS / "misbehaving.py"), "feeds a critic", "4")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("misbehaving.py takes 2 batches of its loader for a step of Linear")
    key = 'set workload.counted_model = "Linear" in a sweep file, which tula init --script writes'
    assert f": {key}, and name that file by --into; its output: " in done.stderr


def test_training_on_another_device_is_refused_with_both_remedies(tmp_path: Path) -> None:
    done = look(tmp_path, "--device", "cuda", str(SCRIPTS / "plain.py"), "--batch-size", "16", "--epochs", "50")
    assert done.returncode == 1
    mistake = 'plain.py trains on cpu, but cuda is to be measured; move the model there, or set device = "cpu"'
    assert done.stderr.splitlines()[-1].startswith(mistake)


def test_a_refusal_is_printed_once(tmp_path: Path) -> None:
    done = look(tmp_path, str(SCRIPTS / "misbehaving.py"), "spawns", "4")
    assert (done.returncode, done.stderr.count("starts workers of its own")) == (1, 1)


def test_a_missing_script_is_refused(tmp_path: Path) -> None:
    done = look(tmp_path, "gone.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"SCRIPT: no such file: {tmp_path / 'gone.py'}\n"
    assert look(tmp_path, ".").stderr == f"SCRIPT: {tmp_path} is a folder; expected a training script\n"
    done = look(tmp_path, "torchrun", "--nproc-per-node=1", "gone.py")
    assert done.stderr == "SCRIPT: tula attach starts Python itself; leave out torchrun and its options\n"


@pytest.mark.parametrize(
    ("arguments", "batch", "passes", "expected"),
    [
        (["--batch-size", "64"], 64, 1, ["--batch-size", "{local_batch}"]),
        (["--batch-size=64", "--width=64"], 64, 1, ["--batch-size={local_batch}", "--width=64"]),
        (["--width", "64", "-b", "64", "--bs", "64"], 64, 1, ["--width", "64", "-b", "64", "--bs", "{local_batch}"]),
        (
            ["--width=64", "--bsz", "64", "--test-bsz=64"],
            64,
            1,
            ["--width=64", "--bsz", "{local_batch}", "--test-bsz=64"],
        ),
        (["--width=64", "--imgs-per-gpu=64"], 64, 1, ["--width=64", "--imgs-per-gpu={local_batch}"]),
        (
            ["--bs=8", "--width=3", "--grad-acc", "3"],
            8,
            3,
            ["--bs={local_batch}", "--width=3", "--grad-acc", "{accumulation}"],
        ),
        (["train.batch=64", "epochs=3"], 32, 2, ["train.batch={global_batch}", "epochs={epochs}"]),
        (["--batch", "64", "--micro_batch=32"], 32, 2, ["--batch", "{global_batch}", "--micro_batch={local_batch}"]),
        (["--batch", "32", "--eval_batch=64"], 32, 2, ["--batch", "{local_batch}", "--eval_batch=64"]),
        (["64"], 64, 1, ["{local_batch}"]),
        (["--batch-size", "64", "--width", "65"], 65, 1, ["--batch-size", "{local_batch}", "--width", "65"]),
        (["--batch_size=8", "--max_iters=100"], 8, 1, ["--batch_size={local_batch}", "--max_iters={steps}"]),
        (["--bs=8", "--epochs=2", "--max-steps=9"], 8, 1, ["--bs={local_batch}", "--epochs={epochs}", "--max-steps=9"]),
        (["-B", "8", "--total_batch=4096"], 8, 4, ["-B", "{local_batch}", "--total_batch={global_batch*128}"]),
        (["--total-batch-size", "4096"], 8, 4, ["--total-batch-size", "{global_batch*128}"]),
        (["--total-batch-size", "8"], 8, 1, ["--total-batch-size", "{global_batch}"]),
        (["SOLVER.IMS_PER_BATCH", "8"], 8, 1, ["SOLVER.IMS_PER_BATCH", "{global_batch}"]),
        (["--total_batch=8", "--bs=8"], 8, 1, ["--total_batch={global_batch}", "--bs={local_batch}"]),
        # a script with its own way of loading
        (["--total_batch", "4096"], 0, 1, ["--total_batch", "4096"]),
        (["--batch", "16", "--batch-workers", "0"], 0, 1, ["--batch", "16", "--batch-workers", "0"]),
        (["--bs=8", "--grad_accum", "3"], 8, 3, ["--bs={local_batch}", "--grad_accum", "{accumulation}"]),
        (["--bs=8", "--accumulate=1"], 8, 1, ["--bs={local_batch}", "--accumulate=1"]),
        (["--lr", "0.1"], 64, 1, ["--lr", "0.1"]),
        (["--bs=8", "--num-steps=99"], 8, 1, ["--bs={local_batch}", "--num-steps={steps}"]),
        (["--bs=8", "--niters=99"], 8, 1, ["--bs={local_batch}", "--niters={steps}"]),
        (["--num-envs=8", "--n_iters=99"], 0, 1, ["--num-envs=8", "--n_iters=99"]),
        (["--num-envs=8", "--num-steps=99"], 0, 1, ["--num-envs=8", "--num-steps=99"]),
        (["--total_timesteps", "9999", "--num_steps", "99"], 0, 1, ["--total_timesteps", "9999", "--num_steps", "99"]),
        # nobody knows which of the two it is
        (["--size", "64", "-n", "64"], 64, 1, ["--size", "64", "-n", "64"]),
    ],
)
def test_the_argument_that_carries_the_batch_is_found(
    arguments: list[str], batch: int, passes: int, expected: list[str]
) -> None:
    assert with_placeholders(arguments, batch, passes) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--size 3 32 32 -b 32 --num-epochs 9", "--size 3 32 32 -b {local_batch} --num-epochs {epochs}"),
        ("--num-epochs=9", "--num-epochs={epochs} --train_batch_size {local_batch}"),
        ("-b 32", "-b {local_batch} --num-epochs {epochs}"),
    ],
)
def test_a_scripts_parser_shows_which_options_carry_batch_and_epochs(arguments: str, expected: str) -> None:
    names = {"-b": "--train_batch_size", "--train_batch_size": "--train_batch_size"}
    values = {"--train_batch_size": 32, "--width": 32, "--num-epochs": 9, "--warmup-epochs": 9}
    filled = with_placeholders(arguments.split(), 32, 1, ParsedOptions(names, values))
    assert " ".join(filled) == expected


def test_positional_arguments_are_known_by_the_names_that_a_scripts_parser_has_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ArgumentParser, "parse_known_args", ArgumentParser.parse_known_args)
    found = watch_parsers()
    parser = ArgumentParser()
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("num_nodes", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.parse_args(["100", "1"])
    expected = ["{epochs}", "1", "--batch-size", "{local_batch}"]
    assert with_placeholders(["100", "1"], 32, 1, found) == expected


def test_an_option_has_its_name_with_batch_even_if_another_is_longer() -> None:
    """Fairseq has two names for it."""
    options = ParsedOptions({}, {})
    options.add(["--batch-size", "--max-sentences"], 16)
    assert with_placeholders(["--max-sentences", "16", "--width", "16"], 16, 1, options)[1] == "{local_batch}"
    assert with_placeholders(["--width", "32"], 16, 1, options) == ["--width", "32", "--batch-size", "{local_batch}"]


def test_options_for_the_batch_of_all_workers_are_known_by_their_names() -> None:
    total = ParsedOptions({}, {"--global-batch": 32, "--eval-batch": 32})
    assert with_placeholders([], 32, 1, total) == ["--global-batch", "{global_batch}"]
    both = ParsedOptions({}, {"--global-batch": 32, "--batch": 32})
    expected = ["--global-batch", "{global_batch}", "--batch", "{local_batch}"]
    assert with_placeholders([], 32, 1, both) == expected
    assert with_placeholders(["--batch", "32"], 32, 1, both) == [*expected[2:], *expected[:2]]


@pytest.mark.parametrize(
    ("source", "placeholder"),
    [
        ('parser.add_argument("-b", "--batch", help="samples of a step over all GPUs")', "global_batch"),
        ('parser.add_argument("-b", "--batch")\nload(int(args.batch / dist.get_world_size()))', "global_batch"),
        ('parser.add_argument("-b", "--batch", help="samples of each GPU")', "local_batch"),
        ('parser.add_argument("-b", "--batch")\nload(args.batch // args.num_workers)', "local_batch"),
    ],
)
def test_the_source_shows_whether_the_batch_is_that_of_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], source: str, placeholder: str
) -> None:
    monkeypatch.setattr("tula_hpc.attach.__main__._look", lambda *_: seen_of())
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(source)
    for arguments in (["-b", "7"], ["--batch=7"]):
        for run in (["train.py"], ["-m", "train"]):
            assert main([*run, *arguments]) == 0
            (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("arguments = ")]
            assert "7" not in line
            assert f'{{{placeholder}}}"]' in line
            # where the source does not show it, the line says how to change it
            assert ("# {global_batch} instead, if the script divides" in line) == (placeholder == "local_batch")


def test_a_key_of_a_configuration_may_set_the_batch_of_all_workers(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("load(config.train.batch_size // world_size)")
    given = ["train.lr=0.1", "train.batch_size={local_batch}"]
    found = read_options(program, takes_keys=True).for_all_workers(given)
    assert found == ["train.lr=0.1", "train.batch_size={global_batch}"]


def test_options_of_click_are_known_while_its_command_runs() -> None:
    found = ParsedOptions({}, {})

    @click.command()
    @click.argument("data")
    @click.option("--batch-size", "-b", default=32)
    @click.option("--test-batch-size", default=32)
    @click.option("--epochs", type=int)
    def train(**_: object) -> None:
        note_parsed(found)

    train.main(["64", "--epochs", "9"], standalone_mode=False)
    assert found.names["-b"] == "--batch-size"
    assert found.values == {"--batch-size": 32, "--test-batch-size": 32, "--epochs": 9}
    filled = with_placeholders(["64", "--epochs", "9"], 32, 1, found)
    assert filled == ["64", "--epochs", "{epochs}", "--batch-size", "{local_batch}"]


class Config:
    """A stand-in for OmegaConf's class, which need not be installed."""

    def __init__(self, values: dict[str, object]) -> None:
        self.values = values

    def _get_parent(self) -> None: ...

    @staticmethod
    def to_container(config: Config, *, resolve: bool) -> dict[str, object]:
        assert not resolve
        return config.values


def test_keys_of_omegaconf_are_known_but_for_those_of_hydra_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("DictConfig", (Config,), {"__module__": "omegaconf.dictconfig"})
    monkeypatch.setitem(sys.modules, "omegaconf", SimpleNamespace(OmegaConf=Config))
    own: dict[str, object] = {
        "data": {"batch": 32, "path": "${oc.env:DATA}"},
        "max_epochs": 9,
        "num_nodes": 1,
        "amp": True,
    }
    configs = [kind(own), kind({"hydra_help": {}, "n_jobs": 32, "a": 1, "b": 2, "c": 3, "d": 4})]
    found = ParsedOptions({}, {})
    note_parsed(found)
    assert len(configs) == 2
    assert found.values == {"data.batch=": 32, "max_epochs=": 9, "num_nodes=": 1, "amp=": 1}
    filled = with_placeholders(["lr=2"], 32, 1, found)
    assert filled == ["lr=2", "data.batch={local_batch}", "max_epochs={epochs}", "num_nodes={nodes}"]


@pytest.mark.parametrize("name", ["--epochs", "--n_epochs", "--nepochs", "--num-train-epochs", "--number_of_epochs"])
def test_the_number_of_epochs_has_many_names(name: str) -> None:
    assert with_placeholders(["64"], 64, 1, ParsedOptions({}, {name: 3})) == ["{local_batch}", name, "{epochs}"]


@pytest.mark.parametrize(
    ("default", "expected"), [(1, "-b {local_batch} --num_nodes {nodes}"), (99, "-b {local_batch}")]
)
def test_a_number_of_nodes_is_the_clusters_if_it_is_one_by_default(default: int, expected: str) -> None:
    filled = with_placeholders(["-b", "32"], 32, 1, ParsedOptions({}, {"--num_nodes": default}))
    assert " ".join(filled) == expected
