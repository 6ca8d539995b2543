"""Digests change with what images and tensors hold, and with nothing else."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers import make_images
from xmoco.config import DataConfig
from xmoco.data import ArrayImages, ImageSet, fingerprint, open_images
from xmoco.data.fingerprint import content_digest, tensors_digest


def opened(folder: Path, **settings: int) -> ImageSet:
    images = open_images(DataConfig(source=str(folder), **settings), "train")
    assert images is not None
    return images


def noise(labels: Tensor | None = None, classes: tuple[str, ...] | None = None) -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (6, 3, 4, 5), generator=generator, dtype=torch.uint8)
    return ArrayImages("noise", pixels, labels, classes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_images(tmp_path / "images", each=5, classes=2)


def test_names_and_places_do_not_matter(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "class1" / "004.png").rename(copy / "class1" / "last.png")
    assert content_digest(opened(copy)) == content_digest(opened(folder))


def test_every_image_matters(folder: Path) -> None:
    seen = {content_digest(opened(folder))}
    for path in sorted(folder.rglob("*.png")):
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
        seen.add(content_digest(opened(folder)))
    assert len(seen) == 11


def test_order_and_number_matter(folder: Path) -> None:
    before = content_digest(opened(folder))
    (folder / "class0" / "000.png").rename(folder / "class0" / "zzz.png")
    moved = content_digest(opened(folder))
    (folder / "class0" / "zzz.png").unlink()
    assert len({before, moved, content_digest(opened(folder))}) == 3


def test_how_images_are_decoded_matters(folder: Path) -> None:
    assert content_digest(opened(folder)) != content_digest(opened(folder, short_side=32))


def test_an_image_that_cannot_be_read(folder: Path) -> None:
    images = opened(folder)
    before = content_digest(images)
    (folder / "class0" / "003.png").unlink()
    assert content_digest(images) == content_digest(images) != before


def test_labels_and_classes_matter() -> None:
    ones, classes = torch.ones(6, dtype=torch.int64), ("a", "b")
    sets = [
        noise(),
        noise(ones, classes),
        noise(ones, ("a", "c")),
        noise(torch.tensor([1, 1, 1, 1, 1, 0]), classes),
        noise(torch.ones(6, 2, dtype=torch.bool), classes),
    ]
    assert len({content_digest(images) for images in sets}) == len(sets)
    # To a glance they matter where asked for: for who learns from them.
    glance = fingerprint.fingerprint
    assert len({glance(images, with_labels=True) for images in sets}) == len(sets)
    assert len({glance(images) for images in sets}) == 1


def test_shapes_of_images_matter() -> None:
    tall = noise()
    tall.pixels = tall.pixels.reshape(6, 3, 5, 4)
    assert content_digest(tall) != content_digest(noise())


@pytest.mark.parametrize("readers", [1, 3])
def test_neither_threads_nor_tasks_matter(
    folder: Path, monkeypatch: pytest.MonkeyPatch, readers: int
) -> None:
    expected = content_digest(opened(folder))
    monkeypatch.setattr(fingerprint, "IMAGES_PER_TASK", 4)
    told: list[tuple[int, int]] = []
    assert content_digest(opened(folder), readers, lambda *c: told.append(c)) == expected
    assert told == [(4, 10), (8, 10), (10, 10)]


def test_all_of_a_tensor_matters() -> None:
    vector = torch.arange(4.0)
    variants = [
        {"a": vector},
        {"b": vector},
        {"a": vector, "b": vector},
        {"a": vector.view(2, 2)},
        {"a": vector.view(torch.int32)},
        {"a": vector + 1},
        {"a": torch.tensor(0.0)},
        {"a": torch.tensor([0.0])},
        {"a": torch.empty(0)},
        {},
    ]
    assert len({tensors_digest(tensors) for tensors in variants}) == len(variants)


def test_how_a_tensor_lies_in_memory_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(4, 3, 2, 2)
    expected = tensors_digest({"weight": weight, "bias": weight[:, 0, 0, 0]})
    other = weight.to(memory_format=torch.channels_last).requires_grad_()
    assert tensors_digest({"bias": weight[:, 0, 0, 0], "weight": other}) == expected
    monkeypatch.setattr(fingerprint, "BYTES_PER_TASK", 32)
    in_parts = tensors_digest({"weight": weight})
    weight[3, 2, 1, 1] += 1
    assert tensors_digest({"weight": weight}) != in_parts
