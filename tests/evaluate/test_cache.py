"""Kept features: found by content, checked, rebuilt when damaged, never in the way."""

import errno
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers import make_images
from xmoco.config import DataConfig, InputConfig
from xmoco.data import ArrayImages, ImageSet, Unreadable, open_images
from xmoco.evaluate import cache
from xmoco.evaluate.cache import cached_features, default_cache
from xmoco.evaluate.features import Features, backbone_features, left_out_of

CPU = torch.device("cpu")
INPUT = InputConfig(size=16)


class Looks(nn.Module):
    """A small backbone that counts the images it is shown."""

    def __init__(self, size: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(3)
        self.mix = nn.Linear(3, size)
        self.seen = 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += len(images)
        mixed: Tensor = self.mix(self.norm(images).amax((2, 3)))
        return mixed


class Kept:
    """Features of images by a backbone, kept in a folder, with all that is said and told."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.read: list[tuple[int, int]] = []
        self.told: list[tuple[int, int]] = []

    def __call__(
        self,
        backbone: nn.Module,
        images: ImageSet,
        input: InputConfig = INPUT,
        border: bool = True,
        unreadable: Unreadable | None = None,
    ) -> Features:
        return cached_features(
            backbone, images, input, CPU, readers=2, border=border, folder=self.folder,
            unreadable=unreadable, on_reading=lambda *counts: self.read.append(counts),
            on_progress=lambda *counts: self.told.append(counts), say=self.said.append,
        )  # fmt: skip

    @property
    def file(self) -> Path:
        assert self.folder is not None
        (path,) = self.folder.iterdir()
        return path


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "cache" / "features")


def noise(labels: Tensor | None = None) -> ArrayImages:
    pixels = torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator())
    return ArrayImages("noise", pixels, labels)


def same(found: Features, expected: Features) -> bool:
    if (found.labels is None) != (expected.labels is None):
        return False
    if found.labels is not None and expected.labels is not None:
        if found.labels.dtype != expected.labels.dtype:
            return False
        if not torch.equal(found.labels, expected.labels):
            return False
    return found.vectors.dtype == torch.float32 and torch.equal(found.vectors, expected.vectors)


@pytest.mark.parametrize(
    "labels", [None, torch.arange(12), torch.arange(60).reshape(12, 5) % 7 == 0]
)
def test_features_are_computed_once(kept: Kept, labels: Tensor | None) -> None:
    backbone, images = Looks(), noise(labels)
    expected = backbone_features(Looks(), images, INPUT, CPU)
    assert same(kept(backbone, images), expected)
    assert backbone.seen == 12
    assert (kept.read, kept.told) == ([(12, 12)], [(12, 12)])
    assert same(kept(backbone, images), expected)
    assert backbone.seen == 12
    assert (kept.read, kept.told) == ([(12, 12)] * 2, [(12, 12)])
    assert kept.said == []


def test_safetensors_reads_what_is_kept(kept: Kept) -> None:
    for labels in (torch.arange(12), torch.ones(12, 3, dtype=torch.bool)):
        assert kept.folder is not None
        shutil.rmtree(kept.folder, ignore_errors=True)
        expected = kept(Looks(), noise(labels))
        read = load_file(kept.file)
        assert read.keys() == {"vectors", "labels"}
        assert torch.equal(read["vectors"], expected.vectors)
        assert torch.equal(read["labels"], labels)


def test_what_features_depend_on_is_told_apart(kept: Kept) -> None:
    def shifted(name: str) -> Looks:
        backbone = Looks()
        backbone.state_dict()[name].view(-1)[0] += 0.5
        return backbone

    class Renamed(Looks):
        pass

    brighter, turned = noise(), noise()
    brighter.pixels[5, 1, 2, 3] ^= 1
    turned.pixels = turned.pixels.flip(0)
    large = INPUT.model_copy(update={"size": 64})
    cases = [
        (Looks(), noise(), INPUT, True),
        (shifted("mix.weight"), noise(), INPUT, True),
        (shifted("norm.running_var"), noise(), INPUT, True),
        (Renamed(), noise(), INPUT, True),
        (Looks(), brighter, INPUT, True),
        (Looks(), turned, INPUT, True),
        (Looks(), noise(torch.arange(12)), INPUT, True),
        (Looks(), noise(torch.arange(12) // 2), INPUT, True),
        (Looks(), noise(), INPUT.model_copy(update={"mean": (0.5, 0.5, 0.5)}), True),
        (Looks(), noise(), INPUT.model_copy(update={"std": (0.5, 0.5, 0.5)}), True),
        (Looks(), noise(), large, True),
        (Looks(), noise(), large, False),
        (Looks(), noise(), INPUT.model_copy(update={"eval_size": 48}), True),
    ]
    for _ in range(2):
        for backbone, images, input, border in cases:
            expected = backbone_features(backbone, images, input, CPU, border=border)
            assert same(kept(backbone, images, input, border), expected)
    assert kept.folder is not None
    assert len(list(kept.folder.iterdir())) == len(cases)


def test_training_mode_and_the_size_of_random_views_make_no_difference(kept: Kept) -> None:
    first, second = Looks().eval(), Looks().train()
    kept(first, noise())
    kept(second, noise(), INPUT.model_copy(update={"size": 8, "eval_size": INPUT.size}))
    assert (first.seen, second.seen) == (12, 0)


def test_versions_of_torch_and_of_the_format_are_told_apart(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(Looks(), noise())
    for owner, name, value, seen in (
        (torch, "__version__", "2.99.1", 12),
        (torch, "__version__", "2.99.2+cpu", 0),
        (cache, "FORMAT", -1, 12),
    ):
        monkeypatch.setattr(owner, name, value)
        backbone = Looks()
        kept(backbone, noise())
        assert backbone.seen == seen, kept.said


def test_images_are_known_wherever_they_lie(kept: Kept, tmp_path: Path) -> None:
    """An unreadable image is left out with its label, and told of where it lies, also from file."""
    folder = make_images(tmp_path / "images", each=60, classes=2)
    (folder / "class0" / "059.png").write_bytes(b"broken")
    backbone, reasons = Looks(), list[str]()
    for source in (folder, shutil.copytree(folder, tmp_path / "moved")):
        images = open_images(DataConfig(source=str(source)), "train")
        assert images is not None
        broken = left_out_of(images)
        found = kept(backbone, images, unreadable=broken)
        assert found.labels is not None
        assert found.labels.tolist() == [0] * 59 + [1] * 60
        assert found.places.tolist() == [*range(59), *range(60, 120)]
        ((where, why),) = broken
        assert where == str(source / "class0" / "059.png")
        reasons.append(why)
    assert len({*reasons}) == 1
    assert backbone.seen == 120
    assert kept.said == []


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(0, 255))
def test_damage_is_said_and_repaired(kept: Kept, place: float, flip: int) -> None:
    """Bits are flipped anywhere or, where no bit is, the file ends there."""
    kept.said.clear()
    assert kept.folder is not None
    shutil.rmtree(kept.folder, ignore_errors=True)  # some changes of the header do no harm and stay
    expected = kept(Looks(), noise(torch.arange(12)))
    assert kept.said == []
    whole = kept.file.read_bytes()
    damaged = bytearray(whole)
    position = int(place * len(whole))
    damaged[position] ^= flip
    kept.file.write_bytes(damaged if flip else whole[:position])
    backbone = Looks()
    assert same(kept(backbone, noise(torch.arange(12))), expected)
    assert backbone.seen == 12 * len(kept.said)
    in_data = position >= 8 + int.from_bytes(whole[:8], "little")
    if in_data or not flip:
        (sentence,) = kept.said
        assert str(kept.file) in sentence
        assert "damaged" in sentence
        assert sentence.endswith("computed again.")
        assert kept.file.read_bytes() == whole


def test_features_under_a_mistaken_name_are_not_believed(kept: Kept, tmp_path: Path) -> None:
    expected = kept(Looks(), noise())
    other = Kept(tmp_path / "other")
    other(Looks(), noise(torch.arange(12)))
    shutil.copy(other.file, kept.file)
    assert same(kept(Looks(), noise()), expected)
    assert len(kept.said) == 1


def test_changing_features_does_not_change_the_file(kept: Kept) -> None:
    kept(Looks(), noise())
    found = kept(Looks(), noise())
    before = found.vectors.clone()
    found.vectors.zero_()
    assert torch.equal(kept(Looks(), noise()).vectors, before)
    assert kept.said == []


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    kept = Kept(tmp_path / "file" / "features")
    assert same(kept(Looks(), noise()), backbone_features(Looks(), noise(), INPUT, CPU))
    assert kept.said == [
        f"features cannot be kept in {kept.folder}: Not a directory. It goes on without."
    ]


def test_a_full_disk_is_said_and_leaves_nothing(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_write", write)
    assert same(kept(Looks(), noise()), backbone_features(Looks(), noise(), INPUT, CPU))
    assert len(kept.said) == 1
    assert "No space left on device" in kept.said[0]
    assert kept.folder is not None
    assert list(kept.folder.iterdir()) == []


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    kept, backbone = Kept(None), Looks()
    kept(backbone, noise())
    kept(backbone, noise())
    assert backbone.seen == 24
    assert (kept.read, kept.told) == ([], [(12, 12)] * 2)


def test_where_features_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "xmoco" / "features"
    for missing in ("", None):
        if missing is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", missing)
        assert default_cache() == Path.home() / ".cache" / "xmoco" / "features"
