"""What is trained on what: models, data sets, loaders, and a user's own of either (`entry_points`)."""

from tula_hpc.workloads.build import Workload, build_workload
from tula_hpc.workloads.data import training_samples
from tula_hpc.workloads.loader import ResumableSampler, TrainLoader, make_test_loader, make_train_loader, most_batches
from tula_hpc.workloads.models import build_model

__all__ = [
    "ResumableSampler",
    "TrainLoader",
    "Workload",
    "build_model",
    "build_workload",
    "make_test_loader",
    "make_train_loader",
    "most_batches",
    "training_samples",
]
