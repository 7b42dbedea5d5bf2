"""The shipped sweeps and cluster files load, fit together, and agree with the paper."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import BaseModel

from tests.known import known
from tula_hpc.config import (
    ClusterSpec,
    Spec,
    SweepSpec,
    WorkloadSpec,
    check_together,
    idle_cluster_keys,
    idle_keys,
    load_cluster,
    load_sweep,
    loaders_without_cores,
    local_batches,
)
from tula_hpc.config.workload import DATASETS
from tula_hpc.sweep import main

ROOT = Path(__file__).resolve().parents[2]
SWEEPS = sorted((ROOT / "sweeps").glob("*.toml"))
CLUSTERS = sorted((ROOT / "slurm_templates").glob("*.toml"))
COMPLETE = [(ROOT / "sweeps" / "example.toml", SweepSpec), (ROOT / "slurm_templates" / "generic.toml", ClusterSpec)]
# a key, or one without a default after a #
ASSIGNMENT = re.compile(r"^(# )?([\w.]+) = ")
# each excludes the keys above it
SCRIPTS = re.compile(r"# (script|module|resume_arguments|counted_model) = ")
# a table, also after a #
TABLE = re.compile(r"^(# )?\[([\w.-]+)\]")


@pytest.fixture(autouse=True)
def with_data_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in DATASETS:
        (tmp_path / "data" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)


def sweep(name: str) -> SweepSpec:
    return load_sweep(ROOT / "sweeps" / f"{name}.toml")


def cluster(name: str) -> ClusterSpec:
    return load_cluster(ROOT / "slurm_templates" / f"{name}.toml")


def head(path: Path) -> str:
    """Return the comment at the top."""
    lines = path.read_text().splitlines()
    return "\n".join(lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_sweep_loads_and_its_head_says_the_command(path: Path) -> None:
    assert list(idle_keys(load_sweep(path))) == []
    command = known(re.search(r"tula (?:sweep|study) (\S+\.toml)(?: --cluster (\S+\.toml))?", head(path)))
    assert ROOT / command[1] == path
    check_together(load_sweep(path), load_cluster(ROOT / command[2]) if command[2] else ClusterSpec(), path, "cluster")


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_cluster_loads_and_its_head_says_the_command(path: Path) -> None:
    assert list(idle_cluster_keys(load_cluster(path))) == []
    assert f"--cluster slurm_templates/{path.name}" in head(path)


@pytest.mark.parametrize("path", [*SWEEPS, *CLUSTERS], ids=lambda path: path.stem)
def test_lines_fit_a_terminal(path: Path) -> None:
    assert max(map(len, path.read_text().splitlines())) <= 120


# the two files that document every key


def all_keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return dotted keys of a specification with their defaults; a table that takes any key is one key.

    The keys of a table that is absent by default have none.
    """
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= all_keys(field.annotation, f"{prefix}{name}.")
        elif field.default is None and (
            inner := [kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Spec)]
        ):
            found |= dict.fromkeys(all_keys(inner[0], f"{prefix}{name}."))
        else:
            found[prefix + name] = field.default
    return found


def written_keys(text: str) -> dict[str, str]:
    """Return dotted keys of a file, also those after a #, with the comment that explains each."""
    found: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        if match := TABLE.match(line):
            section = match[2]
            found[section] = found[section.rpartition(".")[0]] = line[2:].partition("#")[2].strip()
        elif match := ASSIGNMENT.match(line):
            comment = line.removeprefix("# ").partition("#")[2].strip()
            found[".".join(filter(None, [section, match[2]]))] = comment
    return found


@pytest.mark.parametrize(("path", "kind"), COMPLETE)
def test_every_key_is_there(path: Path, kind: type[BaseModel]) -> None:
    written = written_keys(path.read_text())
    assert set(all_keys(kind)) <= set(written)


@pytest.mark.parametrize(("path", "kind"), COMPLETE)
def test_every_written_value_is_the_default(path: Path, kind: type[BaseModel]) -> None:
    """This is about keys that are not commented out: the whole file equals the specification's defaults."""
    spec = kind.model_validate_json(__import__("json").dumps(tomllib.loads(path.read_text())), strict=True)
    assert spec.model_dump(exclude={"name"}) == kind.model_validate({"name": "local"}).model_dump(exclude={"name"})


@pytest.mark.parametrize(("path", "kind"), COMPLETE)
def test_only_keys_without_a_default_are_behind_a_number_sign(path: Path, kind: type[BaseModel]) -> None:
    text = path.read_text()
    active = set(written_keys("\n".join(line for line in text.splitlines() if not line.startswith("#"))))
    defaults = all_keys(kind)
    assert {key for key in defaults if key not in active} == {key for key, value in defaults.items() if value is None}


@pytest.mark.parametrize(("path", "kind"), COMPLETE)
def test_what_is_behind_a_number_sign_is_valid(path: Path, kind: type[BaseModel]) -> None:
    enabled = "\n".join(
        line.removeprefix("# ") if (ASSIGNMENT.match(line) or TABLE.match(line)) and not SCRIPTS.match(line) else line
        for line in path.read_text().splitlines()
    )
    copy = Path("enabled.toml")
    copy.write_text(enabled)
    assert load_sweep(copy) if kind is SweepSpec else load_cluster(copy)
    assert set(tomllib.loads(enabled)) == set(kind.model_fields)


@pytest.mark.parametrize(("path", "kind"), COMPLETE)
def test_sections_and_most_keys_are_explained(path: Path, kind: type[BaseModel]) -> None:
    written = written_keys(path.read_text())
    silent = {key for key in all_keys(kind) if not written[key]}
    assert len(silent) < len(written) / 4


@pytest.mark.parametrize(("path", "kind"), COMPLETE)
def test_all_choices_are_named(path: Path, kind: type[BaseModel]) -> None:
    text = path.read_text()
    found = choices(kind)
    assert "knee" in found or "slurm" in found
    assert [choice for choice in found if not re.search(rf"\b{choice}\b", text)] == []


def choices(kind: type[BaseModel]) -> list[str]:
    """Return every value of a key with a fixed set of values."""
    found: list[str] = []
    for field in kind.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += choices(field.annotation)
        elif get_origin(field.annotation) is Literal:
            found += get_args(field.annotation)
    return found


# the paper's workloads

PAPER = {
    "resnet50_imagenet": ("resnet50", "imagenet", 0.05, 5e-4, (100, 150, 200), 0.1, 8192),
    "vgg11_cifar100": ("vgg11", "cifar100", 0.01, 5e-4, (50, 75, 100), 0.2, 8192),
    "alexnet_caltech101": ("alexnet", "caltech101", 0.01, 5e-4, (25, 50, 75), 0.1, 1024),
    "mobilenetv3_caltech256": ("mobilenet_v3_large", "caltech256", 0.01, 1e-4, (40, 80), 0.1, 2048),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_sweeps_have_the_papers_hyper_parameters(name: str) -> None:
    """Tyagi, Wang: Tula, section on the set-up; batches include its knee at 16 nodes."""
    spec = sweep(name)
    work = spec.workload
    *expected, knee = PAPER[name]
    assert [work.model, work.dataset, work.lr, work.weight_decay, work.milestones, work.gamma] == expected
    assert (work.optimizer, work.momentum, work.schedule) == ("sgd", 0.9, "step")
    assert work.epochs > work.milestones[-1]
    assert spec.search.cluster_sizes == (2, 4, 8, 16)
    assert (spec.search.min_batch, spec.search.mode) == (32, "partial")
    assert knee in [16 * b for b in local_batches(spec.search, 16, 1)]
    assert (spec.training.method, spec.training.ags.delta) == ("ags", 0.5)


def test_the_papers_cluster() -> None:
    spec = cluster("v100")
    assert (spec.executor, spec.device, spec.max_nodes, spec.workers_per_node) == ("slurm", "cuda", 16, 1)
    assert spec.environment["NCCL_ALGO"] == "Ring"
    assert spec.device_memory_gb == 31.75
    assert spec.pricing.usd_per_node_hour == 2.48


def test_more_loader_processes_than_cores_are_warned_of_before_anything_runs() -> None:
    two = sweep("resnet50_imagenet").model_copy(update={"workload": WorkloadSpec(dataset="digits")})
    many = two.model_copy(update={"workload": WorkloadSpec(dataset="digits", loader_workers=256)})
    shared = ClusterSpec(executor="slurm", cpus_per_worker=4)
    assert [list(loaders_without_cores(two, where)) for where in (shared, ClusterSpec())] == [[], []]
    found = dict([*loaders_without_cores(many, shared), *loaders_without_cores(many, ClusterSpec())])
    assert list(found) == ["cpus_per_worker", "workload.loader_workers"]
    assert "at least 257, better 258, or workload.loader_workers = 4 in the sweep file" in found["cpus_per_worker"]


def test_a_v100_has_cores_for_its_loaders_and_needs_only_partition_and_account() -> None:
    spec = cluster("v100")
    for name in PAPER:
        assert list(loaders_without_cores(sweep(name), spec)) == []
    lines = (ROOT / "slurm_templates" / "v100.toml").read_text().splitlines()
    open_ = [line.split()[1] for line in lines if ASSIGNMENT.match(line) and line.startswith("# ")]
    assert open_ == ["partition", "account", "constraint", "NCCL_SOCKET_IFNAME"]


@pytest.mark.thorough
def test_a_dry_run_of_the_papers_largest_network_offers_a_v100_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(ROOT / "sweeps" / "resnet50_imagenet.toml"), "--cluster", str(ROOT / "slurm_templates" / "v100.toml")]
    # a folder that exists is examined
    load_sweep(Path(files[0])).workload.data_dir.rmdir()  # type: ignore[union-attr] # the sweep names one
    assert main([*files, "--dry-run"]) == 0
    out = capsys.readouterr().out
    trusted = re.search(r"\nby an estimate, local batches up to (\d+) fit into memory\n", out)
    offered = [max(map(int, found.split(", "))) for found in re.findall(r": local batches ([\d, ]+), in", out)]
    assert trusted is not None
    # computed by hand: activations of 256 images take 21 GiB, and those of 512 exceed the memory
    assert offered == [int(trusted[1])] * 2 == [256, 256]


def test_whatever_is_installed_is_pinned_with_its_hashes() -> None:
    """The project names them, or tests or builds with them; pip itself requires hashes for what they need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]["dev"]
    asked = [*project["project"]["dependencies"], *extras, *project["build-system"]["requires"]]
    locked = re.sub(r"\\\n", "", re.sub(r"^#.*\n", "", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    pinned: dict[str, str] = {}
    with_extras: dict[str, set[str]] = {}
    for line in locked.splitlines():
        requirement, *hashes = line.split(" --hash=sha256:")
        name, _, version = requirement.partition(";")[0].strip().partition("==")
        name, _, extra = name.partition("[")
        pinned[canonicalize_name(name)] = version
        with_extras[canonicalize_name(name)] = set(filter(None, extra.rstrip("]").split(",")))
        assert version, line
        assert hashes, line
        assert all(re.fullmatch(r"[0-9a-f]{64} *", each) for each in hashes), line
    for each in map(Requirement, asked):
        assert pinned[canonicalize_name(each.name)] in each.specifier, each
    # if a package with an extra is pinned without it, pip asks for the newest one, and then refuses it
    for each in (Requirement(text) for found in distributions() for text in found.requires or ()):
        name = canonicalize_name(each.name)
        if name in pinned and (each.marker is None or each.marker.evaluate({"extra": ""})):
            assert each.extras <= with_extras[name], each
    # otherwise packages would be built with the newest setuptools
    assert "--only-binary :all: --require-hashes --requirement constraints.txt" in (ROOT / "Makefile").read_text()


def test_the_pinned_torch_has_kernels_for_a_v100() -> None:
    """The wheel's list of architectures can be read without a GPU."""
    import torch

    pinned = known(re.search(r"^torch==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    installed = torch.__version__.partition("+")[0]
    if installed != pinned[1]:
        pytest.skip(f"torch {installed} is installed, constraints.txt pins {pinned[1]}")
    assert "sm_70" in (torch._C._cuda_getArchFlags() or "").split()


def test_local_is_what_runs_without_a_cluster_file() -> None:
    assert cluster("local") == ClusterSpec()


def test_the_quick_start_downloads_nothing_and_is_small() -> None:
    spec = sweep("quickstart")
    assert not DATASETS[spec.workload.dataset].on_disk
    assert max(spec.search.cluster_sizes) == 2
    assert sum(len(local_batches(spec.search, n, 1)) for n in spec.search.cluster_sizes) == 8


def test_the_cpu_cluster_sweep_has_four_batches_and_two_million_parameters() -> None:
    from tula_hpc.workloads.torchvision_models import build_model

    spec = sweep("cifar100_small")
    assert spec.search.cluster_sizes == (1, 2, 4)
    assert all(len(local_batches(spec.search, n, 1)) >= 4 for n in spec.search.cluster_sizes)
    assert sum(p.numel() for p in build_model(spec.workload, 100, 32).parameters()) >= 2e6
