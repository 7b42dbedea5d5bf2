"""Typed, validated inputs: one sweep file and one cluster file, both TOML."""

from tula_hpc.config.cluster import ClusterSpec, ContainerSpec, PartitionSpec, PricingSpec
from tula_hpc.config.gpus import hidden_peers
from tula_hpc.config.loading import (
    MAX_FILE_BYTES,
    PUT_BACK,
    idle_cluster_keys,
    load_cluster,
    load_frozen_cluster,
    load_frozen_sweep,
    load_sweep,
    load_together,
    split_overrides,
    tables_by_name,
    without_values,
)
from tula_hpc.config.search import ObjectiveSpec, SearchSpec, batches_timed_apart, local_batches
from tula_hpc.config.study import REFERENCE_COLUMN, StudyCell, StudySpec
from tula_hpc.config.sweep import (
    JOB_NAMES,
    SweepSpec,
    check_together,
    cluster_sizes,
    idle_keys,
    idle_reference,
    loaders_without_cores,
    study_column,
    study_part,
    sweep_for,
)
from tula_hpc.config.training import AgsOptions, LrScaling, Method, TrainingSpec
from tula_hpc.config.validation import GIB, Spec, exposure_warning, is_hidden, leaves
from tula_hpc.config.workload import WorkloadSpec
