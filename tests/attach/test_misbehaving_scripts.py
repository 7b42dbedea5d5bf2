"""A misbehaving script gives one clear line and a typed failure, nothing hangs, and no process of it remains."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import tula_hpc.attach as tula
from tests.attach.script_runs import BATCH, QUICK, SCRIPTS, measurement_of, profiled
from tests.forked_jobs import forking_scripts
from tests.known import known
from tests.test_memory_errors import SHARED_GPU
from tula_hpc.attach.child import _run
from tula_hpc.attach.hangs import Place
from tula_hpc.attach.processes import Child, ProcessEnd, _without_step, end_as, error_of, worst
from tula_hpc.attach.reporting import ChildSpec, ProcessMessage, failed_by, unexplained
from tula_hpc.attach.script import Script
from tula_hpc.attach.train.peers import lacking_in
from tula_hpc.checkpoint.store import CheckpointStore
from tula_hpc.config import TrainingSpec
from tula_hpc.errors import CheckpointError, DivergedError, InputError, TulaError
from tula_hpc.failure_kinds import Failure
from tula_hpc.process_memory import descendants
from tula_hpc.records import Configuration

ROOT = Path(__file__).resolve().parents[2]
MISBEHAVING = SCRIPTS / "misbehaving.py"
ECC = "uncorrectable ECC error encountered"


@pytest.fixture(autouse=True)
def forked() -> Iterator[None]:
    """Fork processes: their behaviour is the same, and `test_a_process_ends_with_its_worker` starts one."""
    with forking_scripts():
        yield


def misbehave(how: str, folder: Path, world: int = 1, step_s: float = 60.0, script: Path = MISBEHAVING) -> ProcessEnd:
    return worst(profiled(script, (how, str(BATCH)), folder, world, step_s))


@pytest.mark.parametrize(
    ("how", "failure", "words"),
    [
        ("imports nothing", Failure.BAD_INPUT, "ModuleNotFoundError: No module named 'no_such_module' (misbehaving"),
        ("finds no data", Failure.BAD_INPUT, "; looked for from /"),
        ("saves to a full disk", Failure.NO_SPACE, "torch.save could not write all of it; make space on the disk"),
        ("needs several workers", Failure.BAD_INPUT, "; if it needs several workers, leave 1 out of search.cluster_si"),
        ("ends at once", Failure.BAD_INPUT, "misbehaving.py ended before its first optimizer step; expected optimi"),
        ("trains no module", Failure.BAD_INPUT, " trains by Adam only parameters that no torch.nn.Module has; have a"),
        (
            "only prints its error",
            Failure.BAD_INPUT,
            "last line of output: Error: no data here; if that is not why: expected op",
        ),
        ("goes on from numbers", Failure.BAD_INPUT, "torch.load refuses numpy._core.multiarray.scalar, unless with we"),
        (
            "ends",
            Failure.BAD_INPUT,
            "after 2 optimizer steps, before it was measured; a profile raises {epochs} until there",
        ),
        (
            "exits with words",
            Failure.BAD_INPUT,
            "code 1 before its first optimizer step; its last line of output: no data here",
        ),
        ("leaves", Failure.BAD_INPUT, "ended its process by itself, with exit code 0; expected it to return or to"),
        ("takes no batch", Failure.BAD_INPUT, "workload.arguments: asked for 4 samples a forward pass, Linear got 6"),
        ("halves its batch", Failure.DEVICE_OOM, "goes on otherwise: asked for 4 samples a forward pass, Linear got 2"),
        ("accumulates", Failure.BAD_INPUT, "takes 2 forward passes for an optimizer step, not 1; set workload.accum"),
        ("accumulates more", Failure.BAD_INPUT, "takes more and more forward passes for a step, 1 at first and then"),
        ("feeds a critic", Failure.BAD_INPUT, 'its steps should count: set workload.counted_model = "Linear"'),
        ("takes many passes", Failure.BAD_INPUT, "takes 32 forward passes for an optimizer step, not 1; set workload."),
        ("takes five passes", Failure.BAD_INPUT, "5 forward passes for an optimizer step, not 1; only powers of 2 can"),
        (
            "calls its closure",
            Failure.BAD_INPUT,
            "misbehaving.py has an optimizer, LBFGS, that calls its closure several times in a step; exp",
        ),
        (
            "calls a method",
            Failure.BAD_INPUT,
            "its methods or parts: end its class with `forward = loss`, and write `model(…)` for `model.loss(…)`",
        ),
        ("calls forward", Failure.BAD_INPUT, "none of its methods or parts: write `model(…)` for `model.forward(…)`"),
        ("keeps its batch", Failure.BAD_INPUT, "misbehaving.py: several of its steps pass over one batch; expected a "),
        ("steps twice", Failure.BAD_INPUT, "misbehaving.py: several of its steps pass over one batch; expected a n"),
        ("shards its model", Failure.BAD_INPUT, "misbehaving.py shards its model (FSDP), which is not measured or"),
        (
            "reads SLURM_STEP_ID",
            Failure.BAD_INPUT,
            "; of Slurm's variables a script gets only those of its place, such",
        ),
        ("changes by hand", Failure.BAD_INPUT, "misbehaving.py changes its parameters by hand, or by an optimizer of"),
        ("spawns", Failure.BAD_INPUT, "misbehaving.py starts workers of its own (torch.multiprocessing.spawn); here"),
        ("asks", Failure.BAD_INPUT, "asks for input, but a job has none"),
        ("kills its group", Failure.KILLED, "misbehaving.py was ended by SIGKILL"),
        ("has no memory", Failure.DEVICE_OOM, "OutOfMemoryError: CUDA out of memory"),
        ("has no host memory", Failure.HOST_OOM, "MemoryError"),
    ],
)
def test_a_failure_is_one_line(how: str, failure: Failure, words: str, tmp_path: Path) -> None:
    outcome = misbehave(how, tmp_path)
    assert outcome.message.failure is failure
    assert words in outcome.message.detail
    assert "\n" not in outcome.message.detail
    assert outcome.log in str(error_of(outcome, "workload.script"))


def test_a_script_that_trains_no_module_for_a_while_is_told_so_once_it_ends(tmp_path: Path) -> None:
    message = misbehave("trains no module for a while", tmp_path).message
    assert ", only Adam; it trains by Adam only parameters that no torch.nn.Module has; have a" in message.detail


def test_what_steps_before_the_model_exists_is_no_hindrance(tmp_path: Path) -> None:
    outcome = misbehave("steps before its model", tmp_path)
    assert measurement_of(outcome).parameters == 36
    assert outcome.message.result["others"] == ["Adam", "SGD"]


def test_a_method_that_is_called_past_the_wrapper_is_named(tmp_path: Path) -> None:
    message = misbehave("calls past its wrapper", tmp_path, world=2).message
    assert message.failure is Failure.BAD_INPUT
    assert "end its class with `forward = loss`, and write `model(…)` for `model.loss(…)`" in message.detail


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("averages its weights", "takes its steps within no_sync, so that its workers exchange no gradients"),
        ("lets workers run out", "misbehaving.py lets workers run out of data before others (torch's Join); here"),
    ],
)
def test_workers_that_do_not_step_together_are_refused(how: str, words: str, tmp_path: Path) -> None:
    message = misbehave(how, tmp_path, world=2).message
    assert message.failure is Failure.BAD_INPUT
    assert words in message.detail


@pytest.mark.parametrize("how", ["hangs", "hangs later"])
def test_a_script_that_takes_no_step_is_given_up(how: str, tmp_path: Path) -> None:
    # the second worker takes steps before that, even on a busy machine
    step_s = 2 if how == "hangs" else 5
    outcome = misbehave(how, tmp_path, step_s=step_s)
    assert outcome.message.failure is Failure.BAD_INPUT
    assert f"misbehaving.py took more than {step_s} s (search.first_step_minutes)" in outcome.message.detail
    assert re.search(r": its worker is at misbehaving.py:\d+, `.*time.sleep", outcome.message.detail)


@pytest.mark.parametrize(
    ("how", "began"),
    [("waits apart", "misbehaving.py took more than 5 s "), ("waits apart, and gives up", "the workers wait for each")],
)
def test_workers_that_wait_for_each_other_are_reported_with_their_places(how: str, began: str, tmp_path: Path) -> None:
    step_s = 5.0 if how == "waits apart" else 60.0
    message = misbehave(how, tmp_path, 2, step_s=step_s).message
    assert message.failure is Failure.BAD_INPUT
    assert message.detail.startswith(began)
    places = r"rank 0 is at misbehaving.py:\d+, `dist.barrier\(\)`; rank 1 is at misbehaving.py:\d+, `model\(.*backward"
    assert re.search(places, message.detail), message.detail
    assert "; call each collective on every worker" in message.detail


def test_a_first_look_names_no_key_for_the_time_until_a_step() -> None:
    spec = ChildSpec(mode="look", program=Script(MISBEHAVING, None, ()), message_file=Path("said"))
    child: Any = SimpleNamespace(spec=spec, message=lambda: None)
    assert _without_step(child, 600.0) == "misbehaving.py took more than 600 s until its first optimizer step"


def test_an_error_at_a_scripts_end_is_reported_as_one_within_it() -> None:
    """Weights may turn out to be nan, or the disk full, when the last lines of metrics are written."""

    def ended(code: int) -> ProcessMessage:
        raise DivergedError("weights of the model are nan")

    def fail(error: BaseException) -> NoReturn:
        raise SystemExit(str(error))

    program = SimpleNamespace(run=lambda home: sys.exit(0))
    mode: Any = SimpleNamespace(spec=SimpleNamespace(program=program, home=ROOT), ended=ended, fail=fail)
    with pytest.raises(SystemExit, match="weights of the model are nan"):
        _run(mode)


def test_a_scripts_exit_functions_still_have_its_processes_which_then_are_killed(tmp_path: Path) -> None:
    """Torch would raise in the main thread when a process of a loader is killed."""
    script = tmp_path / "leaves.py"
    script.write_text("""
import atexit, multiprocessing, signal, sys, time
from torch import zeros
from torch.utils.data import DataLoader, TensorDataset

def write(queue):
    # as a script's own processes inherit its handlers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(queue.get())
    sys.stdout.flush()
    time.sleep(600)

def end():
    queue.put("written at the end")
    time.sleep(1)

queue = multiprocessing.Queue()
multiprocessing.Process(target=write, args=(queue,), daemon=True).start()
loader = iter(DataLoader(TensorDataset(zeros(4)), num_workers=1))
atexit.register(end)
""")
    code = f"""
from types import SimpleNamespace
from tula_hpc.attach import child, script
program = script.Script(script.Path({str(script)!r}), None, ())
mode = SimpleNamespace(spec=SimpleNamespace(program=program, home=None, mode="train"), ended=lambda _: 0, say=id)
raise SystemExit(child._run(mode))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "written at the end\n", "")


PECULIAR = ["catches", "handles TERM", "has a thread", "prints", "has two optimizers"]
PECULIAR += ["has sparse gradients", "calls layers", "has a loss of two passes", "acts", "keeps models in a dict"]


@pytest.mark.parametrize("how", PECULIAR)
def test_what_a_script_may_do_is_no_hindrance(how: str, tmp_path: Path) -> None:
    outcome = misbehave(how, tmp_path)
    assert measurement_of(outcome).parameters == 36
    assert outcome.message.result["others"] == (["Adam of Linear"] if how == "has two optimizers" else [])


def test_optimizers_that_step_together_are_measured_as_one(tmp_path: Path) -> None:
    outcome = misbehave("has partners", tmp_path)
    measured = measurement_of(outcome)
    assert (outcome.message.result["optimizer"], outcome.message.result["others"]) == ("SGD and AdamW", [])
    # one momentum of 32 weights, two averages of 4 and a count of steps
    assert known(measured.memory).optimizer_bytes == 4 * (32 + 2 * 4 + 1)
    # the step of the second one is no wait for data, though the script loads none by a loader
    assert measured.times is not None
    assert measured.times.data_time_s < measured.times.optimizer_time_s


@pytest.mark.parametrize("accumulation", [4, None])
def test_steps_are_measured_once_they_take_no_more_passes(accumulation: int | None, tmp_path: Path) -> None:
    (outcome,) = profiled(MISBEHAVING, ("accumulates more", str(BATCH)), tmp_path, accumulation=accumulation)
    assert outcome.is_done, outcome.message.detail
    assert outcome.message.result["accumulation"] == 4
    assert outcome.message.steps < 90


@pytest.mark.parametrize("how", ["gives batches", "gives batches as they are", "takes turns"])
def test_the_samples_of_an_epoch_are_unknown_where_the_data_set_does_not_have_as_many_items(
    how: str, tmp_path: Path
) -> None:
    """Its items may be whole batches, or an epoch may have those of several."""
    outcome = misbehave(how, tmp_path)
    assert measurement_of(outcome).local_batch == BATCH
    assert outcome.message.result["samples"] == 0


def test_a_process_that_a_script_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    assert misbehave("leaves a process", tmp_path).is_done
    process = int((tmp_path / "work" / "left.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@pytest.mark.parametrize(("ending", "code"), [("exit 3", 3), ("kill -9 $$", -9)])
def test_an_ended_process_keeps_its_number_until_the_group_of_that_number_is_killed(
    ending: str, code: int, tmp_path: Path
) -> None:
    """Else the number could have passed to a process group of somebody's own, which would be killed."""
    others = set(descendants("self"))
    answers, other_end = os.pipe()
    os.close(other_end)
    script = Script(MISBEHAVING, None, ())
    spec = ChildSpec(mode="profile", program=script, home=tmp_path, message_file=tmp_path / "x", parent=os.getpid())
    process = subprocess.Popen(["sh", "-c", ending], start_new_session=True)
    child = Child(spec, process, tmp_path / "log", others, answers)
    assert child.wait(60.0) == code
    os.kill(process.pid, 0)
    child.end()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_process_ends_with_its_worker(tmp_path: Path) -> None:
    """The worker may die of anything."""
    program = f"""
from pathlib import Path
from tests.attach.script_runs import profiled
profiled(Path({str(MISBEHAVING)!r}), ("handles TERM and hangs", "4"), Path({str(tmp_path)!r}))
"""
    message_file = tmp_path / "rank-0.message"
    spec_file = tmp_path / "rank-0.spec"
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as worker:
        wait_for(message_file.exists)
        # including children that it is just starting
        children = [pid for pid in descendants(worker.pid) if str(spec_file) in command_of(pid)]
        assert children
        worker.kill()
    wait_for(lambda: not any(command_of(child) for child in children))


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def command_of(process: int) -> str:
    """Return the command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize("how", ["trains apart", "trains apart for a while"])
def test_several_workers_have_to_train_together(how: str, tmp_path: Path) -> None:
    outcome = misbehave(how, tmp_path, world=2)
    assert outcome.message.failure is Failure.BAD_INPUT
    assert "does not wrap Linear, the first model that an optimizer trains, in Distrib" in outcome.message.detail


def test_slow_steps_of_separate_workers_are_reported_as_lacking_a_wrapped_model(tmp_path: Path) -> None:
    message = misbehave("trains apart slowly", tmp_path, world=2, step_s=5.0).message
    assert "until its first optimizer step of a model in DistributedDataParallel" in message.detail


def test_several_workers_may_search_for_a_rate_each_by_itself_before_they_train_together(tmp_path: Path) -> None:
    outcome = misbehave("searches a rate first", tmp_path, world=2)
    assert outcome.is_done, outcome.message.detail
    result = outcome.message.result
    assert (result["wrapped"], result["optimizer"], result["others"]) == (True, "SGD", [])


def test_a_batch_that_no_tensor_shows_counts_as_the_one_asked_for(tmp_path: Path) -> None:
    search = QUICK.model_copy(update={"warmup_steps": 3})
    (outcome,) = profiled(MISBEHAVING, ("draws neighbours", str(BATCH)), tmp_path, search=search)
    assert outcome.is_done, outcome.message.detail
    assert outcome.message.result["forward_batch"] == 0
    assert outcome.message.result["measurement"]["local_batch"] == BATCH


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("keeps all", ""),
        # a checkpoint has only the states of rank 0
        ("keeps all on rank 0", ""),
        # the model's teacher is in no optimizer
        ("keeps a student", ""),
        (
            "keeps no momentum",
            "tula.keep: the state of the SGD that takes the steps would begin anew after a stop, as n",
        ),
        ("keeps no weights", "tula.keep: the weights of Linear would begin anew after a stop, as nothing that is kept"),
    ],
)
def test_what_is_kept_has_the_weights_and_what_the_optimizer_remembers(how: str, words: str, tmp_path: Path) -> None:
    world = 2 if how in ("keeps all on rank 0", "keeps a student", "keeps no weights") else 1
    outcome = misbehave(how, tmp_path, world)
    assert outcome.is_done == (not words), outcome.message.detail
    assert outcome.message.detail.startswith(words)
    assert outcome.message.detail.endswith("keep both, the inner one first") == bool(words)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_framework_keeps_its_training_whatever_else_is_kept(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    frameworks = "tula_hpc.attach.frameworks"
    for name in ("huggingface", "lightning_fit"):
        monkeypatch.setitem(sys.modules, f"{frameworks}.{name}", SimpleNamespace(callback_for=id))
    for callback in (tula.trainer_callback, tula.lightning_callback):
        for name in ("_kept", "_is_framework"):
            monkeypatch.setattr(tula, name, None)
        calls: list[Callable[[], object]] = [callback, lambda: tula.keep(scores=nn.Linear(1, 1))]
        for call in calls if is_first else reversed(calls):
            call()
        assert tula.was_kept()
        assert not tula.kept_things()


class OfFewBits(Tensor):
    """A stand-in for the states of torchao's optimizers, which support only what those do with them."""

    @classmethod
    def __torch_dispatch__(cls, *call: Any, **_: Any) -> Any:
        raise NotImplementedError(f"{cls.__name__} has no {call[0]}")


def test_tensors_of_a_kind_of_their_own_are_not_compared_with_what_is_kept() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    few = Tensor._make_wrapper_subclass(OfFewBits, (2, 2))
    optimizer.state[model.weight] = {"momentum_buffer": few}
    kept = SimpleNamespace(state_dict=lambda: {"few": few, "weight": model.weight}, load_state_dict=print)
    assert not lacking_in({"all": kept}, model, optimizer)


def test_each_optimizer_that_steps_has_to_be_kept() -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([model.weight], 0.1, momentum=0.9), torch.optim.AdamW([model.bias])]
    torch.autograd.backward(model(torch.randn(3, 2)).square().mean())
    for optimizer in optimizers:
        optimizer.step()
    kept = {"model": model, "optimizer": optimizers[0]}
    assert lacking_in(kept, model, *optimizers).startswith("the state of the AdamW that takes the steps would begin an")
    assert not lacking_in(kept | {"other": optimizers[1]}, model, *optimizers)


def test_a_profile_refuses_to_keep_what_has_no_state() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InputError, match=r"^tula\.keep\(best=…\): a dict has no state_dict$"):
        lacking_in({"model": model, "best": {"accuracy": 0.5}}, model, optimizer)


def test_a_method_that_needs_the_communication_hook_is_refused_by_a_profile_where_the_script_has_its_own(
    tmp_path: Path,
) -> None:
    outcome = worst(profiled(MISBEHAVING, ("has a hook", str(BATCH)), tmp_path, 2, training=TrainingSpec(method="ags")))
    assert outcome.message.detail.startswith('training.method: "ags" needs the communication hook')


def test_a_method_that_scales_gradients_is_refused_by_a_profile_where_they_are_sparse(tmp_path: Path) -> None:
    training = TrainingSpec(method="static")
    (outcome,) = profiled(MISBEHAVING, ("has sparse gradients", str(BATCH)), tmp_path, training=training)
    assert outcome.message.detail == (
        'training.method: "static": gradient scaling needs dense real gradients; a parameter of shape (12, 3) has a '
        'sparse one; expected "lbt", or "lrs" or "sqrt" with {lr_scale}'
    )


def test_a_script_that_divides_its_passes_among_its_workers_is_refused_with_what_to_do(tmp_path: Path) -> None:
    alone, both = (
        worst(profiled(MISBEHAVING, ("divides its passes", str(BATCH)), tmp_path / str(world), world, accumulation=4))
        for world in (1, 2)
    )
    assert alone.is_done
    assert both.message.failure is Failure.BAD_INPUT
    assert "takes 2 forward passes for an optimizer step, not 4; it seems to divide" in both.message.detail
    assert "among its 2 workers: give {workers} to the argument that sets them" in both.message.detail
    (cut,) = profiled(MISBEHAVING, ("cuts its batch", str(BATCH)), tmp_path / "cut", accumulation=2)
    assert "not 2; it cuts 8 samples by itself into passes of 2; keep to batches that it takes in" in cut.message.detail
    batch = misbehave("divides its batch", tmp_path / "batch", world=2).message
    assert "asked for 4 samples a forward pass, Linear got 2: it divides its batch among its workers" in batch.detail


def test_workers_that_all_see_all_samples_are_distinguished_from_those_that_share_them(tmp_path: Path) -> None:
    found = {}
    for how, counts in (("shares no data", True), ("shares no data", False), ("shares its data", True)):
        folder = tmp_path / f"{how} {counts}"
        settings = {"counts_epochs": counts, "counts_steps": not counts, "samples": 1000}
        outcome = worst(profiled(MISBEHAVING, (how, str(BATCH)), folder, 2, **settings))
        found[how, counts] = outcome.message
    assert [each.failure for each in found.values()] == [Failure.BAD_INPUT, None, None]
    message = found["shares no data", True]
    assert "each of its 2 workers goes through all 1,000 samples in an epoch" in message.detail
    assert found["shares no data", False].result["measurement"]["epoch_samples"] == 1000


def test_workers_meet_where_they_can_whatever_a_script_says(tmp_path: Path) -> None:
    outcome = misbehave("meets elsewhere", tmp_path, world=2)
    assert outcome.is_done
    output = Path(outcome.log).read_text()
    assert "not 192.0.2.1 as misbehaving.py has it" in output
    # torch's own store listens on all interfaces
    assert re.search(r"listens at \['0100007F:[0-9A-F]{4}'\]", output), output
    assert misbehave("is placed by Slurm", tmp_path / "slurm", world=2).is_done


@pytest.mark.parametrize(
    ("code", "failure"),
    [(errno.EIO, Failure.KILLED), (errno.ESTALE, Failure.KILLED), (errno.EACCES, Failure.BAD_INPUT)],
)
def test_a_checkpoint_that_a_file_system_does_not_take_this_time_is_no_mistake_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, failure: Failure
) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path / "checkpoints").save({}, samples_seen=1)
    assert failed_by(caught.value).failure is failure


@pytest.mark.parametrize(
    ("last", "failure"),
    [("socketProgress: Connection refused", Failure.KILLED), (f"Cuda failure 214 '{ECC}'", Failure.DEVICE_FAILED)],
)
def test_a_network_of_nccl_that_fails_is_no_mistake_of_the_script(last: str, failure: Failure) -> None:
    words = "NCCL error in: NCCLUtils.cpp:77, unhandled system error (run with NCCL_DEBUG=INFO for details)"
    assert failed_by(RuntimeError(f"{words}\nLast error:\n{last}")).failure is failure


def test_a_script_tells_its_worker_who_else_held_the_gpu_on_which_memory_ran_out() -> None:
    message = failed_by(torch.OutOfMemoryError(SHARED_GPU))
    assert message.failure is Failure.DEVICE_OOM
    assert message.held.endswith("by process 4194305")
    assert failed_by(MemoryError()).held == ""


@pytest.mark.parametrize(
    ("failure", "mine", "others"),
    [(Failure.DEVICE_OOM, ["recorded", "met"], ["met"]), (Failure.DEVICE_FAILED, [], ["met"]), (Failure.BUG, [], [])],
)
def test_no_worker_ends_before_the_one_that_puts_the_failure_on_record(
    failure: Failure, mine: list[str], others: list[str]
) -> None:
    """The first one that ends makes `srun -K1` kill the others."""
    found = ProcessEnd(rank=1, message=ProcessMessage(state="failed", failure=failure, detail=ECC), log="/nowhere")
    for rank, expected in ((1, mine), (0, others), (None, others)):
        done: list[str] = []
        met = partial(done.append, "met")

        def record(_: Failure, done: list[str] = done) -> None:
            done.append("recorded")

        with pytest.raises((SystemExit, TulaError)):
            end_as(found, Configuration(1, 2, BATCH), rank, record, met)
        assert done == expected


@pytest.mark.parametrize("failure", [Failure.DEVICE_OOM, Failure.DEVICE_FAILED])
def test_a_worker_says_why_the_script_failed_where_rank_0_has_ended_with_the_store(failure: Failure) -> None:
    def meet() -> None:
        raise torch.distributed.DistStoreError("connection reset by peer")

    found = ProcessEnd(rank=0, message=ProcessMessage(state="failed", failure=failure, detail=ECC), log="/nowhere")
    with pytest.raises(SystemExit, match=rf"rank 0 at .*{ECC}"):
        end_as(found, Configuration(1, 2, BATCH), 1, lambda _: None, meet)


def test_different_collectives_of_workers_are_reported() -> None:
    """gloo prints this if one worker calls all_reduce within `if rank == 0` while the others exchange gradients."""
    words = (
        "[enforce fail at tcp/pair.cc:456] op.preamble.length <= op.nbytes. 9476 vs 4. Received data size doesn't match"
    )
    script = Script(MISBEHAVING, None, ())
    message = unexplained(
        script, None, -signal.SIGABRT, f"terminate called\n  what(): {words} expected size. Is there a"
    )
    assert message.failure is Failure.BAD_INPUT
    assert "workers of misbehaving.py took part in different collectives (one sent 9476 bytes where 4" in message.detail
    assert unexplained(script, None, -signal.SIGABRT, "Aborted").failure is Failure.KILLED


def test_the_worker_that_failed_first_explains_the_others(tmp_path: Path) -> None:
    started = time.monotonic()
    outcomes = profiled(MISBEHAVING, ("fails on one", str(BATCH)), tmp_path, world=2)
    assert not any(outcome.is_done for outcome in outcomes)
    error = error_of(worst(outcomes), "workload.script")
    assert isinstance(error, InputError)
    assert "ValueError: the second worker has no more data" in str(error)
    assert "Traceback" in Path(worst(outcomes).log).read_text()
    # nobody waited for a collective's time limit
    assert time.monotonic() - started < 150


def test_a_worker_that_ends_early_is_reported_with_those_that_wait_for_it(tmp_path: Path) -> None:
    message = misbehave("lets one end", tmp_path, 2).message
    assert message.failure is Failure.BAD_INPUT
    assert message.detail.startswith("misbehaving.py ended before its first optimizer step; expected optimizer.step()")
    assert re.search(r"; that was rank 1, while rank 0 is at misbehaving.py:\d+, `", message.detail), message.detail


def test_a_peer_lost_because_it_had_finished_is_reported_with_its_number_of_batches() -> None:
    """This happens with shares of different sizes; trying again would end the same."""
    place = Place(file=MISBEHAVING, line=1, is_collective=True)
    done = ProcessEnd(rank=0, message=ProcessMessage(state="done", steps=33, result={"end": "exited"}), log="log")
    failed = ProcessMessage(
        state="failed", failure=Failure.KILLED, detail="lost a peer: Broken pipe", follows=True, at=place
    )
    lost = ProcessEnd(rank=1, message=failed, log="log")
    reported = worst([done, lost]).message
    assert reported.failure is Failure.BAD_INPUT
    assert reported.detail.startswith("rank 0 ended after 33 steps, while rank 1 is at misbehaving.py:1, `")
    assert reported.detail.endswith("give each worker as many batches as the others, as DistributedSampler does")
    # a worker that was stopped is no reason
    stopped = done.model_copy(update={"message": done.message.model_copy(update={"result": {"end": "stopped"}})})
    assert worst([stopped, lost]).message.failure is Failure.KILLED


def test_a_syntax_error_that_only_a_job_sees_is_bad_input(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import nothing_yet\nthis is no Python\n")
    outcome = misbehave("any", tmp_path, script=script)
    assert outcome.message.failure is Failure.BAD_INPUT
    assert "SyntaxError: invalid syntax (broken.py, line 2)" in outcome.message.detail
