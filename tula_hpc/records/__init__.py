"""Records of a run (measurements, events, plans), their files, and the run directory.

JSON Lines files are append-only, one record a line. A torn last line, of a writer that was killed,
is skipped and counted.
"""

from tula_hpc.records.base import Batch, Configuration, JobId, Nodes, Record, WorkersPerNode
from tula_hpc.records.events import (
    MAIN_LABEL,
    Event,
    JobNote,
    RunHistory,
    StopReason,
    Submission,
)
from tula_hpc.records.measurement import (
    CREDIBLE_S,
    Footprint,
    Measurement,
    MemoryUse,
    ProcessorUse,
    StepTimes,
    compute_of,
    is_usable,
)
from tula_hpc.records.metrics import (
    SCALE_BINS_PER_OCTAVE,
    SCALE_OCTAVES,
    AnyMetrics,
    EpochMetrics,
    Metrics,
    StepMetrics,
    read_metrics,
)
from tula_hpc.records.plan import Candidate, Knee, Plan
from tula_hpc.records.run_directory import RunDirectory, TrainDirectory
from tula_hpc.records.storage import (
    MAX_LINE_BYTES,
    ReadResult,
    append_record,
    notes_file,
    parse_record,
    rank_file,
    read_document,
    read_records,
    with_rank_files,
    write_atomically,
)
from tula_hpc.records.training import Drift, RateTrial, StepParts, TrainResult, TunedRates

__all__ = [
    "CREDIBLE_S",
    "MAIN_LABEL",
    "MAX_LINE_BYTES",
    "SCALE_BINS_PER_OCTAVE",
    "SCALE_OCTAVES",
    "AnyMetrics",
    "Batch",
    "Candidate",
    "Configuration",
    "Drift",
    "EpochMetrics",
    "Event",
    "Footprint",
    "JobId",
    "JobNote",
    "Knee",
    "Measurement",
    "MemoryUse",
    "Metrics",
    "Nodes",
    "Plan",
    "ProcessorUse",
    "RateTrial",
    "ReadResult",
    "Record",
    "RunDirectory",
    "RunHistory",
    "StepMetrics",
    "StepParts",
    "StepTimes",
    "StopReason",
    "Submission",
    "TrainDirectory",
    "TrainResult",
    "TunedRates",
    "WorkersPerNode",
    "append_record",
    "compute_of",
    "is_usable",
    "notes_file",
    "parse_record",
    "rank_file",
    "read_document",
    "read_metrics",
    "read_records",
    "with_rank_files",
    "write_atomically",
]
