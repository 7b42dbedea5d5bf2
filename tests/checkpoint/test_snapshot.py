"""Snapshots share nothing with the state that they were taken of, and wait for nobody."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tula_hpc.batches import map_tensors
from tula_hpc.checkpoint.snapshot import Gpu, Snapshots


def training_state() -> dict[str, Any]:
    """A model in two memory formats and an optimizer that has taken a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stub lacks it
    optimizer = torch.optim.AdamW(model.parameters())
    torch.autograd.backward(model(torch.randn(2, 3, 2, 2)).sum())
    optimizer.step()
    progress = {"losses": [1.0, 2.0], "milestones": Counter({30: 1})}
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "progress": progress}


def spoil(state: dict[str, Any]) -> None:
    """Change the state as the next step does, and more than that."""

    def overwrite(tensor: Tensor) -> Tensor:
        return tensor.fill_(7)

    map_tensors(overwrite, state)
    state["progress"]["losses"].append(3.0)
    del state["optimizer"]["param_groups"][0]["lr"]


def same(one: Any, other: Any) -> bool:
    """Compare bit for bit, memory format included."""
    if isinstance(one, Tensor):
        return torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_later_changes_of_the_state_do_not_reach_the_snapshot() -> None:
    state, reference = training_state(), training_state()
    snapshot = Snapshots().take(state)
    spoil(state)
    taken = snapshot.wait()
    assert same(taken, reference)
    assert isinstance(taken["model"], OrderedDict)
    assert isinstance(taken["progress"]["milestones"], Counter)
    assert taken["model"]._metadata == reference["model"]._metadata  # type: ignore[attr-defined] # torch's own attribute


def test_shared_tensors_stay_shared_and_are_copied_once() -> None:
    weight = nn.Parameter(torch.ones(3))
    taken = Snapshots().take({"in": weight, "out": weight.data, "other": torch.ones(3)}).wait()
    assert taken["in"].data_ptr() == taken["out"].data_ptr() != taken["other"].data_ptr()
    assert type(taken["in"]) is Tensor


class Later(Gpu):
    """A device whose copies happen only when it is synchronized."""

    def __init__(self, room: bool) -> None:
        self.room, self.blocked = room, False
        self.pairs: Sequence[tuple[Tensor, Tensor]] = ()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point()

    def has_room(self, size_bytes: int) -> bool:
        return self.room and size_bytes > 0

    def buffer(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]], *, block: bool) -> Any:
        self.pairs, self.blocked = pairs, block
        return self

    def synchronize(self) -> None:
        for target, source in self.pairs:
            target.copy_(source)


def test_a_device_with_room_clones_and_goes_on() -> None:
    state, device = training_state(), Later(room=True)
    snapshot = Snapshots(device).take(state)
    assert not device.blocked
    spoil(state)
    assert same(snapshot.wait(), training_state())
    assert snapshot.held == [], "the clones' memory is free again"


def test_a_device_without_room_lets_the_next_step_wait_for_the_copy() -> None:
    state, device = training_state(), Later(room=False)
    snapshot = Snapshots(device).take(state)
    assert device.blocked
    sources = {source.data_ptr() for _, source in device.pairs}
    assert state["model"]["0.weight"].data_ptr() in sources, "nothing was cloned"
    assert same(snapshot.wait(), training_state())


def test_host_memory_is_used_again_where_it_fits() -> None:
    snapshots = Snapshots(Later(room=True))
    state = {"a": torch.ones(3), "b": torch.ones(4)}
    first = snapshots.take(state).wait()
    second = snapshots.take({"a": torch.full((3,), 2.0), "b": torch.ones(4, dtype=torch.float64)}).wait()
    assert second["a"] is first["a"]
    assert second["a"].eq(2).all()
    assert second["b"].dtype == torch.float64


def test_a_state_without_anything_on_the_device_needs_no_copy() -> None:
    assert Snapshots(Later(room=True)).take({"count": torch.tensor(3), "epoch": 1}).copied is None


@pytest.mark.gpu
@pytest.mark.parametrize("room", [True, False])
def test_on_a_gpu_the_snapshot_is_of_the_moment_too(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "has_room", lambda *_: room)
    device = torch.device("cuda", 0)
    snapshots = Snapshots(Gpu(device))
    big = torch.zeros(50_000_000, device=device)
    for number in range(3):
        big.fill_(number)
        snapshot = snapshots.take({"big": big, "step": torch.tensor(number)})
        for _ in range(20):
            # a step's change, queued while the copy is under way
            big.add_(1)
        taken = snapshot.wait()
        assert taken["big"].eq(number).all()
        assert int(taken["step"]) == number
