"""Sets kept on the device: when, and that their batches are those of streaming."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import CPU, Listed, assert_same, batches_of, first, many_sizes, same_size, with_broken
from PIL import Image
from torch import Tensor

from xmoco.config import DataConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.batches import in_order
from xmoco.data.imagesets import ArrayImages, RaggedImages
from xmoco.data.preload import LOOKED_AT, _small_files, preload
from xmoco.data.streaming import streamed
from xmoco.data.subset import at_most
from xmoco.errors import UserError


@pytest.mark.parametrize("pictures", [same_size(50), many_sizes(50)])
def test_sets_become_resident_only_if_they_fit(pictures: list[Tensor | None]) -> None:
    bytes_needed = sum(picture.numel() for picture in pictures if picture is not None)
    images = Listed(pictures)
    assert preload(images, CPU, gib=bytes_needed / 2 / 2**30) is images
    assert images.reads <= LOOKED_AT  # a few looks are enough to know
    assert preload(images, CPU, gib=(bytes_needed - 1) / 2**30) is images
    held = preload(images, CPU, gib=bytes_needed * 2 / 2**30)
    assert held is not images
    assert held.name == images.name
    assert held.labels is not None
    assert torch.equal(held.labels, images.labels)
    for index in (0, 17, 49):
        assert torch.equal(held.read(index), pictures[index])
        assert held.where(index) == f"listed: image {index}"
    reads = images.reads
    first(batches_of(held), 30)
    assert images.reads == reads
    assert preload(held, CPU).where(3) == "listed: image 3"


@pytest.mark.parametrize(("side", "decoded_by"), [(64, "cpu"), (300, "meta")])
def test_small_files_are_decoded_on_the_host(
    side: int, decoded_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they become in memory does not count."""
    for number in range(3):
        pixels = torch.randint(256, (side, side, 3), dtype=torch.uint8).numpy()
        Image.fromarray(pixels).save(tmp_path / f"{number}.jpg", quality=75)
    images = open_images(DataConfig(source=str(tmp_path), short_side=32), "train")
    assert images is not None
    devices = []

    def seen(
        images: ImageSet, positions: Iterator[Tensor], device: torch.device, *rest: Any
    ) -> Any:
        devices.append(device.type)
        return streamed(images, positions, CPU, *rest)

    monkeypatch.setattr("xmoco.data.preload.streamed", seen)
    held = preload(images, torch.device("meta"))  # in a GPU's place
    assert isinstance(held, ArrayImages)
    assert held.pixels.shape == (3, 3, 32, 32)
    assert devices == ["cpu", decoded_by]


@pytest.mark.parametrize("pictures", [same_size(20), with_broken(20, {0, 5})])
def test_what_has_no_files_has_no_small_ones(pictures: list[Tensor | None]) -> None:
    assert not _small_files(Listed(pictures))


def test_a_part_of_a_resident_set_is_resident() -> None:
    pictures = many_sizes(50)
    part = at_most(preload(Listed(pictures), CPU), 20)
    assert isinstance(part, RaggedImages)
    assert part.labels is not None
    for picture, label in zip(part.pictures, part.labels.tolist(), strict=True):
        assert torch.equal(picture, pictures[label])


def test_one_size_lies_in_one_tensor() -> None:
    images = Listed(same_size(50))
    exactly = 50 * 3 * 4 * 5 / 2**30
    assert isinstance(preload(images, CPU, gib=exactly), ArrayImages)
    assert preload(images, CPU, gib=exactly - 1 / 2**30) is images
    assert isinstance(preload(Listed(many_sizes(50)), CPU), RaggedImages)
    assert isinstance(preload(images, CPU, gib=2.0**53), ArrayImages)  # more than there is


def test_a_set_that_grows_out_of_its_limit_is_left_where_it_is() -> None:
    """The images looked at are small, the others are not."""
    large = torch.zeros(3, 90, 90, dtype=torch.uint8)
    looked_at = {place * 2000 // LOOKED_AT for place in range(LOOKED_AT)}
    small = [large[:, :3, : 2 + i % 3] for i in range(2000)]
    images = Listed([small[i] if i in looked_at else large for i in range(2000)])
    assert preload(images, CPU, gib=2000 * 90 * 90 / 2**30) is images
    assert images.reads < 1800  # and that is noticed on the way


@pytest.mark.parametrize("place", [10, 300, 600])
@pytest.mark.parametrize("side", [2, 9])
def test_a_late_second_size_is_kept_too_and_nothing_is_decoded_twice(place: int, side: int) -> None:
    pictures = same_size(600)
    pictures.insert(place, torch.ones(3, side, side, dtype=torch.uint8))
    images, told = Listed(pictures), list[int]()
    batches = batches_of(images, 64, on_progress=lambda done, _: told.append(done))
    assert isinstance(batches.images, RaggedImages)
    reads = images.reads
    assert reads == 601 + LOOKED_AT
    assert told == sorted(told)
    assert_same(first(batches, 9), first(batches_of(Listed(pictures), 64, preload_gib=0.0), 9))
    assert images.reads == reads


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_resident_batches_equal_streamed_ones(data: st.DataObject) -> None:
    """Whatever the sizes, the batch, the images that are broken, and the kind of labels."""
    sizes = data.draw(st.lists(st.tuples(*[st.integers(1, 6)] * 2), min_size=100, max_size=110))
    few = data.draw(st.integers(1, len(sizes)))  # one size, or some, or many
    generator = torch.Generator().manual_seed(0)
    pictures: list[Tensor | None] = [
        torch.randint(256, (3, *sizes[i % few]), generator=generator).byte()
        for i in range(len(sizes))
    ]
    broken = data.draw(st.integers(-1, len(sizes) - 1))
    if broken >= 0:
        pictures[broken] = None
    several_labels = data.draw(st.booleans())

    def listed() -> Listed:
        images = Listed(pictures)
        if several_labels:
            images.labels = torch.rand(len(sizes), 3, generator=generator.manual_seed(1)) < 0.5
        return images

    batch = data.draw(st.integers(1, 40))
    held = batches_of(listed(), batch)
    assert isinstance(held.images, ArrayImages | RaggedImages)
    streaming = batches_of(listed(), batch, preload_gib=0.0, readers=2)
    assert_same(first(held, 4), first(streaming, 4))
    assert_same(
        list(in_order(held.images, batch, CPU)), list(in_order(streaming.images, batch, CPU))
    )


def test_arrays_are_resident_or_stay_where_they_are() -> None:
    pixels = torch.arange(40 * 3 * 2 * 2).reshape(40, 3, 2, 2).byte()
    images = ArrayImages("array", pixels, torch.arange(40) % 7)
    held, streamed = batches_of(images), batches_of(images, preload_gib=0.0)
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


def test_nothing_readable_at_the_start_is_told_at_once() -> None:
    with pytest.raises(UserError, match=r"^at least 4 of 33 images .*: picture 0 \(broken\), "):
        batches_of(Listed(with_broken(33, {0, 1, 2, 3})))
    with pytest.raises(UserError, match=r"^1 of 1 image cannot be read"):
        preload(Listed([None]), CPU)
    with pytest.raises(UserError, match=r"^at least 40 of 400 images .* and 30 more\.$"):
        preload(Listed(with_broken(400, set(range(400)))), CPU)


def test_in_order_over_a_resident_set_with_a_replacement() -> None:
    images = Listed(with_broken(120, {7}))
    streamed = list(in_order(images, 50, CPU))
    held = list(in_order(preload(images, CPU), 50, CPU))
    assert_same(held, streamed)
    assert streamed[0].indices[6:9].tolist() == [6, 8, 8]
