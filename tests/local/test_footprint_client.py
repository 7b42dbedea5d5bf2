"""The estimate of memory, asked for as the sweep asks: in a process of its own."""

from __future__ import annotations

from pathlib import Path

from tula_hpc.stages.batches_that_fit import estimate


def test_the_client_gives_the_record(tmp_path: Path) -> None:
    sweep, cluster = tmp_path / "sweep.toml", tmp_path / "cluster.toml"
    sweep.write_text(
        'name = "x"\n[workload]\nmodel = "tula_hpc.workloads.small_cnns:compact_cnn"\ndataset = "synthetic"\n'
    )
    cluster.write_text('name = "c"\nmemory_gb = 4.0\n')
    found = estimate(sweep, cluster, timeout_s=120)
    assert found.footprint is not None, found.reason
    assert found.trusted_batch == found.footprint.largest_local_batch
