"""`tula init --script`: options of training scripts in many styles, and the sweep file made from them."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path
from textwrap import indent

import pytest

from tests.closed_folder import close_folder
from tests.init.test_init import MadePartition, commands, put_site
from tests.known import known
from tula_hpc.attach.__main__ import main as attach
from tula_hpc.config import ClusterSpec, check_together, load_sweep, load_together
from tula_hpc.errors import InputError
from tula_hpc.init.__main__ import main
from tula_hpc.init.script_options import read_options
from tula_hpc.init.sweep_file import (
    fill_in,
    required_arguments,
    resume_lines,
    search_and_training,
    with_arguments,
    with_fitting_bounds,
    workers_in,
)
from tula_hpc.launch.bounded_command import NOT_CONFIGURED

__all__ = ["commands"]
ROOT = Path(__file__).resolve().parents[2]

ARGPARSE = """
import argparse, torch
from torch.nn.parallel import DistributedDataParallel as DDP
SEED = 3
p = argparse.ArgumentParser()
p.add_argument("data", metavar="DIR")
p.add_argument("--test-batch-size", type=int, default=1000)
p.add_argument("-b", "--batch-size", default=256, type=int,
               help="mini-batch size, this is the total batch size of all GPUs")
p.add_argument("--epochs", default=90, type=int)
p.add_argument("--start-epoch", default=0, type=int)
p.add_argument("--seed", default=SEED, type=int)
p.add_argument("--resume", default="", type=str)
p.add_argument("--out", required=True)
args = p.parse_args()
torch.save({}, "last.pt")
raise SystemExit("this script was run")
"""
STEPS = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--batch_size", type=int, default=12)
p.add_argument("--max_iters", type=int, default=600000)
p.add_argument("--warmup_iters", type=int, default=2000)
"""
PLAIN_STEPS = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--iter", type=int, default=800000, help="total training iterations")
p.add_argument("--batch", type=int, default=16)
"""
RAFT_STEPS = 'p.add_argument("--num_steps", type=int, default=100000)\n'
CONFIGURATOR = """
batch_size = 12
gradient_accumulation_steps = 5 * 8
ddp_world_size = 8
max_iters = 600000
config_keys = [k for k, v in globals().items() if isinstance(v, (int, float, bool, str))]
exec(open("configurator.py").read())
gradient_accumulation_steps //= ddp_world_size
"""
CLICK = """
import click
@click.command()
@click.option("--micro-batch", "micro", default=16)
@click.option("--global-batch-size", default=512)
@click.option("--num-epochs", type=int)
@click.option("--resume/--no-resume", default=False, is_flag=True)
@click.option("--grad-accum", default=6)
def main(**options): DDP()
"""
TYPER = """
import typer
app = typer.Typer()
@app.command()
def train(folder: str, batch_size: int = typer.Option(64, "--bs"), n_epochs: int = 12, amp: bool = False): ...
app()
"""
TYPER_ANNOTATED = """
import typer
from typing import Annotated
app = typer.Typer()
@app.command()
def train(
    data: Annotated[Path, typer.Option(help="of all GPUs")],
    batch_size: Annotated[int, typer.Argument(help="samples of all GPUs")] = 64,
    length: Annotated[int, typer.Option("--epochs", "-e")] = 12,
    out: Path = typer.Option(...),
    *,
    seed: int = 2,
): ...
app()
"""
TYPER_RUN = """
import typer
def train(data: str, batch_size: int = 16, epochs: int = 3): ...
typer.run(train)
"""
HUGGING_FACE = """
from transformers import HfArgumentParser, TrainingArguments, Trainer
@dataclass
class Own:
    model_name_or_path: str = field(metadata={"help": "weights to begin with"})
    width: int = field(default=256, metadata={"help": "of the network"})
    layers: list = field(default_factory=list)
options = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
"""
LIGHTNING_CLI = """
from lightning.pytorch.cli import LightningCLI
from package import Data, Model
cli = LightningCLI(Model, Data)
"""
LIGHTNING_CLI_THAT_PARSES = """
from lightning.pytorch.cli import LightningCLI
from package import Data, Model
cli = LightningCLI(Model, Data, run=False)
cli.trainer.fit(cli.model, datamodule=cli.datamodule)
"""
ABSL = """
from absl import app, flags
flags.DEFINE_integer("batch_size", 128, "samples of a step")
flags.DEFINE_integer("max_epochs", 7, "")
flags.DEFINE_bool("resume", False, "")
def main(argv): ...
app.run(main)
"""
HYDRA = """
import hydra
from omegaconf import DictConfig, OmegaConf
@hydra.main(config_path=".")
def main(cfg):
    loader = DataLoader(data, cfg.train.batch_size)
    for epoch in range(cfg.train.epochs): ...
"""
OMEGACONF = """
from omegaconf import OmegaConf
cfg = OmegaConf.merge(OmegaConf.load("base.yaml"), OmegaConf.from_cli())
loader = DataLoader(data, cfg.train.batch_size)
for epoch in range(cfg.train.epochs): ...
"""
DATACLASS = """
import tyro
from dataclasses import dataclass
@dataclass
class Options:
    data: str
    batch_size: int = 48
    seed: int = 5
main(tyro.cli(Options))
"""
# pytorch/examples
OF_A_NODE = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--epochs", default=90, type=int)
p.add_argument("-b", default=256, type=int, dest="batch_size", help="total batch of all GPUs on the current node")
p.add_argument("--seed", default=None, type=int)
"""
# torchvision's references
OF_A_WORKER = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--epochs", default=26, type=int)
p.add_argument("-b", "--batch-size", default=2, type=int, help="images per gpu, the total batch is $NGPU x batch_size")
"""
LIGHTNING = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--batch_size", default=32, type=int)
p.add_argument("--num_nodes", default=1, type=int)
"""
# an older text of torchvision's
OF_THE_NODE = OF_A_NODE.replace("current node", "node")
# Megatron
OF_A_MODEL = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--micro-batch-size", type=int, help="Per model. Global batch size is this times workers.")
p.add_argument("--train-iters", type=int)
"""
# CleanRL
ROLLOUTS = """
import tyro
from dataclasses import dataclass
@dataclass
class Args:
    seed: int = 1
    total_timesteps: int = 500000
    num_envs: int = 4
    num_steps: int = 128
    num_minibatches: int = 4
    batch_size: int = 0
    num_iterations: int = 0
args = tyro.cli(Args)
args.batch_size = int(args.num_envs * args.num_steps)
args.num_iterations = args.total_timesteps // args.batch_size
"""
SUBCOMMANDS = """
import argparse
def common(p): p.add_argument("--seed", default=7, type=int)
top = argparse.ArgumentParser()
group = top.add_argument_group("places")
group.add_argument("--nodes", default=1, type=int)
sub = top.add_subparsers(dest="command")
p = sub.add_parser("eval")
p.add_argument("--ckpt", required=True)
p.add_argument("--bs", default=500, type=int)
p = sub.add_parser("train", help="train a model")
common(p)
group = p.add_argument_group("loop")
group.add_argument("--bs", default=32, type=int)
group.add_argument("--epochs", default=6, type=int)
p.add_argument("--data", required=True)
"""
CLICK_GROUP = """
import click
@click.group()
@click.option("--seed", default=3)
def cli(seed): ...
@cli.command()
@click.option("--bs", default=16)
@click.option("--ckpt", required=True)
def evaluate(bs, ckpt): ...
@cli.command("fit")
@click.option("--bs", default=32)
@click.option("--epochs", default=6)
@click.option("--data", required=True)
def train(bs, epochs, data): ...
"""
TYPER_COMMANDS = """
import typer
app = typer.Typer()
@app.callback()
def before(seed: int = 4): ...
@app.command()
def evaluate(ckpt: str, bs: int = 8): ...
@app.command()
def train_it(data: str, bs: int = 16, epochs: int = 3): ...
"""
NOTHING = "batch_size = 64\nmodel = build()\n"


STYLES = {
    "argparse": (ARGPARSE, "--batch-size {global_batch} --epochs {epochs} --seed {seed}", {"epochs": 90, "seed": 3}),
    "of a node": (OF_A_NODE, "-b {local_batch} --epochs {epochs}", {"epochs": 90}),
    "of a worker": (OF_A_WORKER, "--batch-size {local_batch} --epochs {epochs}", {"epochs": 26}),
    "nodes": (LIGHTNING, "--batch_size {local_batch} --num_nodes {nodes}", {}),
    "lightning": (
        f"import lightning as L\n{LIGHTNING}p.add_argument('--gpus', default=1, type=int)",
        "--batch_size {local_batch} --num_nodes {nodes} --gpus 2",
        {},
    ),
    "other GPUs": (f"{LIGHTNING}p.add_argument('--gpus')", "--batch_size {local_batch} --num_nodes {nodes}", {}),
    "nodes of a graph": (LIGHTNING.replace("1", "1000"), "--batch_size {local_batch}", {}),
    "steps": (STEPS, "--batch_size {local_batch} --max_iters {steps}", {}),
    "plain steps": (PLAIN_STEPS, "--batch {local_batch} --iter {steps}", {}),
    "steps and other iterations": (f"{PLAIN_STEPS}{RAFT_STEPS}", "--batch {local_batch} --num_steps {steps}", {}),
    "click": (
        CLICK,
        "--micro-batch {local_batch} --num-epochs {epochs} --grad-accum {accumulation}",
        {"accumulation": 4},
    ),
    "typer": (TYPER, "--bs {local_batch} --n-epochs {epochs}", {"epochs": 12}),
    "typer with annotations": (
        TYPER_ANNOTATED,
        "{global_batch} --epochs {epochs} --seed {seed}",
        {"epochs": 12, "seed": 2},
    ),
    "hugging-face": (
        HUGGING_FACE,
        "--per_device_train_batch_size {local_batch} --num_train_epochs {epochs} --seed {seed} "
        "--gradient_accumulation_steps {accumulation}",
        {"epochs": 3, "seed": 42, "accumulation": 1},
    ),
    "lightning's command line": (
        LIGHTNING_CLI,
        "fit --data.batch_size {local_batch} --trainer.max_epochs {epochs} --seed_everything {seed} "
        "--trainer.num_nodes {nodes} --trainer.devices 2",
        {"seed": 0},
    ),
    "lightning's command line without subcommands": (
        LIGHTNING_CLI_THAT_PARSES,
        "--data.batch_size {local_batch} --trainer.max_epochs {epochs} --seed_everything {seed} "
        "--trainer.num_nodes {nodes} --trainer.devices 2",
        {"seed": 0},
    ),
    "absl": (ABSL, "--batch_size {local_batch} --max_epochs {epochs}", {"epochs": 7}),
    "hydra": (HYDRA, "train.batch_size={local_batch} train.epochs={epochs}", {}),
    "omegaconf": (OMEGACONF, "train.batch_size={local_batch} train.epochs={epochs}", {}),
    "of the node": (OF_THE_NODE, "-b {local_batch} --epochs {epochs}", {"epochs": 90}),
    "of a model": (OF_A_MODEL, "--micro-batch-size {local_batch} --train-iters {steps}", {}),
    "subcommands": (
        SUBCOMMANDS,
        "--nodes {nodes} train --bs {local_batch} --epochs {epochs} --seed {seed}",
        {"seed": 7},
    ),
    "click group": (CLICK_GROUP, "--seed {seed} fit --bs {local_batch} --epochs {epochs}", {"epochs": 6}),
    "typer commands": (TYPER_COMMANDS, "--seed {seed} train-it --bs {local_batch} --epochs {epochs}", {"epochs": 3}),
    "dataclass": (DATACLASS, "--batch-size {local_batch} --seed {seed}", {"seed": 5}),
    "configurator": (
        CONFIGURATOR,
        "--batch_size={local_batch} --max_iters={steps} --gradient_accumulation_steps={workers}",
        {},
    ),
}


@pytest.mark.parametrize(("text", "arguments", "values"), STYLES.values(), ids=list(STYLES))
def test_a_script_of_any_style_gets_its_batch(
    commands: Path, tmp_path: Path, text: str, arguments: str, values: dict[str, int]
) -> None:
    put_site(commands, [MadePartition("gpu", nodes=6, gres="gpu:2")])
    (tmp_path / "train.py").write_text(text)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    sweep_file = tmp_path / "train.toml"
    filled = ["workload.samples=50000", *([] if "epochs" in values else ["workload.epochs=9"])]
    spec, cluster = load_together(sweep_file, tmp_path / "cluster.toml", filled)
    assert " ".join(spec.workload.arguments) == arguments
    assert spec.workload.script == tmp_path / "train.py"
    assert {key: getattr(spec.workload, key) for key in values} == values
    assert spec.search.cluster_sizes == (1, 2, 4)
    assert (spec.training.method, cluster.workers_per_node) == ("lbt", 2)
    assert '\n# method = "ags" ' in sweep_file.read_text()


def test_arguments_of_a_run_that_a_file_lacks_are_added_and_no_more_required(commands: Path, tmp_path: Path) -> None:
    put_site(commands, [MadePartition("cpu")])
    (tmp_path / "train.py").write_text(ARGPARSE)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    text = (tmp_path / "train.toml").read_text()
    assert required_arguments(text) == ["data", "--out"]
    used = ["--batch-size", "{global_batch}", "--seed", "7", "--out", "x", "--amp", "pictures"]
    more, added = with_arguments(text, used[:-2])
    assert added == ["--out", "x"]
    assert required_arguments(more) == ["data"]
    whole, added = with_arguments(more, ["pictures", *used[:-2]])
    assert (added, required_arguments(whole)) == (["pictures"], [])
    assert 'arguments = ["pictures", "--out", "x", "--batch-size", ' in whole
    assert with_arguments(whole, ["pictures", *used[:-2]]) == (whole, [])
    # an option by its short name, next to a value that belongs to another one
    names = {"-b": "--batch-size", "-o": "--out", "-s": "--seed"}
    for used in (["-o", "x"], ["-o=x"], ["--out=x"]):
        assert required_arguments(with_arguments(text, used, names)[0]) == ["data"]
    # or one that the user has added
    by_hand = text.replace('["--batch-size"', '["--out", "data", "--batch-size"')
    assert required_arguments(with_arguments(by_hand, ["--out", "data"])[0]) == ["data"]
    short = ["-b", "{global_batch}", "-o", "y", "-s", "7"]
    assert with_arguments(whole, short, names) == (whole, [])


@pytest.mark.parametrize(
    ("known", "used", "expected", "added"),
    [
        # the epochs come before how often to save, as in the script of PyTorch's tutorial on DDP
        ("-b {local_batch} {epochs}", "-b {local_batch} {epochs} 1", "{epochs} 1 -b {local_batch}", ["1"]),
        ("-b {local_batch} {epochs}", "5 {epochs} -b {local_batch}", "5 {epochs} -b {local_batch}", ["5"]),
        ("{local_batch} --lr 1", "{local_batch}", "{local_batch} --lr 1", []),
        # a value of an option stays, even if a positional argument is the same
        ("{epochs} -n {epochs}", "{epochs} 1 -n {epochs}", "{epochs} 1 -n {epochs}", ["1"]),
        ("-n {epochs} x", "--epochs {epochs}", "--epochs {epochs} -n {epochs} x", ["--epochs", "{epochs}"]),
    ],
)
def test_positional_arguments_are_in_the_order_in_which_a_run_had_them(
    known: str, used: str, expected: str, added: list[str]
) -> None:
    line = f"arguments = {json.dumps(known.split())}\n"
    assert with_arguments(line, used.split()) == (f"arguments = {json.dumps(expected.split())}\n", added)


def test_passes_that_a_script_divides_among_its_workers_are_in_the_batch_of_a_step(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("gpu", nodes=6, gres="gpu:2")])
    (tmp_path / "train.py").write_text(CONFIGURATOR)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    text = (tmp_path / "train.toml").read_text()
    assert "\nbase_batch = 480 " in text
    assert "accumulation = " not in text
    assert "--batch_size=12 --gradient_accumulation_steps=1\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ('[workload]  # mine\nscript = "t.py"\n', ["samples", "arguments"]),
        ('[workload]\n  samples=5\n  arguments = ["{local_batch}"]\n', []),
        ("name = 'x'\n", []),
    ],
    ids=["a comment", "other blanks", "no table"],
)
def test_a_file_is_filled_in_however_it_is_written(text: str, filled: list[str]) -> None:
    more, keys = fill_in(text, {"samples": 5, "arguments": ["{local_batch}"]})
    assert keys == filled
    known = tomllib.loads(more).get("workload", {})
    assert [key for key in ("samples", "arguments") if key in known] == (
        filled or ["samples", "arguments"]
    ) or not known
    assert fill_in(more, {"samples": 5, "arguments": ["{local_batch}"]}) == (more, [])


def test_the_batch_of_a_step_of_several_passes_is_filled_in_and_nothing_else_is_changed() -> None:
    text = "[workload]\n\n[training]\n\n  base_batch=1_024  # ours\n"
    more, _ = fill_in(text, {"accumulation": 4})
    assert more.endswith("\n\n[training]\n\n  base_batch=4096  # ours\n")


@pytest.mark.parametrize("text", [NOTHING, HYDRA], ids=["no option", "no default"])
def test_a_batch_that_the_source_does_not_tell_is_unknown_until_a_step_was_seen(
    commands: Path, tmp_path: Path, text: str
) -> None:
    put_site(commands, [MadePartition("gpu", nodes=6, gres="gpu:4")])
    (tmp_path / "train.py").write_text(text)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    written = (tmp_path / "train.toml").read_text()
    assert "base_batch" not in tomllib.loads(written)["training"]
    assert workers_in(written) == 4
    filled, keys = fill_in(written, {"accumulation": 2, "base_batch": 16})
    assert keys == ["base_batch", "accumulation"]
    assert tomllib.loads(filled)["training"]["base_batch"] == 16
    # added by hand, next to the line that asks for it
    mine = f"{written}base_batch = 512\n"
    assert tomllib.loads(fill_in(mine, {"base_batch": 16})[0])["training"]["base_batch"] == 512


@pytest.mark.parametrize(
    ("known", "bounds"),
    [
        ({"base_batch": 4096, "samples": 10**6}, {"min_batch": 4096, "max_batch": 65536}),
        ({"base_batch": 5000, "samples": 10_000}, {"min_batch": 4096, "max_batch": 8192}),
        ({"base_batch": 64, "samples": 100}, {"min_batch": 64, "max_batch": 64}),
        ({"base_batch": 256, "samples": 10**6}, {}),
    ],
)
def test_bounds_that_are_not_the_users_own_fit_what_was_seen(
    commands: Path, tmp_path: Path, known: dict[str, int], bounds: dict[str, int]
) -> None:
    put_site(commands, [MadePartition("gpu", nodes=6, gres="gpu:4")])
    (tmp_path / "train.py").write_text(NOTHING)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    filled, _ = fill_in((tmp_path / "train.toml").read_text(), known)
    more, changed = with_fitting_bounds(filled)
    search = tomllib.loads(more)["search"]
    before = tomllib.loads(filled)["search"]
    assert {key: search[key] for key in changed} == changed
    assert {**before, **bounds} == search
    mine = filled.replace("# global", "# mine")
    assert with_fitting_bounds(mine) == (mine, {})


def test_a_script_of_that_name_in_the_working_directory_is_not_taken(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("cpu")])
    (tmp_path / "conf").mkdir()
    for folder in (tmp_path, tmp_path / "conf"):
        (folder / "train.py").write_text(ARGPARSE)
    monkeypatch.chdir(tmp_path)
    assert main(["conf/cluster.toml", "--script", "conf/train.py"]) == 0
    sweep = load_sweep(tmp_path / "conf" / "train.toml", ["workload.samples=900"])
    assert sweep.workload.script == tmp_path / "conf" / "train.py"


def test_a_script_or_folder_in_the_place_of_the_cluster_file_is_refused_and_never_replaced(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("cpu")])
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(ARGPARSE)
    for words in (["train.py"], ["train.py", "--force"], ["train.py", "--script", "train.py"]):
        assert main(words) == 2
        refusal = capsys.readouterr().err
        assert refusal.startswith("train.py: is a script; expected the name of a cluster file, or ")
        assert refusal.endswith(" init --script train.py\n")
    for words in ([], ["--force"], ["--script", "train.py"]):
        assert main([".", *words]) == 2
        assert capsys.readouterr().err == ".: is a folder; expected the name of a cluster file\n"
    assert Path("train.py").read_text() == ARGPARSE


def test_sizes_and_the_rates_batch_are_those_of_partitions_and_of_the_script(commands: Path, tmp_path: Path) -> None:
    """The script takes six passes a step, where a sweep takes four."""
    put_site(commands, [MadePartition("cpu")])
    (tmp_path / "train.py").write_text(CLICK)
    parts = "".join(f'[[partitions]]\npartition = "{name}"\nmax_nodes = 2\nworkers_per_node = 3\n' for name in "ab")
    (tmp_path / "cluster.toml").write_text(f'name = "mine"\nexecutor = "slurm"\n{parts}')
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    text = (tmp_path / "train.toml").read_text()
    assert "cluster_sizes = [1, 2] " in text
    assert f"base_batch = {3 * 6 * 16} " in text


def test_an_option_that_resumes_gets_the_scripts_own_word_for_its_newest_checkpoint(
    commands: Path, tmp_path: Path
) -> None:
    """As diffusers' scripts have, beside names of files that they save to."""
    own = """p.add_argument("--resume_from_checkpoint", default=None)
if args.resume_from_checkpoint != "latest": path = args.resume_from_checkpoint
torch.save(a, "a.pt")
torch.save(b, "b.pt")
"""
    (tmp_path / "train.py").write_text(f"{STEPS}{own}")
    put_site(commands, [MadePartition("cpu")])
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    text = (tmp_path / "train.toml").read_text()
    assert '\nresume_arguments = ["--resume_from_checkpoint", "latest"] ' in text


def test_a_script_that_resumes_by_the_word_resume_is_given_it(commands: Path, tmp_path: Path) -> None:
    """As nanoGPT is, whose option for that also has other values."""
    own = """init_from = "scratch"
if init_from == "scratch": model = build()
elif init_from == "resume": model = load("out/ckpt.pt")
torch.save(model, "ckpt.pt")
"""
    (tmp_path / "train.py").write_text(f"{own}{CONFIGURATOR}")
    put_site(commands, [MadePartition("cpu")])
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    assert '\nresume_arguments = ["--init_from=resume"] ' in (tmp_path / "train.toml").read_text()


@pytest.mark.parametrize("given", ['"mode", nargs="?"', '"--mode", required=True'])
def test_an_argument_that_cannot_be_given_twice_resumes_no_script(given: str, tmp_path: Path) -> None:
    """It is appended to the arguments of the first start."""
    (tmp_path / "train.py").write_text(f'p.add_argument({given})\nif args.mode == "resume": load()\n')
    assert read_options(tmp_path / "train.py").resume is None


@pytest.mark.parametrize(
    ("saving", "saved"),
    [
        ('torch.save(a, "out/epoch-%03d.pt" % epoch)', ("out/epoch-*.pt",)),
        ('torch.save(a, f"epoch-{epoch:03}.pt")', ("epoch-*.pt",)),
        ('torch.save(a, "epoch-{}-{:.2f}.pt".format(epoch, loss))', ("epoch-*-*.pt",)),
        # a folder that the script computes may be anywhere
        ('torch.save(a, "%s/last.pt" % folder)', ()),
        ('torch.save(a, f"epoch-{epoch}.pt")\ntorch.save(a, "last.pt")', ("last.pt",)),
    ],
)
def test_names_of_saved_files_may_be_formatted(saving: str, saved: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(saving)
    (tmp_path / "train.py").write_text(f'{saving}\np.add_argument("--resume", default="")')
    found = read_options(tmp_path / "train.py")
    assert found.saved == saved
    comment = next(resume_lines(found)).comment
    if saved:
        what = "with the newest such file" if "*" in saved[0] else "if the file is there"
        assert comment == f"appended after an interruption, {what}"


def test_an_option_that_resumes_without_a_value_is_given_none(commands: Path, tmp_path: Path) -> None:
    # mmengine
    declared = 'p.add_argument("--resume", nargs="?", type=str, const="auto")'
    (tmp_path / "train.py").write_text(f"{STEPS}{declared}\ntorch.save(state, path)\n")
    put_site(commands, [MadePartition("cpu")])
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    assert '\nresume_arguments = ["--resume"] ' in (tmp_path / "train.toml").read_text()


@pytest.mark.parametrize(
    "declared",
    [
        '@click.command()\n@click.option("--resume/--no-resume", default=False)\ndef main(resume): ...\n',
        "import typer\napp = typer.Typer()\n@app.command()\n"
        'def main(resume: bool = typer.Option(False, "--resume/--fresh")): ...\n',
    ],
    ids=["click", "typer"],
)
def test_an_option_with_an_opposite_takes_no_value(tmp_path: Path, declared: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f'{declared}torch.save(state, "last.pt")\n')
    found = read_options(script)
    assert next(resume_lines(found)).value == ["--resume"]


def test_an_option_to_continue_from_a_file_resumes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text('p.add_argument("--continue-from", default="", help="Continue from checkpoint model")')
    resume = known(read_options(script).resume)
    assert resume.words("last.pt") == ["--continue-from", "last.pt"]


def test_facts_that_the_source_lacks_are_unknown_and_asked_for(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("cpu")])
    (tmp_path / "train.py").write_text(ARGPARSE)
    files = [str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]
    monkeypatch.chdir(tmp_path)
    assert main([*files, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    text = (tmp_path / "train.toml").read_text()
    asked = [line for line in text.splitlines() if line.endswith("unknown")]
    assert [line.split()[1] for line in asked] == ["arguments", "arguments", "samples", "metric"]
    assert output["unknown"][str(tmp_path / "train.toml")] == ["arguments", "samples", "metric"]
    assert output["required"] == ["samples"]
    assert 'resume_arguments = ["--resume", "last.pt"]' in text
    assert [line.partition("tula")[2].split()[0] for line in output["next"]] == ["attach", "check", "sweep"]
    assert output["next"][0].endswith(" train.py --batch-size 256 --epochs 100 DATA --out OUT")
    assert output["next"][1].endswith(f" --sweep {tmp_path / 'train.toml'}")
    assert (output["notes"], output["partition"]["name"]) == ([], "cpu")
    with pytest.raises(InputError, match=r"samples: is required with a script"):
        load_sweep(tmp_path / "train.toml")
    # once more: the sweep file is not replaced, and the present cluster file is used
    capsys.readouterr()
    assert main(files) == 2
    output = capsys.readouterr().err
    assert output.endswith("train.toml: exists already; move it away, or add --force, which replaces it\n")
    (tmp_path / "cluster.toml").write_text('name = "mine"\ncpus_per_worker = 2\n')
    # nodes that this machine stands in for never outnumber its cores
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert main([*files, "--force"]) == 0
    assert "exists already and is left as it is" in capsys.readouterr().out
    assert "cluster_sizes = [1] " in (tmp_path / "train.toml").read_text()


@pytest.mark.parametrize("is_installed", [False, True])
def test_without_slurm_both_files_are_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_installed: bool
) -> None:
    if is_installed:
        put_site(tmp_path, [])
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{NOT_CONFIGURED}' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    (tmp_path / "train.py").write_text(NOTHING)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    out = capsys.readouterr().out
    assert "this machine with its 3 cores, since no Slurm is set up here" in out
    assert "No option for the batch was found in train.py; if it has one, run it with that by tula attach; " in out
    assert "train.py does not seem to save its model, which would be lost at its end." in out
    assert "DistributedDataParallel" in out
    required = ["workload.arguments=['{local_batch}']", "workload.samples=900", "workload.epochs=9"]
    sweep, cluster = load_together(tmp_path / "train.toml", tmp_path / "cluster.toml", required)
    assert (cluster.executor, cluster.max_nodes, sweep.search.cluster_sizes) == ("local", 3, (1, 2))
    assert "; tula attach fills it in: unknown" in (tmp_path / "train.toml").read_text()
    # a Slurm that does not answer is a different case
    put_site(tmp_path, [])
    for name in ("scontrol", "sacctmgr"):
        (tmp_path / name).unlink()
    (tmp_path / "train.toml").unlink()
    assert main([str(tmp_path / "other.toml"), "--script", str(tmp_path / "train.py")]) == 1
    assert not (tmp_path / "other.toml").exists()
    assert "scontrol is not on PATH" in capsys.readouterr().err
    (tmp_path / "broken.py").write_text("def (:")
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "broken.py")]) == 2
    assert "broken.py: is not valid Python" in capsys.readouterr().err
    assert main(["--script", "nothing.py"]) == 2
    words = "expected a training script in Python, by its path from"
    assert capsys.readouterr().err == f"nothing.py: no such file; {words} {Path.cwd()}\n"
    assert main(["--script", str(tmp_path)]) == 2
    assert f"{tmp_path}: is no file; {words} " in capsys.readouterr().err
    # TOML can be valid Python, and the script's name would become the sweep file's
    mine = tmp_path / "mine.toml"
    mine.write_text('name = "mine"\n')
    assert main([str(tmp_path / "cluster.toml"), "--script", str(mine), "--force"]) == 2
    assert f"{mine}: is a sweep or cluster file; {words} " in capsys.readouterr().err
    assert mine.read_text() == 'name = "mine"\n'


@pytest.mark.parametrize(("batch", "passes", "samples"), [(1, 1, 640), (2, 4, 10**6), (64, 1, 100)])
def test_bounds_of_the_search_are_valid_for_small_batches_and_data(
    tmp_path: Path, batch: int, passes: int, samples: int
) -> None:
    (tmp_path / "train.py").touch()
    cluster = ClusterSpec(executor="slurm", max_nodes=8, workers_per_node=2)
    work = f'script = "train.py"\narguments = ["{{local_batch}}"]\nsamples = {samples}\nepochs = 9'
    tables = search_and_training(cluster, batch * passes, passes, samples)
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(['name = "mine"', "[workload]", work, f"accumulation = {passes}", *tables]))
    check_together(load_sweep(path), cluster, path, "cluster.toml")


def next_lines(tmp_path: Path, script: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what `tula init` says to run, the text after the file to fill in."""
    assert main([str(tmp_path / "cluster.toml"), "--script", script, "--json", "--force"]) == 0
    line: str = json.loads(capsys.readouterr().out)["next"][0]
    return line.partition(".toml ")[2].split()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ARGPARSE, "train.py --batch-size 256 --epochs 100 DATA --out OUT"),
        (NOTHING + 'parser.add_argument("-c", "--config", required=True)', "train.py --config CONFIG"),
        (OF_A_MODEL, "train.py --micro-batch-size 32 --train-iters 1000"),
        (STEPS, "train.py --batch_size 12"),
        (SUBCOMMANDS, "train.py train --bs 32 --epochs 100 --data DATA"),
        (CLICK_GROUP, "train.py fit --bs 32 --epochs 100 --data DATA"),
        (TYPER_COMMANDS, "train.py train-it --bs 16 --epochs 100 DATA"),
        (LIGHTNING_CLI, "train.py fit --data.batch_size 32 --trainer.max_epochs 100 --trainer.devices 1"),
        (TYPER_RUN, "train.py --batch-size 16 --epochs 100 DATA"),
        (
            HUGGING_FACE,
            "train.py --per_device_train_batch_size 8 --num_train_epochs 100 --model-name-or-path MODEL_NAME_OR_PATH",
        ),
        (TYPER_ANNOTATED, "train.py 64 --epochs 100 --data DATA --out OUT"),
        # its function gets the arguments that are left, which are no option
        (ABSL, "train.py --batch_size 128 --max_epochs 100"),
    ],
    ids=[
        "a place",
        "no batch",
        "steps",
        "steps with a default",
        "subcommands",
        "click group",
        "typer commands",
        "lightning's command line",
        "typer without commands",
        "hugging-face",
        "typer with annotations",
        "absl",
    ],
)
def test_the_next_command_has_what_the_script_requires(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    put_site(commands, [MadePartition("cpu")])
    script = tmp_path / "train.py"
    script.write_text(text)
    assert next_lines(tmp_path, str(script), capsys) == [str(script), *words.split()[1:]]
    written = (tmp_path / "train.toml").read_text()
    assert len(required_arguments(written)) == sum(map(str.isupper, words.split()))
    # if only steps are given, the user knows how long an epoch is
    assert ("{steps} is epochs * samples" in written) == ("epochs" not in words and "--config" not in words)
    assert ("name it, as in batch-{local_batch}.yaml" in written) == ("--config" in words)


def test_a_script_that_imports_from_its_package_is_run_as_a_module(
    commands: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("cpu")])
    for package in (tmp_path / "src" / "mine", tmp_path / "src" / "plain"):
        package.mkdir(parents=True)
        (package / "train.py").write_text(f"from .nets import net\n{STEPS}")
    (tmp_path / "src" / "mine" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path / "src")
    for name in ("mine", "plain"):
        assert next_lines(tmp_path, f"{name}/train.py", capsys)[:2] == ["-m", f"{name}.train"]
        workload = tomllib.loads((tmp_path / "train.toml").read_text())["workload"]
        assert workload["module"] == f"{name}.train"
        assert "script" not in workload
    monkeypatch.chdir(tmp_path)
    assert main(["elsewhere.toml", "--script", "src/mine/train.py", "--force"]) == 2
    assert "module mine.train, which is not here or installed" in capsys.readouterr().err
    assert not (tmp_path / "elsewhere.toml").exists()


@pytest.mark.parametrize("imported", ["lab.nets", "lab.nets as parts", "lab"])
def test_a_script_that_names_its_package_in_full_is_run_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str
) -> None:
    script = tmp_path / "lab" / "train.py"
    script.parent.mkdir()
    for name in ("__init__", "nets", "torch"):
        script.with_stem(name).touch()
    script.write_text(f"import torch\nimport {imported}")
    monkeypatch.chdir(tmp_path)
    assert read_options(script).is_in_package
    # run as `python lab/train.py` it finds what is beside it, and nothing of lab
    script.write_text("import torch\nimport nets")
    assert not read_options(script).is_in_package


@pytest.mark.parametrize(
    "name",
    [
        "samples_per_gpu",
        "imgs-per-gpu",
        "images-per-gpu",
        "bsz",
        "bs_per_gpu",
        "batch_size_train",
        "batch-size-pergpu",
    ],
)
def test_usual_names_of_a_batch_are_known(tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    others = [f'p.add_argument("--{each}", default=5)' for each in ("test-bs", "num-samples", "acc", "grad_acc_steps")]
    script.write_text("\n".join([*others, f'p.add_argument("--{name}", default=48)']))
    found = read_options(script)
    assert (known(found.batch).default, found.is_global) == (48, False)
    assert known(found.accumulation).flag == "--grad_acc_steps"


def test_the_batch_of_a_device_goes_before_that_of_all(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("".join(f"p.add_argument('--{name}-batch-size', default=8)\n" for name in ("total", "device")))
    found = read_options(script)
    assert (known(found.batch).flag, found.is_global) == ("--device-batch-size", False)


def test_a_default_that_a_call_computes_is_a_default(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os, fire\ndef main(bs: int = 8, out: str = os.getcwd()): ...\nfire.Fire(main)")
    assert read_options(script).required == ()


def test_the_devices_of_a_node_are_given_where_they_are_known(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import lightning as L\n{LIGHTNING}p.add_argument('--gpus', default=1, type=int)")
    options = read_options(script)
    assert options.devices_on(ClusterSpec(device="cuda", workers_per_node=2)) == options.devices
    assert options.devices_on(ClusterSpec(device="cpu", workers_per_node=2)) is None
    partitions = [{"partition": "a", "workers_per_node": 2}, {"partition": "b", "workers_per_node": 4}]
    several = ClusterSpec.model_validate({"device": "cuda", "gres": "none", "partitions": partitions})
    assert options.devices_on(several) is None


def test_options_that_another_module_of_the_script_declares_are_found(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "options.py").write_text(f"def get_parser():\n{indent(ARGPARSE, ' ' * 4)}")
    (tmp_path / "lab" / "export.py").write_text('p.add_argument("--batch", type=int)')
    (tmp_path / "lab" / "broken.py").write_text("def (:")
    script.write_text("from lab import broken, export\nfrom lab.options import get_parser\nargs = get_parser()")
    assert known(read_options(script).batch).flag == "--batch-size"
    assert [each.flag for each in read_options(script).required] == ["data", "--out"]
    # the script's own options, if it has any, are all that count
    script.write_text(f"{script.read_text()}\np.add_argument('--bs', type=int)")
    assert known(read_options(script).batch).flag == "--bs"
    # a module without an option of a training is a program of its own
    script.write_text("import tool")
    (tmp_path / "tool.py").write_text('p.add_argument("url")')
    assert read_options(script).required == ()
    # a dataclass may be in another module than the call that makes options of it
    (tmp_path / "lab" / "options.py").write_text(DATACLASS.partition("main(")[0])
    script.write_text("import tyro\nfrom lab.options import Options\nmain(tyro.cli(Options))")
    assert known(read_options(script).batch).default == 48


def test_what_only_the_user_knows_is_named_before_the_next_commands(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put_site(commands, [MadePartition("cpu")])
    (tmp_path / "train.py").write_text(ARGPARSE)
    assert main([str(tmp_path / "cluster.toml"), "--script", str(tmp_path / "train.py")]) == 0
    assert "It still needs samples, data and --out; tula attach fills in" in capsys.readouterr().out


def test_a_folder_that_may_not_be_entered_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("theirs").mkdir()
    close_folder("theirs", monkeypatch)
    for given in (["theirs/c.toml"], ["--script", "theirs/train.py"], ["--examples", "theirs/new"]):
        assert main(given) == 2
        assert capsys.readouterr().err == f"{given[-1]}: Permission denied\n"
    assert attach(["theirs/train.py"]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/theirs/train.py: Permission denied\n"


def test_steps_of_a_rollout_and_what_the_script_computes_are_not_given_values(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ROLLOUTS)
    found = read_options(script)
    assert (found.batch, found.steps) == (None, None)
    assert found.seed is not None
    # without environments, and with a batch that the user gave
    script.write_text(ROLLOUTS.replace("num_envs", "width").replace("total_timesteps", "x").replace("= 0", "= 8"))
    found = read_options(script)
    assert (known(found.batch).flag, known(found.steps).flag) == ("--batch-size", "--num-steps")


def test_a_default_that_is_no_value_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text('p.add_argument("--batch-size", default={[1]: 2})\n')
    batch = known(read_options(tmp_path / "train.py").batch)
    assert batch.default is None


def test_the_shipped_scripts_are_read() -> None:
    own = read_options(ROOT / "sweeps" / "own_script.py")
    assert own.batch is not None
    assert (own.batch.flag, own.batch.default, own.is_global) == ("--batch-size", 64, False)
    assert (known(own.resume).flag, own.saved) == ("--resume", ("last.pt",))
    scripts = ROOT / "tests" / "attach" / "scripts"
    for name in ("three_lines", "on_trainer", "on_lightning", "on_accelerate"):
        assert read_options(scripts / f"{name}.py").is_kept, name


def test_examples_are_written_and_hold_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "examples"
    assert main(["--examples", str(target)]) == 0
    assert "quickstart.toml" in capsys.readouterr().out
    assert load_sweep(target / "sweeps" / "quickstart.toml").name
    assert {"README.md", "generic.toml"} <= {path.name for path in (target / "slurm_templates").iterdir()}
    assert main(["--examples", str(target)]) == 2
    for other in (["--json"], ["--force"], ["--partition", "a"], ["mine.toml"]):
        assert main(["--examples", str(tmp_path / "others"), *other]) == 2
        assert "--examples: cannot be combined with other arguments" in capsys.readouterr().err
        assert not (tmp_path / "others").exists()


def test_examples_that_do_not_fit_on_the_disk_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_space(_: Path, folder: Path, **__: object) -> None:
        folder.mkdir()
        raise shutil.Error([("a.toml", "b.toml", "[Errno 28] No space left on device: 'b.toml'")])

    monkeypatch.setattr(shutil, "copytree", without_space)
    target = tmp_path / "examples"
    assert main(["--examples", str(target)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{target}: cannot be written: [Errno 28] No space left on device: ")
    assert len(error.splitlines()) == 2
    assert not target.exists()


def test_a_notebook_is_no_script_and_a_folder_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.ipynb").write_text('{"cells": []}')
    assert main(["--script", "notes.ipynb"]) == 2
    assert capsys.readouterr().err.startswith("notes.ipynb: is a notebook; expected a training script in Python")
    Path("train.py").write_text(ARGPARSE)
    Path("train.toml").mkdir()
    assert main(["--script", "train.py", "--force"]) == 2
    assert capsys.readouterr().err == "train.toml: is a folder; move it away\n"
    assert not Path("cluster.toml").exists()


def test_a_partition_that_no_file_is_written_for_is_refused(
    commands: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    target = tmp_path / "c.toml"
    asked = [str(target), "--script", str(script), "--partition", "a"]
    assert main(asked) == 2
    assert capsys.readouterr().err == "--partition: no Slurm is set up here; leave it out\n"
    target.write_text('executor = "slurm"\npartition = "b"\n')
    assert main(asked) == 2
    assert f"--partition: {target} exists already and is left as it is; leave" in capsys.readouterr().err
    assert not (tmp_path / "train.toml").exists()
    target.write_text('executor = "slurm"\npartition = "a"\n')
    assert main(asked) == 0
