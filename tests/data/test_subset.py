"""A part of a set keeps images, labels and names together."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers import make_images
from xmoco.config import DataConfig
from xmoco.data import ArrayImages, ImageSet, open_images
from xmoco.data.batches import preload
from xmoco.data.decode import EncodedImage, UnreadableImage
from xmoco.data.subset import Subset, at_most, joined, labelled_share
from xmoco.errors import UserError


@pytest.fixture
def images(tmp_path: Path) -> ImageSet:
    opened = open_images(DataConfig(source=str(make_images(tmp_path / "set", each=5))), "train")
    assert opened is not None
    return opened


def assert_part_of(part: ImageSet, whole: ImageSet, positions: list[int]) -> None:
    assert len(part) == len(positions)
    assert part.classes == whole.classes
    for here, there in enumerate(positions):
        assert torch.equal(part.read(here), whole.read(there))
        assert part.labels is not None
        assert whole.labels is not None
        assert part.labels[here] == whole.labels[there]


def test_a_subset_of_files(images: ImageSet) -> None:
    part = Subset(images, torch.tensor([7, 0, 19]))
    assert_part_of(part, images, [7, 0, 19])
    assert part.where(0) == images.where(7)
    assert part.encoded(0) == images.encoded(7)
    assert len(part.labels) == 3


def test_files_and_decoded_images_give_the_same_part(images: ImageSet) -> None:
    decoded = preload(images, torch.device("cpu"))
    assert isinstance(decoded, ArrayImages)
    parts = [at_most(images, 6), at_most(decoded, 6)]
    assert isinstance(parts[1], ArrayImages)
    place = {images.where(position): position for position in range(len(images))}
    positions = [place[parts[0].where(here)] for here in range(6)]
    assert positions == sorted(set(positions))
    for part in parts:
        assert_part_of(part, images, positions)
        assert len(part.labels) == 6


def test_joined_sets_read_as_one(images: ImageSet) -> None:
    both = joined(Subset(images, torch.tensor([7, 0, 19])), Subset(images, torch.tensor([3])))
    assert_part_of(both, images, [7, 0, 19, 3])
    assert [both.where(i) for i in range(4)] == [images.where(i) for i in (7, 0, 19, 3)]
    assert both.encoded(3) == images.encoded(3)
    assert both.encoded_all([0, 3]) is None  # of files on disk, nobody asks for several together


def test_joined_sets_are_asked_for_several_files_together(images: ImageSet) -> None:
    class Distant(Subset):
        def encoded_all(self, indices: Sequence[int]) -> list[EncodedImage | UnreadableImage]:
            return [self.encoded(index) for index in indices]  # type: ignore[misc]

    first = Distant(images, torch.tensor([7, 0, 19]))
    both = joined(first, Distant(images, torch.tensor([3, 5])))
    asked = both.encoded_all([4, 0, 2, 3, 1])
    assert asked == [images.encoded(position) for position in (5, 7, 19, 3, 0)]
    assert both.encoded_all([1]) == [images.encoded(0)]
    assert joined(first, images).encoded_all([0, 3]) is None


def test_joined_arrays_are_an_array() -> None:
    pixels = torch.arange(15, dtype=torch.uint8).reshape(5, 3, 1, 1)
    first = ArrayImages("first", pixels[:2], torch.tensor([0, 1]), ("a", "b", "c"))
    second = ArrayImages("second", pixels[2:], torch.tensor([2, 2, 1]), ("a", "b", "c"))
    both = joined(first, second)
    assert isinstance(both, ArrayImages)
    assert torch.equal(both.pixels, pixels)
    assert both.labels is not None
    assert both.labels.tolist() == [0, 1, 2, 2, 1]
    assert both.classes == ("a", "b", "c")
    assert joined(first, ArrayImages("bare", pixels)).labels is None


def test_a_small_set_is_left_whole(images: ImageSet) -> None:
    assert at_most(images, 20) is images
    assert at_most(images, 1000) is images


def test_no_labels_stay_no_labels() -> None:
    bare = ArrayImages("bare", torch.zeros(9, 3, 4, 4, dtype=torch.uint8))
    assert at_most(bare, 3).labels is None
    assert Subset(bare, torch.tensor([1])).labels is None


def test_a_labelled_share_takes_the_same_part_of_every_class() -> None:
    labels = torch.arange(200) % 4
    images = ArrayImages("set", torch.zeros(200, 3, 2, 2, dtype=torch.uint8), labels, tuple("abcd"))
    tenth = labelled_share(images, 0.1)
    assert tenth.labels is not None
    assert tenth.labels.bincount().tolist() == [5, 5, 5, 5]
    assert len(labelled_share(images, 0.001)) == 4  # at least one of each
    assert len(labelled_share(images, 1.0)) == 200


def test_a_labelled_share_follows_its_published_rule() -> None:
    pixels = torch.arange(12, dtype=torch.uint8)[:, None, None, None].expand(12, 3, 1, 1)
    labels = torch.tensor([0, 1] * 6)
    images = ArrayImages("set", pixels.clone(), labels, ("cat", "dog"))
    chosen = []
    for label, name in enumerate(("cat", "dog")):
        ranks = {i: hashlib.blake2b(f"{name}/{i}".encode()).digest() for i in range(6)}
        first = sorted(ranks, key=lambda i: ranks[i])[:2]
        chosen += [label + 2 * i for i in first]
    share = labelled_share(images, 1 / 3)
    assert sorted(int(share.read(i)[0, 0, 0]) for i in range(len(share))) == sorted(chosen)


def test_a_share_needs_labels() -> None:
    images = ArrayImages("set", torch.zeros(4, 3, 2, 2, dtype=torch.uint8))
    with pytest.raises(UserError, match="no labels"):
        labelled_share(images, 0.5)
