"""Order, slices and steps: all against plain loops."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import (
    CPU,
    Listed,
    assert_same,
    batches_of,
    first,
    many_sizes,
    reading_threads,
    same_size,
    with_broken,
)
from PIL import Image
from torch.testing import assert_close

from xmoco.config import AugmentationConfig, DataConfig, InputConfig
from xmoco.data.batches import Batch, Batches, Waiting, at_positions, epoch_order, in_order, preload
from xmoco.data.imagesets import ImageSet
from xmoco.data.sources import open_images
from xmoco.data.views import ViewGroup, views_of
from xmoco.errors import UserError

TINY = InputConfig(size=8)


@given(st.integers(1, 500), st.integers(0, 2**63), st.integers(0, 10**6))
def test_an_order_is_a_permutation_and_a_function(count: int, seed: int, epoch: int) -> None:
    order = epoch_order(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert torch.equal(order, epoch_order(count, seed, epoch))


def test_orders_of_neighbouring_seeds_and_epochs_are_unrelated() -> None:
    orders = [epoch_order(2000, seed, epoch) for seed in range(6) for epoch in range(6)]
    correlation = torch.corrcoef(torch.stack(orders).double())
    assert (correlation - torch.eye(len(orders))).abs().max() < 0.12  # 5 standard deviations
    shared = sum(torch.equal(a, b) for a in orders for b in orders)
    assert shared == len(orders)


@pytest.mark.parametrize("preload_gib", [0.0, 4.0])
def test_an_epoch_shows_every_image_once(preload_gib: float) -> None:
    pictures = same_size(22)
    batches = batches_of(Listed(pictures), preload_gib=preload_gib)
    assert batches.steps_per_epoch == 5
    for epoch in range(3):
        seen = first(batches, 5, 5 * epoch)
        indices = torch.cat([batch.indices for batch in seen])
        assert torch.equal(indices, epoch_order(22, 7, epoch)[:20])
        for batch in seen:
            assert batch.images.dtype == torch.uint8
            assert batch.images.shape == (4, 3, 4, 5)
            assert batch.sizes.tolist() == [[4, 5]] * 4
            assert batch.images[:, 0, 0, 0].tolist() == batch.indices.tolist()


@pytest.mark.parametrize("pictures", [same_size(23), many_sizes(23)])
def test_any_number_of_readers_and_residence_give_the_same_bits(pictures: list[Any]) -> None:
    pictures = [*pictures, *[pictures[0]] * 100, None]
    expected = first(batches_of(Listed(pictures), readers=1, preload_gib=0.0), 40)
    for readers in (2, 3, 8):
        for gib in (0.0, 4.0):
            images = Listed(pictures, delay=0.0005)
            assert_same(first(batches_of(images, readers=readers, preload_gib=gib), 40), expected)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 17), st.sampled_from([0.0, 4.0]), st.sampled_from([same_size, many_sizes]))
def test_starting_anywhere_equals_skipping(step: int, gib: float, pictures: Any) -> None:
    batches = batches_of(Listed(pictures(13)), 3, preload_gib=gib, readers=3)
    assert_same(first(batches, 4, step), first(batches, step + 4)[step:])


@pytest.mark.parametrize("gib", [0.0, 4.0])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_global_batch(processes: int, gib: float) -> None:
    images = Listed(same_size(20))
    whole = first(batches_of(images, 6), 7)
    parts = [
        first(batches_of(images, 6, rank=rank, processes=processes, preload_gib=gib), 7)
        for rank in range(processes)
    ]
    for step, batch in enumerate(whole):
        joined = torch.cat([part[step].indices for part in parts])
        assert torch.equal(joined, batch.indices)
        assert torch.equal(torch.cat([part[step].images for part in parts]), batch.images)


@pytest.mark.parametrize("gib", [0.0, 4.0])
@pytest.mark.parametrize(("parts", "processes"), [(2, 1), (2, 2), (2, 3), (3, 2), (6, 2)])
def test_a_part_of_the_batch_is_the_same_for_any_number_of_processes(
    parts: int, processes: int, gib: float
) -> None:
    """The batch is cut by part and then by process, so gradients add up over the same images."""
    images, group = Listed(same_size(30)), ViewGroup(("a", "b"), AugmentationConfig(), TINY)
    alone = batches_of(images, 12, parts=parts, preload_gib=gib)
    several = [
        batches_of(images, 12, rank=rank, processes=processes, parts=parts, preload_gib=gib)
        for rank in range(processes)
    ]
    assert alone.rows.tolist() == list(range(12))
    assert sorted(row for batches in several for row in batches.rows) == list(range(12))

    def shown(batches: Batches, batch: Batch, step: int) -> list[torch.Tensor]:
        place = {"seed": 0, "step": step, "batch": 12, "rows": batches.rows}
        return [batch.indices, batch.images, *views_of(batch.images, batch.sizes, [group], **place)]

    streams = [first(batches, 5) for batches in (alone, *several)]
    for step, (whole, *shares) in enumerate(zip(*streams, strict=True)):
        expected = [tensor.chunk(parts) for tensor in shown(alone, whole, step)]
        found = [
            [tensor.chunk(parts) for tensor in shown(batches, share, step)]
            for batches, share in zip(several, shares, strict=True)
        ]
        for kind, tensors in enumerate(expected):
            for part, tensor in enumerate(tensors):
                together = torch.cat([own[kind][part] for own in found])
                assert_close(together, tensor, atol=2e-6, rtol=0)


def test_impossible_batches() -> None:
    images = Listed(same_size(10))
    with pytest.raises(UserError, match=r"10 images, too few .* 16; the largest .* is 10\.$"):
        batches_of(images, 16)
    with pytest.raises(UserError, match=r"largest batch possible is 9\.$"):
        batches_of(images, 12, processes=3)
    with pytest.raises(UserError, match=r"8 images .* equally by 3 processes; 6 can\.$"):
        batches_of(images, 8, processes=3)
    with pytest.raises(UserError, match=r"1 image, too few .* 16; at least 2 are needed\.$"):
        batches_of(Listed(same_size(1)), 16)
    with pytest.raises(UserError, match=r"2 images, too few .* 12; at least 3 are needed\.$"):
        batches_of(Listed(same_size(2)), 12, processes=3)
    with pytest.raises(UserError, match=r"9 images .* equally by 2 parts; 8 can\.$"):
        batches_of(images, 9, parts=2)
    with pytest.raises(UserError, match=r"10 images, too few .* 12; the largest .* is 8\.$"):
        batches_of(images, 12, processes=2, parts=2)
    assert batches_of(images, 10).steps_per_epoch == 1


def test_known_unreadable_images_are_kept_on_resuming() -> None:
    batches = batches_of(Listed(same_size(300)), known_unreadable=[("picture 9", "gone")])
    assert list(batches.unreadable) == [("picture 9", "gone")]


@pytest.mark.parametrize("pictures", [same_size(25), many_sizes(25)])
def test_in_order_shows_everything_once(pictures: list[Any]) -> None:
    seen = list(in_order(Listed(pictures, delay=0.0005), 10, CPU, readers=3))
    assert [len(batch.indices) for batch in seen] == [10, 10, 5]
    assert torch.cat([batch.indices for batch in seen]).tolist() == list(range(25))
    for batch in seen:
        for image, (height, width), index in zip(
            batch.images, batch.sizes.tolist(), batch.indices.tolist(), strict=True
        ):
            assert torch.equal(image[:, :height, :width], pictures[index])


@pytest.mark.parametrize("held", [False, True])
def test_at_positions_replaces_as_the_whole_set_does(held: bool) -> None:
    images: ImageSet = Listed(with_broken(120, {7}))
    if held:
        images = preload(images, CPU)
    batch = at_positions(images, torch.tensor([9, 7, 7, 0]), CPU)
    assert batch.indices.tolist() == batch.images[:, 0, 0, 0].tolist() == [9, 8, 8, 0]
    assert batch.labels is not None
    assert batch.labels.tolist() == [9, 8, 8, 0]
    assert not reading_threads()


def test_waiting_is_measured() -> None:
    slow = batches_of(Listed(same_size(40), delay=0.005), 20, preload_gib=0.0, readers=1)
    first(slow, 2)
    assert slow.waited > 0.05


class Clock:
    """A CUDA event of a device that is as far as ``now``; events are recorded at given times."""

    now = 0.0
    times: ClassVar[list[float]] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "the consumer's"
        self.time = self.times.pop(0)

    def query(self) -> bool:
        return self.time <= Clock.now

    def elapsed_time(self, other: "Clock") -> float:
        assert self.query()
        assert other.query()
        return 1000 * (other.time - self.time)


def test_waiting_on_cuda_is_read_from_events_that_have_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: "the consumer's")
    monkeypatch.setattr(Clock, "times", [0.0, 2.0, 5.0, 5.5, 7.0, 8.0])
    waiting = Waiting(torch.device("cuda"))
    for _ in range(3):
        with waiting.measured():
            pass
    assert waiting.seconds() == 0.0
    for now, waited in [(1.9, 0.0), (2.0, 2.0), (5.2, 2.0), (7.5, 2.5), (9.0, 3.5), (9.0, 3.5)]:
        monkeypatch.setattr(Clock, "now", now)
        assert waiting.seconds() == waited


def test_from_files_to_batches(tmp_path: Path) -> None:
    for index in range(12):
        image = Image.new("RGB", (6 + index % 2, 5), (index, 0, 0))
        image.save(tmp_path / f"{index:02}.png")
    images = open_images(DataConfig(source=str(tmp_path)), "train")
    assert images is not None
    for batch in first(batches_of(images), 3):
        assert batch.images[:, 0, 0, 0].tolist() == batch.indices.tolist()
        assert batch.images.shape[2] == 5
