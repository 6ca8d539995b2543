"""Order, slices, replacement of unreadable images, threads: all against plain loops."""

import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from xmoco.config import DataConfig
from xmoco.data.batches import (
    Batch,
    Batches,
    Unreadable,
    at_positions,
    epoch_order,
    in_order,
    resident,
)
from xmoco.data.decode import UnreadableImage
from xmoco.data.sources import ArrayImages, ImageSet, open_images
from xmoco.errors import UserError

CPU = torch.device("cpu")


class Listed(ImageSet):
    """Images from a list; None is unreadable."""

    def __init__(self, pictures: list[Tensor | None], delay: float = 0.0) -> None:
        self.name = "listed"
        self.labels = torch.arange(len(pictures))
        self.classes = None
        self.pictures = pictures
        self.delay = delay
        self.reads = 0

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, index: int) -> Tensor:
        self.reads += 1
        time.sleep(self.delay * (index % 3))  # some are slower than others
        picture = self.pictures[index]
        if picture is None:
            raise UnreadableImage("broken")
        return picture

    def where(self, index: int) -> str:
        return f"picture {index}"


def same_size(count: int) -> list[Tensor | None]:
    return [torch.full((3, 4, 5), index % 256, dtype=torch.uint8) for index in range(count)]


def many_sizes(count: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(2, 9, (count, 2), generator=generator).tolist()
    return [torch.randint(1, 256, (3, h, w), generator=generator).byte() for h, w in sizes]


def batches_of(images: ImageSet, batch: int = 4, **options: Any) -> Batches:
    return Batches(images, **({"batch": batch, "seed": 7, "device": CPU} | options))


def first(batches: Batches, count: int, step: int = 0) -> list[Batch]:
    return list(islice(batches.from_step(step), count))


def assert_same(some: list[Batch], others: list[Batch]) -> None:
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.sizes, other.sizes)
        assert torch.equal(one.indices, other.indices)
        assert one.labels is not None
        assert other.labels is not None
        assert torch.equal(one.labels, other.labels)


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


@pytest.mark.parametrize("resident_gib", [0.0, 4.0])
def test_an_epoch_shows_every_image_once(resident_gib: float) -> None:
    pictures = same_size(22)
    batches = batches_of(Listed(pictures), resident_gib=resident_gib)
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


def test_differing_sizes_share_a_canvas_of_zeros() -> None:
    pictures = many_sizes(30)
    for batch in first(batches_of(Listed(pictures), 10), 4):
        largest = batch.sizes.amax(0).tolist()
        assert batch.images.shape == (10, 3, *largest)
        for image, (height, width), index in zip(
            batch.images, batch.sizes.tolist(), batch.indices.tolist(), strict=True
        ):
            picture = pictures[index]
            assert picture is not None
            assert torch.equal(image[:, :height, :width], picture)
            assert image.count_nonzero() == picture.count_nonzero()


@pytest.mark.parametrize("pictures", [same_size(23), many_sizes(23)])
def test_any_number_of_readers_and_residence_give_the_same_bits(pictures: list[Any]) -> None:
    pictures = [*pictures, *[pictures[0]] * 100, None]
    expected = first(batches_of(Listed(pictures), readers=1, resident_gib=0.0), 40)
    for readers in (2, 3, 8):
        for gib in (0.0, 4.0):
            images = Listed(pictures, delay=0.0005)
            assert_same(first(batches_of(images, readers=readers, resident_gib=gib), 40), expected)


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 17), st.sampled_from([0.0, 4.0]), st.sampled_from([same_size, many_sizes]))
def test_starting_anywhere_equals_skipping(step: int, gib: float, pictures: Any) -> None:
    batches = batches_of(Listed(pictures(13)), 3, resident_gib=gib, readers=3)
    assert_same(first(batches, 4, step), first(batches, step + 4)[step:])


@pytest.mark.parametrize("gib", [0.0, 4.0])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_global_batch(processes: int, gib: float) -> None:
    images = Listed(same_size(20))
    whole = first(batches_of(images, 6), 7)
    parts = [
        first(batches_of(images, 6, rank=rank, processes=processes, resident_gib=gib), 7)
        for rank in range(processes)
    ]
    for step, batch in enumerate(whole):
        joined = torch.cat([part[step].indices for part in parts])
        assert torch.equal(joined, batch.indices)
        assert torch.equal(torch.cat([part[step].images for part in parts]), batch.images)


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
    assert batches_of(images, 10).steps_per_epoch == 1


# Residence


def test_sets_become_resident_only_if_they_fit_and_share_one_size() -> None:
    bytes_needed = 50 * 3 * 4 * 5
    images = Listed(same_size(50))
    assert resident(images, CPU, gib=(bytes_needed - 1) / 2**30) is images
    assert images.reads == 1  # one look is enough to know
    held = resident(images, CPU, gib=bytes_needed / 2**30)
    assert isinstance(held, ArrayImages)
    assert held.name == images.name
    assert held.labels is not None
    assert torch.equal(held.labels, images.labels)
    reads = images.reads
    first(batches_of(held), 30)
    assert images.reads == reads
    mixed = Listed(many_sizes(50))
    assert resident(mixed, CPU) is mixed


def test_a_second_size_is_noticed_early() -> None:
    images = Listed([torch.zeros(3, 9, 9, dtype=torch.uint8), *same_size(20_000)])
    assert resident(images, CPU) is images
    assert images.reads < 2_000


def test_a_late_second_size_falls_back_to_streaming() -> None:
    pictures = [*same_size(600), torch.ones(3, 9, 9, dtype=torch.uint8)]
    images = Listed(pictures)
    batches = batches_of(images, 64)
    assert batches.images is images
    assert_same(first(batches, 9), first(batches_of(Listed(pictures), 64, resident_gib=0.0), 9))


def test_arrays_are_resident_or_stay_where_they_are() -> None:
    pixels = torch.arange(40 * 3 * 2 * 2).reshape(40, 3, 2, 2).byte()
    images = ArrayImages("array", pixels, torch.arange(40) % 7)
    held, streamed = batches_of(images), batches_of(images, resident_gib=0.0)
    assert streamed.images is images
    assert_same(first(held, 15), first(streamed, 15))
    batch = first(held, 1)[0]
    assert torch.equal(batch.images, pixels[batch.indices])
    assert batch.labels is not None
    assert torch.equal(batch.labels, batch.indices % 7)
    assert first(batches_of(ArrayImages("bare", pixels)), 1)[0].labels is None


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    batches_of(Listed(same_size(600)), on_progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (600, 600)
    assert told == sorted(told)
    assert len(told) > 1


# Unreadable images


def with_broken(count: int, broken: set[int]) -> list[Tensor | None]:
    return [None if i in broken else picture for i, picture in enumerate(same_size(count))]


def next_readable(index: int, count: int, broken: set[int]) -> int:
    while index in broken:
        index = (index + 1) % count
    return index


@pytest.mark.parametrize("gib", [0.0, 4.0])
def test_unreadable_images_are_replaced_by_the_next(gib: float) -> None:
    broken = {10, 11, 249, 0, 499}
    images = Listed(with_broken(500, broken))
    batches = batches_of(images, 50, resident_gib=gib)
    seen = first(batches, batches.steps_per_epoch)
    wanted = epoch_order(500, 7, 0).tolist()
    expected = [next_readable(index, 500, broken) for index in wanted]
    assert torch.cat([batch.indices for batch in seen]).tolist() == expected
    for batch in seen:
        assert (batch.images[:, 0, 0, 0] == batch.indices % 256).all()
        assert batch.labels is not None
        assert torch.equal(batch.labels, batch.indices)  # as Listed has them
    assert {where for where, _ in batches.unreadable} == {f"picture {i}" for i in broken}
    assert {why for _, why in batches.unreadable} == {"broken"}
    assert len(batches.unreadable) == 5


def test_streaming_notes_unreadable_images_when_it_meets_them() -> None:
    images = Listed(with_broken(300, {5, 150}))
    batches = batches_of(images, 10, resident_gib=0.0, readers=4)
    position = {index: place for place, index in enumerate(epoch_order(300, 7, 0).tolist())}
    soonest = min((5, 150), key=lambda index: position[index])
    steps = batches.from_step(0)
    for _ in range(position[soonest] // 10):
        next(steps)
    assert len(batches.unreadable) == 0
    next(steps)
    assert next(iter(batches.unreadable)) == (f"picture {soonest}", "broken")


@pytest.mark.parametrize("gib", [0.0, 4.0])
@pytest.mark.parametrize("broken", [set(range(3)), set(range(0, 200, 67)), set(range(200))])
def test_more_than_one_percent_unreadable_is_an_error(gib: float, broken: set[int]) -> None:
    images = Listed(with_broken(200, broken))
    examples = ", ".join([r"picture \d+ \(broken\)"] * 3)
    with pytest.raises(UserError, match=rf"^3 of 200 images cannot .* 1 %: {examples}\.$"):
        first(batches_of(images, 100, resident_gib=gib), 2)


def test_nothing_readable_at_the_start_is_told_at_once() -> None:
    with pytest.raises(UserError, match=r"^1 of 33 images .*: picture 0 \(broken\)\.$"):
        batches_of(Listed(with_broken(33, {0})))
    with pytest.raises(UserError, match=r"^1 of 1 image cannot be read"):
        resident(Listed([None]), CPU)
    with pytest.raises(UserError, match=r"^5 of 400 images .*picture 2 \(broken\) and 2 more\.$"):
        resident(Listed(with_broken(400, set(range(400)))), CPU)


def test_the_limit_counts_each_image_once_and_those_known_before() -> None:
    unreadable = Unreadable(250, [("a", "x")])
    for _ in range(5):
        unreadable.add("a", "y")
        unreadable.add("b", "z")
    assert list(unreadable) == [("a", "x"), ("b", "z")]
    with pytest.raises(UserError, match=r"3 of 250 .*: a \(x\), b \(z\), c \(w\)\.$"):
        unreadable.add("c", "w")


def test_known_unreadable_images_are_kept_on_resuming() -> None:
    batches = batches_of(Listed(same_size(300)), known_unreadable=[("picture 9", "gone")])
    assert list(batches.unreadable) == [("picture 9", "gone")]


# In order


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


def test_in_order_over_a_resident_set_with_a_replacement() -> None:
    images = Listed(with_broken(120, {7}))
    streamed = list(in_order(images, 50, CPU))
    held = list(in_order(resident(images, CPU), 50, CPU))
    assert_same(held, streamed)
    assert streamed[0].indices[6:9].tolist() == [6, 8, 8]


@pytest.mark.parametrize("held", [False, True])
def test_at_positions_replaces_as_the_whole_set_does(held: bool) -> None:
    images: ImageSet = Listed(with_broken(120, {7}))
    if held:
        images = resident(images, CPU)
    batch = at_positions(images, torch.tensor([9, 7, 7, 0]), CPU)
    assert batch.indices.tolist() == batch.images[:, 0, 0, 0].tolist() == [9, 8, 8, 0]
    assert batch.labels is not None
    assert batch.labels.tolist() == [9, 8, 8, 0]
    assert not reading_threads()


# Threads


def reading_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("xmoco")]


def test_closing_stops_the_threads_promptly() -> None:
    images = Listed(same_size(400), delay=0.005)
    steps = batches_of(images, 100, resident_gib=0.0, readers=2).from_step(0)
    next(steps)
    assert reading_threads()
    steps.close()
    assert not reading_threads()
    assert images.reads < 300  # of the 400 that were asked for


def test_an_error_or_a_dropped_iterator_stops_the_threads() -> None:
    images = Listed(with_broken(200, set(range(100))))
    with pytest.raises(UserError):
        first(batches_of(images, 50, resident_gib=0.0), 4)
    assert not reading_threads()
    next(batches_of(Listed(same_size(50)), resident_gib=0.0).from_step(0))
    assert not reading_threads()


def test_reading_ahead_is_bounded() -> None:
    images = Listed(same_size(1000))
    batches = batches_of(images, 10, resident_gib=0.0)
    steps = batches.from_step(0)
    for consumed in range(1, 6):
        next(steps)
        time.sleep(0.05)
        assert images.reads <= 1 + 10 * (consumed + 4)
    steps.close()


def test_waiting_is_measured() -> None:
    slow = batches_of(Listed(same_size(40), delay=0.005), 20, resident_gib=0.0, readers=1)
    first(slow, 2)
    assert slow.waited > 0.05


def test_errors_of_the_program_are_not_taken_for_broken_images() -> None:
    class Faulty(Listed):
        def read(self, index: int) -> Tensor:
            raise ZeroDivisionError(index)

    with pytest.raises(ZeroDivisionError):
        list(in_order(Faulty(same_size(10)), 5, CPU))


def test_the_interpreter_exits_while_batches_are_being_read() -> None:
    program = """
import time, torch
from xmoco.data import Batches, ImageSet
class Slow(ImageSet):
    name, labels, classes = "slow", None, None
    def __len__(self): return 1000
    def read(self, index):
        time.sleep(0.01)
        return torch.zeros(3, 8, 8, dtype=torch.uint8)
    def where(self, index): return str(index)
batches = Batches(Slow(), batch=100, seed=0, device=torch.device("cpu"), resident_gib=0)
steps = batches.from_step(0)
next(steps)
print(time.time(), flush=True)
raise KeyboardInterrupt
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stderr.strip().endswith("KeyboardInterrupt")
    assert time.time() - float(ended.stdout) < 10


def test_from_files_to_batches(tmp_path: Path) -> None:
    for index in range(12):
        image = Image.new("RGB", (6 + index % 2, 5), (index, 0, 0))
        image.save(tmp_path / f"{index:02}.png")
    images = open_images(DataConfig(source=str(tmp_path)), "train")
    assert images is not None
    for batch in first(batches_of(images), 3):
        assert batch.images[:, 0, 0, 0].tolist() == batch.indices.tolist()
        assert batch.images.shape[2] == 5
