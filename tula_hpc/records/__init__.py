"""Records of a run (measurements, events, plans), their files, and the run directory.

JSON Lines files are append-only, one record a line. If a writer was killed in mid-line, readers
skip the torn line and count it.
"""

from tula_hpc.records.base import Configuration, Record, corners
from tula_hpc.records.events import (
    MAIN_LABEL,
    Event,
    JobAccount,
    JobNote,
    RunHistory,
    Sign,
    StopReason,
    Submission,
)
from tula_hpc.records.identity import Identity, measured_identity, refuse_another, refuse_several
from tula_hpc.records.measurement import (
    CREDIBLE_S,
    Footprint,
    Measurement,
    MemoryUse,
    ProcessorUse,
    StepTimes,
    Trial,
    compute_of,
    is_usable,
    measurements_for_search,
    of_partition,
    recorded_by_job,
    recorded_in,
    steps_of_epoch,
)
from tula_hpc.records.metrics import (
    RECENT_STEPS,
    AnyMetrics,
    EpochMetrics,
    Metrics,
    MetricsReader,
    StepMetrics,
    kept_steps,
    put_aside,
    read_metrics,
    samples_a_step,
    steps_left_s,
    training_left_s,
)
from tula_hpc.records.plan import (
    Candidate,
    Doubt,
    Interval,
    Knee,
    Plan,
    Remedy,
    grouped,
    write_plan,
)
from tula_hpc.records.run_directory import RunDirectory, TrainDirectory
from tula_hpc.records.storage import (
    append_record,
    folder_gone,
    notes_file,
    parse_record,
    rank_file,
    read_document,
    read_records,
    with_rank_files,
    write_atomically,
)
from tula_hpc.records.training import Drift, RateTrial, StepParts, TrainResult, TunedRates
