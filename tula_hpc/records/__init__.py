"""What is written down: measurements, events, plans; their files; and the run directory that holds them.

JSON Lines files are append-only, one record a line. A torn last line (a writer was killed) is skipped and counted.
"""

from tula_hpc.records.beside import notes_file, rank_file, with_rank_files
from tula_hpc.records.drift import Drift, StepParts
from tula_hpc.records.events import Event, JobNote
from tula_hpc.records.footprint import Footprint
from tula_hpc.records.measurement import (
    CREDIBLE_S,
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
from tula_hpc.records.rates import RateTrial, TunedRates
from tula_hpc.records.reading import MAX_LINE_BYTES, ReadResult, parse_record, read_document, read_records
from tula_hpc.records.record import Batch, Configuration, JobId, Nodes, Record, WorkersPerNode
from tula_hpc.records.result import TrainResult
from tula_hpc.records.run_directory import MAIN_LABEL, RunDirectory
from tula_hpc.records.train_directory import TrainDirectory
from tula_hpc.records.writing import append_record, write_atomically

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
    "StepMetrics",
    "StepParts",
    "StepTimes",
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
