"""`[workload]` of a training script: its keys, and one line for each mistake."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.config.test_config import complaint
from tula_hpc.cli.changed_inputs import freeze
from tula_hpc.config import WorkloadSpec, idle_keys, load_frozen_sweep, load_sweep
from tula_hpc.config.workload import PLACEHOLDERS

SCRIPT = """
name = "mine"
[workload]
script = "train.py"
arguments = ["--batch-size", "{local_batch}"]
samples = 5000
epochs = 3
"""
LIST = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print('training')\n")
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("package/train.py").write_text("")
    Path("broken.py").write_text("x = 1\nfor\n")


def test_a_script_is_taken_as_it_is() -> None:
    Path("mine.toml").write_text(SCRIPT)
    spec = load_sweep(Path("mine.toml"))
    work = spec.workload
    assert work.is_script
    assert work.script == Path.cwd() / "train.py"
    # the script has its own rate, unless something else is asked for
    assert spec.training.method == "lbt"
    assert work.entry_points == [str(work.script)]
    assert work.what_is_trained == "train.py"
    assert (
        WorkloadSpec(model="tula_hpc.workloads.small_cnns:compact_cnn", dataset="digits").what_is_trained
        == "compact_cnn on digits"
    )


def test_a_frozen_sweep_is_read_again() -> None:
    Path("mine.toml").write_text(SCRIPT + 'metric = "loss (?P<test_loss>.*)"\n')
    spec = load_sweep(Path("mine.toml"))
    Path("frozen.toml").write_text(freeze(spec))
    assert load_frozen_sweep(Path("frozen.toml")) == spec


def test_a_scaled_rate_is_said_to_change_nothing_for_a_script() -> None:
    Path("mine.toml").write_text(SCRIPT + '[training]\nmethod = "ags"\nlr_scaling = "sqrt"\n')
    found = dict(idle_keys(load_sweep(Path("mine.toml"))))
    assert found == {"training.lr_scaling": "a script sets its own rate; remove it"}


def test_a_module_is_found_and_not_imported() -> None:
    Path("package/train.py").write_text("raise SystemExit('imported')\n")
    Path("mine.toml").write_text(SCRIPT.replace('script = "train.py"', 'module = "package.train"'))
    assert load_sweep(Path("mine.toml")).workload.module == "package.train"


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        ('"train.py"', '"gone.py"', r'workload\.script: no such file: ".*/gone\.py"; check the path'),
        ('"train.py"', '"package"', r'workload\.script: ".*/package" is a folder; expected a training script'),
        ('"train.py"', '""', r"workload\.script: expected a path, got an empty text"),
        ('"train.py"', '"broken.py"', r"workload\.script: .*/broken\.py is not valid Python: invalid syntax .*line 2"),
        ('script = "train.py"', 'module = "package.gone"', r"workload\.module: no module 'package\.gone' that can be"),
        ('script = "train.py"', 'module = "package"', r"workload\.module: no module 'package' that can be run"),
        ('script = "train.py"', 'module = "a b"', r'workload\.module: expected the name of a module, .*, got "a b"'),
        ("samples = 5000", "", r"workload\.samples: is required with a script; add it, as `tula attach` prints it"),
        ("epochs = 3", "", r"workload\.epochs: is required with a script; add it, epochs = 90$"),
        ("epochs = 3", "epochs = 3\nlr = 0.1", r"workload\.lr: the script has its own lr; remove what is set here"),
        (
            "epochs = 3",
            'epochs = 3\nmodel = "resnet18"\noptimizer = "sgd"',
            r"workload\.model: the script has its own model and optimizer; remove",
        ),
        (
            '"--batch-size", "{local_batch}"',
            '"--batch-size {local_batch}"',
            r'workload\.arguments: "--batch-size {local_batch}" is one word with a space; expected "--batch-size", ',
        ),
        ("{local_batch}", "64", rf"workload\.arguments: none carries the batch; expected .*{re.escape(LIST)}"),
        (
            "{local_batch}",
            "{local_bach}",
            rf"workload\.arguments: {{local_bach}} is unknown \(did you mean 'local_batch'\?\); .* {re.escape(LIST)}",
        ),
        ('{local_batch}"', '{local_batch}", "{run_dir*2}"', r"workload\.arguments: {run_dir} is a folder and takes"),
        ("epochs = 3", "epochs = 3\naccumulation = 3", r"workload\.accumulation: expected a power of two"),
        ("epochs = 3", 'epochs = 3\nmetric = "(?P<accuracy>"', r"workload\.metric: .* is not a regular expression"),
        ("epochs = 3", 'epochs = 3\nmetric = "(?P<accuracy>.*)"', r"workload\.metric: .*group named test_accuracy or"),
        ("epochs = 3", 'epochs = 3\nmodule = "package.train"', r"workload\.module: expected either script or module"),
        *(
            ("epochs = 3", f'epochs = 3\n[training]\nmethod = "{method}"', rf'training\.method: "{method}" {words}')
            for method, words in {
                "lars": "has a rate of its own for each layer",
                "lamb": "has a rate of its own for each layer",
                "polo": "averages models in place of gradients",
                "lrs": r"needs {lr_scale} in workload\.arguments",
            }.items()
        ),
        ('{local_batch}"', '{local_batch}", "{lr_scale}"', r"training\.method: {lr_scale} is 1 for every batch with"),
        ("epochs = 3", "epochs = 3\n[training]\nclip_norm = 1.0", r"training\.clip_norm: a script does that by itself"),
        *(
            ("epochs = 3", f"epochs = 3{keys}\n[study]\nbatches = [64]\n{study}", message)
            for keys, study, message in [
                ("", 'methods = ["lars"]\nseeds = [0]', r'study\.methods\.lars: training\.method: "lars" has a rate'),
                ("", 'methods = ["lbt", "lrs"]\nseeds = [0]', r'study\.methods\.lrs: .* "lrs" needs {lr_scale} in'),
                ("", 'methods = ["lbt"]', r"study\.seeds: the trainings of all seeds would be the same"),
                ("", 'methods = ["lbt"]\nbase_lrs = [0.1]', r"study\.base_lrs: a script has its own learning rate"),
                ("", 'methods = ["lbt"]\nevaluate_every = 2', r"study\.evaluate_every: a script evaluates by itself"),
                ("", 'seeds = [0]\n[study.variants.a]\n"workload.lr" = 0.1', r"study\.variants\.a: workload\.lr: the"),
                (
                    "\nmetric = 'x (?P<test_loss>.*)'",
                    'methods = ["lbt"]\nseeds = [0]',
                    r"workload\.metric: a study compares accuracies; expected a group named test_accuracy",
                ),
            ]
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(was: str, now: str, message: str) -> None:
    assert was in SCRIPT
    line = complaint(load_sweep, SCRIPT.replace(was, now, 1))
    assert re.match(rf"in\.toml: {message}", line), line


@pytest.mark.parametrize("key", ['arguments = ["x"]', "accumulation = 2", 'counted_model = "Net"', "hang_minutes = 5"])
def test_keys_of_a_script_need_one(key: str) -> None:
    line = complaint(load_sweep, f'name = "x"\n[workload]\n{key}\n')
    assert re.match(r"in\.toml: workload\.\w+: belongs to a training script; set script or module, or", line), line


def test_braces_of_the_scripts_own_stay() -> None:
    Path("mine.toml").write_text(SCRIPT.replace('"--batch-size"', '"${now}", "{}", "{1}", "--batch-size"'))
    assert load_sweep(Path("mine.toml")).workload.arguments[:3] == ("${now}", "{}", "{1}")


def test_a_script_next_to_the_file_is_one_place_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("mine.toml").write_text(SCRIPT)
    Path("elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_sweep(Path("../mine.toml")).workload.script == tmp_path / "train.py"
