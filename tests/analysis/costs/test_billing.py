from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tula_hpc.analysis.costs.slurm_billing import billing_per_node, node_resources
from tula_hpc.config import ClusterSpec, PricingSpec
from tula_hpc.config.gpus import parse_weights

CONF = "CPU=1.0,Mem=0.25G,GRES/gpu=2.0"


def cluster(pricing: dict[str, Any], **more: Any) -> ClusterSpec:
    return ClusterSpec.model_validate({"pricing": {"basis": "tres", "tres_weights": CONF, **pricing}, **more})


def billing(spec: ClusterSpec) -> float:
    return billing_per_node(spec.pricing, node_resources(spec).tres)


def test_text_and_table_say_the_same() -> None:
    table = {"CPU": 1.0, "Mem": "0.25G", "GRES/gpu": 2}
    assert parse_weights(table) == parse_weights(CONF)
    assert parse_weights(CONF) == {"cpu": 1.0, "mem": 0.25 / 1024, "gres/gpu": 2.0}
    # the second call gets the parsed weights, as a frozen cluster file has them
    assert parse_weights(parse_weights(CONF)) == parse_weights(CONF)
    assert parse_weights("") == parse_weights({}) == {}


@pytest.mark.parametrize(
    ("text", "weight"),
    [
        # slurm.conf(5): 8 GB are billed 2048 units here,
        ("mem=.25", 0.25),
        ("mem=.25M", 0.25),
        # and 2 units here
        ("mem=.25G", 0.25 / 1024),
        ("mem=1t", 1 / 1024**2),
        ("mem=1P", 1 / 1024**3),
        # below the base unit: Slurm leaves the weight as it is
        ("mem=1K", 1.0),
        ("cpu=2K", 2 / 1024),
        ("node=+1.5", 1.5),
        ("gres/gpu:a100=3e1", 30.0),
    ],
)
def test_suffixes_are_read_as_slurm_reads_them(text: str, weight: float) -> None:
    (value,) = parse_weights(text).values()
    assert value == pytest.approx(weight)


@pytest.mark.parametrize(
    "text", ["CPU", "CPU=", "CPU=one", "CPU=1X", "CPU=1,cpu=2", "=1", "c pu=1", "CPU=inf", "CPU=1e999"]
)
def test_what_slurm_would_not_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|twice|no TRES|no weight"):
        parse_weights(text)


@pytest.mark.parametrize("weights", ["CPU=-1", {"CPU": -1}, {"Mem": "-0.25G"}, {"CPU": True}, {"CPU": float("nan")}])
def test_a_weight_is_a_number_and_not_negative(weights: Any) -> None:
    with pytest.raises(ValueError, match="expected a number of 0 or more"):
        parse_weights(weights)


@pytest.mark.parametrize(
    ("gres", "counts"),
    [
        ("gpu", {"gres/gpu": 1}),
        ("gpu:4", {"gres/gpu": 4}),
        ("gpu:2080ti:4", {"gres/gpu": 4, "gres/gpu:2080ti": 4}),
        ("gpu:3090:4", {"gres/gpu": 4, "gres/gpu:3090": 4}),
        ("gpu:1g.5gb:2", {"gres/gpu": 2, "gres/gpu:1g.5gb": 2}),
        ("gpu:1g.5gb", {"gres/gpu": 1, "gres/gpu:1g.5gb": 1}),
        ("gres:gpu:A100:2(S:0,1),nic", {"gres/gpu": 2, "gres/gpu:a100": 2, "gres/nic": 1}),
        ("gpu:a100:2,gpu:v100:1", {"gres/gpu": 3, "gres/gpu:a100": 2, "gres/gpu:v100": 1}),
    ],
)
def test_generic_resources_are_read_as_slurm_reads_them(gres: str, counts: dict[str, float]) -> None:
    tres = node_resources(cluster({}, gres=gres)).tres
    assert {name: count for name, count in tres.items() if name.startswith("gres/")} == counts


@pytest.mark.parametrize(("weight", "gres"), [("GRES/gpu:a100", "gpu:4"), ("GRES/gpus", "gpu:4"), ("license/x", None)])
def test_a_weight_that_bills_nothing_is_reported(weight: str, gres: str | None) -> None:
    def warnings(value: int) -> list[str]:
        spec = cluster({"tres_weights": {weight: value}}, exclusive=False, gres=gres)
        assert billing(spec) == 0
        return [text for text in node_resources(spec).assumed if f"leaves out {weight.lower()}:" in text]

    assert (len(warnings(2)), len(warnings(0))) == (1, 0)


def test_a_node_is_billed_for_what_its_job_asks_for() -> None:
    spec = cluster({}, exclusive=False, workers_per_node=2, cpus_per_worker=4, memory_gb=32, gres="gpu:2")
    assert billing(spec) == pytest.approx(8 * 1.0 + 32 * 0.25 + 2 * 2.0)
    assert node_resources(spec).assumed == ()


def test_exclusive_jobs_are_billed_for_all_cores_and_gpus_but_the_memory_they_ask_for() -> None:
    whole = {"node_cpus": 64, "node_memory_gb": 256, "node_gpus": 4}
    spec = cluster(whole, workers_per_node=2, cpus_per_worker=4, memory_gb=32, gres="gpu:2")
    assert billing(spec) == pytest.approx(64 + 32 * 0.25 + 4 * 2.0)
    assert node_resources(spec).assumed == ()
    assert billing(cluster(whole, gres="gpu:2")) == pytest.approx(64 + 256 * 0.25 + 4 * 2.0)
    all_memory = cluster(whole, gres="gpu:2", sbatch={"mem": 0})
    assert billing(all_memory) == pytest.approx(64 + 256 * 0.25 + 4 * 2.0)
    assert node_resources(all_memory).assumed == ()


def test_unknown_resources_of_the_node_are_assumed_and_named() -> None:
    message = " ".join(node_resources(cluster({}, workers_per_node=2, gres="gpu:1")).assumed)
    for part in ("2 cores", "pricing.node_cpus", "1 GPU,", "pricing.node_gpus", "pricing.node_memory_gb"):
        assert part in message


def test_kinds_of_gpus_count_by_name_and_kind() -> None:
    weights = {"tres_weights": "GRES/gpu:a100=5,GRES/gpu=1,GRES/nic=0.5,license/x=9"}
    spec = cluster(weights, exclusive=False, gres="gpu:a100:4,nic")
    assert billing(spec) == pytest.approx(4 * 5 + 4 * 1 + 0.5)
    whole = cluster(weights | {"node_gpus": 8}, gres="gpu:a100:4,nic")
    assert billing(whole) == pytest.approx(8 * 5 + 8 * 1 + 0.5)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(
    ("gres", "sbatch"),
    [
        (None, {"gpus-per-node": "a100:4"}),
        (None, {"gpus_per_node": "A100:3,a100:1"}),
        (None, {"gpus-per-task": "a100:2"}),
        ("gpu:a100:2,nic", {"gpus-per-node": "a100:4"}),
        ("gpu:4", {"gpus-per-task": "a100:2"}),
        ("gpu:a100:1", {"gres": "gpu:a100:4"}),
    ],
)
def test_gpus_by_an_option_of_sbatch_are_billed_as_those_of_gres(
    gres: str | None, sbatch: dict[str, Any], exclusive: bool
) -> None:
    weights = {"tres_weights": "GRES/gpu=10,GRES/gpu:a100=5", "node_gpus": 4}
    common: dict[str, Any] = {"executor": "slurm", "workers_per_node": 2, "exclusive": exclusive}
    asked = cluster(weights, gres=gres, sbatch=sbatch, **common)
    assert billing(asked) == billing(cluster(weights, gres="gpu:a100:4", **common)) == 60
    assert node_resources(asked).assumed == ()


@pytest.mark.parametrize(
    ("sbatch", "expected"),
    [
        ({"mem_per_gpu": "8G", "gpus": 8, "exclusive": True}, ["mem-per-gpu", "exclusive"]),
        ({"cpus-per-task": 4, "tres-per-task": "gres/gpu:1", "exclusive": False}, ["cpus-per-task", "tres-per-task"]),
        ({"reservation": "mlperf", "switches": 1}, []),
    ],
)
def test_an_option_of_sbatch_that_changes_the_bill_and_is_not_counted_is_named(
    sbatch: dict[str, Any], expected: list[str]
) -> None:
    spec = cluster({"tres_weights": "CPU=1,Mem=0.25G,GRES/gpu=0"}, exclusive=False, memory_gb=1, sbatch=sbatch)
    assert list(node_resources(spec).assumed) == [
        f"billing leaves out what {name} in [sbatch] asks for" for name in expected
    ]


def test_max_tres_takes_the_largest_of_the_nodes_own() -> None:
    spec = cluster({"max_tres": True}, exclusive=False, cpus_per_worker=16, memory_gb=32, gres="gpu:4")
    assert billing(spec) == pytest.approx(max(16 * 1.0, 32 * 0.25, 4 * 2.0))


counts = st.fixed_dictionaries({name: st.floats(0, 1000) for name in ("cpu", "mem", "gres/gpu")})


@given(counts, st.floats(0, 10), st.floats(0, 10), st.floats(0, 10))
def test_the_largest_is_at_most_the_sum_and_at_least_a_third(
    tres: dict[str, float], cpu: float, mem: float, gpu: float
) -> None:
    weights = {"cpu": cpu, "mem": mem, "gres/gpu": gpu}
    both = [PricingSpec(tres_weights=weights, max_tres=flag) for flag in (False, True)]
    total, largest = (billing_per_node(pricing, tres) for pricing in both)
    assert total / 3 - 1e-9 <= largest <= total + 1e-9
