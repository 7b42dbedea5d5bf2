"""Batches are copied to a GPU one ahead: their order, when copies begin, and that the device never mixes them up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ddp.test_worker import CONFIGURATION, sweep
from tests.forked import ALONE
from tula_hpc.config import ClusterSpec
from tula_hpc.data.loader import StreamCopies, one_ahead
from tula_hpc.ddp.worker import Worker


class CallRecorder(StreamCopies):
    """A loader and its copies, which record their calls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.notes: list[str] = []

    def load(self) -> Iterator[int]:
        """Yield this many batches, and record each."""
        for batch in range(self.count):
            self.notes.append(f"load {batch}")
            yield batch

    def begin(self, batch: int) -> Any:
        """Record the beginning of a copy."""
        self.notes.append(f"begin {batch}")
        return batch

    def arrive(self, copying: Any) -> Any:
        """Record the arrival of a copy."""
        self.notes.append(f"arrive {copying}")
        return copying


def test_the_copy_of_the_next_batch_has_begun_when_one_is_given_and_no_other() -> None:
    diary = CallRecorder(3)
    ahead = one_ahead(diary.load(), diary)
    assert diary.notes == []
    assert next(ahead) == 0
    assert diary.notes == ["load 0", "begin 0", "load 1", "begin 1", "arrive 0"]
    assert next(ahead) == 1
    assert diary.notes[5:] == ["load 2", "begin 2", "arrive 1"]
    assert next(ahead) == 2
    assert diary.notes[8:] == ["arrive 2"]
    assert list(ahead) == []


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_batch_comes_once_and_in_order(count: int) -> None:
    diary = CallRecorder(count)
    assert list(one_ahead(diary.load(), diary)) == list(range(count))


def test_a_failure_of_the_loader_is_raised() -> None:
    def failing() -> Iterator[int]:
        yield 0
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        next(one_ahead(failing(), CallRecorder(0)))


def on_gpu(**workload: object) -> Worker:
    return Worker(sweep(**workload), ClusterSpec(device="cuda"), CONFIGURATION, ALONE)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "workload", [{}, {"image_size": 20}, {"loader_workers": 2}, {"channels_last": True}, {"precision": "fp16"}]
)
def test_a_gpu_sees_the_same_bits_as_a_cpu(workload: dict[str, object]) -> None:
    """Resized images are left out, because for them the device adds in an order of its own."""
    plain = Worker(sweep(**workload), ClusterSpec(), CONFIGURATION, ALONE)  # type: ignore[arg-type]
    tolerance = 1e-5 if "image_size" in workload else 0.0
    pairs = zip(on_gpu(**workload).batches(1, 64), plain.batches(1, 64), strict=False)
    for _, ((inputs, targets), (expected, labels)) in zip(range(60), pairs, strict=False):
        assert inputs.is_cuda
        assert inputs.dtype == torch.float32
        assert torch.allclose(inputs.cpu(), expected, rtol=0.0, atol=tolerance)
        assert torch.equal(targets.cpu(), labels)


@pytest.mark.gpu
def test_a_copy_does_not_wait_for_the_step_before() -> None:
    device = torch.device("cuda", 0)
    copies = StreamCopies(device)
    held = [torch.full((2**22,), float(i)).pin_memory() for i in range(3)]
    torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call] # about a second of device time
    step = torch.cuda.current_stream(device).record_event()  # type: ignore[no-untyped-call]
    copying = copies.begin(held[0])
    copying.done.synchronize()
    assert not step.query()
    assert torch.equal(copies.arrive(copying).cpu(), held[0])


@pytest.mark.gpu
def test_memory_of_a_batch_is_not_overwritten_while_a_step_that_is_queued_needs_it() -> None:
    """The host runs ahead, and releases batches that the device has not read yet."""
    device = torch.device("cuda", 0)
    count = 12
    host = (torch.full((2**20,), float(i)).pin_memory() for i in range(count))
    sums: list[Tensor] = []
    for batch in one_ahead(host, StreamCopies(device)):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call] # some 10 ms
        sums.append(batch.double().mean())
        del batch
    assert [float(mean) for mean in sums] == list(range(count))


@pytest.mark.gpu
def test_a_step_has_the_same_loss_with_and_without_copies_ahead() -> None:
    # weights hardly change, because larger steps would amplify the differences from each pass's own order of addition
    ahead, plain = on_gpu(lr=1e-9), on_gpu(lr=1e-9)
    batches = ahead.batches()
    for _, batch in zip(range(30), plain.loader.stream(), strict=False):
        expected = plain.train_step(*plain.to_device(*batch))
        assert float(ahead.train_step(*next(batches))) == pytest.approx(float(expected), rel=1e-5)
