"""Submission to Slurm through submitit that makes each array exactly once, whatever the controller does meanwhile.

submitit calls sbatch once and takes whatever goes wrong for a refusal. But a controller that is
paused, restarts or is overloaded lets sbatch fail although the job may have been accepted. So every
submission has a name of its own, and that name is looked up before another attempt. Jobs find their
pickles by array index: once sbatch was called nothing is left to do, and a submitter that is killed
then has lost nothing.
"""

from __future__ import annotations

import re
import shlex
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit import Job
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from tula_hpc.env import outside_of_job
from tula_hpc.errors import LaunchError, NotStartedError, RefusedError, SubmitLimitError
from tula_hpc.launch import slurm
from tula_hpc.launch.job_files import job_command, write_pickle
from tula_hpc.launch.slurm_command import no_answer, run
from tula_hpc.records import write_atomically

# after a failed attempt; about 8 minutes in all
PAUSES_S = (2, 5, 10, 20, 40, 60, 120, 120, 120)
# sbatch tries again by itself while the controller does not answer
SUBMIT_S = 300.0
# so long an answer about a job that nobody submits is waited for
TEST_S = 30.0
NO: dict[type[RefusedError], str] = {
    RefusedError: "the scheduler refused the job",
    SubmitLimitError: "a limit of the cluster on submitted jobs is reached",
}
# submitit would write --wckey=submitit, which is refused where wckeys are enforced
DEFAULTS: dict[str, Any] = {"wckey": None}
# of a job whose process is killed, see `come_again`
REVIVALS = 3
_COULD_START = re.compile(r"\bJob [0-9]+ to start at\b")
_PREFIX = re.compile(r"^((sbatch|error|allocation failure): )*")
# after attempts that failed
REQUEUE_PAUSES_S = (2, 5, 10, 30)
# perhaps "… on cluster a"
_SUBMITTED = re.compile(r"^Submitted batch job ([0-9]+)\b", re.MULTILINE)
# all that is printed by a site's sbatch that is told --parsable
_ID_ALONE = re.compile(r"\s*([0-9]+)(?:;\S+)?\s*")
# a controller that has just come back may still have old requests to work off
SETTLE_S = 5.0


def trust_folder(folder: Path) -> list[str]:
    """Shell lines that end a job whose folder has come to belong to somebody else."""
    place = shlex.quote(str(folder))
    return [
        f"[ -O {place} ] || {{ echo {place}': is not yours; nothing in it is executed' >&2; exit 1; }}"
    ]


def know_pickles(hashes: Sequence[str]) -> str:
    """Return a line of bash with the SHA-256 of each task's pickle."""
    return f"tula_pickles=({' '.join(hashes)})"


def start_command(python: str, folder: Path) -> str:
    """Return what each worker of the task runs, with the hash that its script knows."""
    index = "${SLURM_ARRAY_TASK_ID:-0}"
    return job_command(python, folder, f'"{index}"', f'"${{tula_pickles[{index}]}}"')


def come_again(folder: Path) -> list[str]:
    """Shell lines after the task: a job that was killed, though nobody cancelled it, is requeued a few times.

    Not one that ended by itself, with code 0 or 1: it has said why.
    """
    killed = shlex.quote(str(folder / "killed"))
    return [
        "tula_code=$?",
        'if [ "$tula_code" -gt 1 ] && scontrol show job --oneliner "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then',
        f'  echo "$tula_code" >>{killed}',
        # a controller that does not answer for a moment must not be the end of the sweep
        f'  [ "$(wc -l <{killed})" -gt {REVIVALS} ] || for pause in {" ".join(map(str, REQUEUE_PAUSES_S))}; do',
        '    scontrol requeue "$SLURM_JOB_ID" && break',
        '    sleep "$pause"',
        "  done",
        "fi",
        'exit "$tula_code"',
    ]


class PatientExecutor(SlurmExecutor):
    """submitit's executor with another way through sbatch; its parameter `name` must be unique to the submission.

    Raises: SubmitLimitError: A limit on submitted jobs is reached; fewer at a time, or later, may
        be accepted. RefusedError: The scheduler said no for another reason. LaunchError: It did not
        answer for minutes; whether there is a job is open.
    """

    def __init__(self, folder: Path, max_num_timeout: int) -> None:
        super().__init__(folder, max_num_timeout=max_num_timeout)
        self.parameters |= DEFAULTS

    def _internal_process_submissions(
        self, delayed_submissions: list[DelayedSubmission]
    ) -> list[Job[Any]]:
        for delayed in delayed_submissions:
            delayed.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
        folder, count = Path(self.folder), len(delayed_submissions)
        hashes = [
            write_pickle(folder, index, delayed)
            for index, delayed in enumerate(delayed_submissions)
        ]
        self.parameters["setup"] = [*self.parameters["setup"], know_pickles(hashes)]
        if count > 1:
            self.parameters["map_count"] = count
        ids = slurm.task_ids(self._submit_once(), count)
        return [SlurmJob(self.folder, task, list(range(self._num_tasks()))) for task in ids]

    @property
    def _submitit_command_str(self) -> str:
        return start_command(self.python, Path(self.folder))

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        """Return the id from sbatch's words; a site's own words around them may speak of jobs too."""
        text = string if isinstance(string, str) else string.decode(errors="replace")
        if found := _SUBMITTED.findall(text):
            return str(found[-1])
        if alone := _ID_ALONE.fullmatch(text):
            return alone[1]
        raise FailedSubmissionError(
            f"sbatch does not say which job it submitted: {_last_line(text)}"
        )

    def _submit_command(self, command: str) -> Job[Any]:
        """As submitit's, but sbatch may print whatever it likes.

        Raises:
            FailedJobError: sbatch failed; its words.
            FailedSubmissionError: It did not say which job it has submitted.
            LaunchError: It cannot be started, or had to be stopped.
        """
        key = uuid.uuid4().hex
        script = Path(self.folder) / f".submission_file_{key}.sh"
        write_atomically(script, self._make_submission_file_text(command, key))
        done = run(self._make_submission_command(script), SUBMIT_S)
        if done.code < 0:
            raise LaunchError(f"sbatch failed: {done.complaint}")
        if done.code:
            raise FailedJobError(done.complaint)
        job_id = self._get_job_id_from_submission_command(done.stdout)
        job: Job[Any] = SlurmJob(self.folder, job_id, list(range(self._num_tasks())))
        job.paths.move_temporary_file(script, "submission_file", keep_as_symlink=True)
        return job

    def _submit_once(self) -> str:
        """One array under this name, and its id."""
        words, tried = "", False
        for pause_s in PAUSES_S:
            if tried and (found := submissions_named(self.parameters["job_name"])):
                return found[0]
            try:
                given = [name for name, value in self.parameters.items() if value is not None]
                with outside_of_job([*given, *self.parameters.get("additional_parameters", {})]):
                    job_id = str(self._submit_command(self._submitit_command_str).job_id)
            except NotStartedError:
                raise
            except (FailedJobError, LaunchError) as error:
                words, tried = _last_line(str(error)), True
                # where sbatch was killed by us, nobody has refused anything
                refusal = _refusal(str(error)) if isinstance(error, FailedJobError) else None
                if refusal is not None:
                    raise refusal(f"{NO[refusal]}: {_with_limit(words, str(error))}") from None
                slurm.say(f"sbatch: {words}; looking for the job, then trying again")
                time.sleep(pause_s)
                continue
            except FailedSubmissionError:
                found = submissions_named(self.parameters["job_name"])
                if not found:
                    raise
                return found[0]
            if tried:
                self._cancel_others(job_id)
            return job_id
        found = submissions_named(self.parameters["job_name"])
        if not found:
            raise LaunchError(f"the Slurm controller takes no job: {words}")
        return found[0]

    def _cancel_others(self, job_id: str) -> None:
        """An attempt that was taken for lost may still have been worked off."""
        time.sleep(SETTLE_S)
        for other in submissions_named(self.parameters["job_name"], settled=True):
            if other != job_id:
                slurm.cancel([other])


def _refusal(words: str) -> type[RefusedError] | None:
    """What sbatch failed of, by its words: a no of the scheduler, or None where that did not answer."""
    if slurm.is_unanswered(words):
        return None
    return SubmitLimitError if slurm.is_submit_limit(words) else RefusedError


def submissions_named(name: str, *, settled: bool = False) -> list[str]:
    """Ids of the jobs or arrays of this name, oldest first; asked once more after a while where there seem to be none.

    Waits for a controller that does not answer.

    Raises:
        LaunchError: It has not answered for minutes.
    """
    found = slurm.patiently(lambda: slurm.named(name))
    if not found and not settled:
        time.sleep(SETTLE_S)
        found = slurm.patiently(lambda: slurm.named(name))
    return found


def could_start(script: str) -> str:
    """When and where the job of a script could start, in sbatch's words; nothing is submitted.

    Raises:
        SubmitLimitError: The scheduler would not take it while there are so many jobs.
        RefusedError: It would not take it for another reason.
        LaunchError: It did not say.
    """
    given = re.findall(r"^#SBATCH --([\w-]+)", script, re.MULTILINE)
    try:
        with outside_of_job(given):
            done = run(["sbatch", "--test-only"], TEST_S, stdin=script)
    except LaunchError as error:
        raise LaunchError(f"sbatch gives no answer: {error}") from None
    if done.code == 0:
        lines = [*done.stderr.splitlines(), *done.stdout.splitlines()]
        if answer := next((line for line in lines if _COULD_START.search(line)), ""):
            return _PREFIX.sub("", answer)
        raise no_answer("sbatch --test-only", "\n".join(lines))
    words = _PREFIX.sub("", _last_line(done.complaint))
    if done.code < 0 or (refusal := _refusal(done.complaint)) is None:
        raise LaunchError(f"sbatch gives no answer: {words}")
    raise refusal(_with_limit(words, done.complaint))


def _with_limit(line: str, words: str) -> str:
    """The last line says of every limit the same; the one that was reached stands in a line before."""
    told = [name for name in dict.fromkeys(slurm.limits_named(words)) if name not in line]
    return ": ".join([line, *told])


def _last_line(words: str) -> str:
    """Return sbatch's last line, before those that a site adds."""
    lines: Sequence[str] = words.strip().splitlines()
    own = [line for line in lines if line.startswith("sbatch: ")]
    return [*lines, *own][-1] if lines else "no reason was given"
