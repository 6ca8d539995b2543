"""Pictures in, vectors out: as the backbone and its transform give them one by one."""

import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import xmoco
from helpers import assert_done, assert_refused, run_cli
from xmoco.config import InputConfig
from xmoco.data.imagesets import EncodedImages
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.pictures import show_pictures

CPU = xmoco.EvalOptions("cpu", readers=1)
GREY = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.3, 0.2)}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "backbone.safetensors"
    card = BackboneCard("tiny", "cifar", 32, **GREY, method="xmoco", epochs=1, seed=0)
    save_backbone(build_backbone("tiny", "cifar", 32), card, file)
    return file


def draw(file: Path, seed: int, height: int = 40, width: int = 50) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Of several sizes, at several depths; a folder called val is one like others here."""
    folder = tmp_path / "photos"
    names = ["b.png", "a/1.png", "a/deep/2.jpg", "val/cat/ü 3.png"]
    for seed, name in enumerate(names):
        draw(folder / name, seed, 40 + 7 * seed)
    return folder


def one_by_one(weights: Path, files: list[Path]) -> torch.Tensor:
    backbone, transform = xmoco.load_backbone(weights), xmoco.load_transform(weights)
    with torch.no_grad():
        return torch.cat([backbone(transform(Image.open(file))[None]) for file in files])


def test_every_picture_has_the_features_of_its_own(weights: Path, photos: Path) -> None:
    found = xmoco.embed(weights, photos, options=CPU)
    assert sorted(found.names) == ["a/1.png", "a/deep/2.jpg", "b.png", "val/cat/ü 3.png"]
    assert found.features.dtype == np.float32
    expected = one_by_one(weights, [photos / name for name in found.names])
    torch.testing.assert_close(torch.from_numpy(found.features), expected, rtol=1e-3, atol=1e-3)
    apart = np.linalg.norm(found.features[:, None] - found.features[None], axis=-1)
    assert apart[~np.eye(4, dtype=bool)].min() > 0.05, "or they would agree whatever their order"


def test_an_archive_and_a_single_picture(weights: Path, photos: Path) -> None:
    archive = photos.parent / "photos.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(photos, "photos")
    folder = xmoco.embed(weights, photos, options=CPU)
    same = xmoco.embed(weights, archive, options=CPU)
    assert same.names == [f"photos/{name}" for name in folder.names]
    np.testing.assert_allclose(same.features, folder.features, rtol=1e-4, atol=1e-5)
    single = xmoco.embed(weights, photos / "a/1.png", options=CPU)
    assert single.names == ["1.png"]
    own = folder.features[folder.names.index("a/1.png")]
    np.testing.assert_allclose(single.features[0], own, rtol=1e-4, atol=1e-5)


def test_the_command_writes_what_the_function_finds(weights: Path, photos: Path) -> None:
    out = photos.parent / "found.npz"
    outcome = run_cli("embed", weights, photos, "--out", out, "--size", "24", "--device", "cpu")
    assert_done(outcome)
    assert f"4 vectors of 128 numbers: {out}" in outcome.stdout
    known: dict[str, object] = {}
    exec(outcome.stdout[outcome.stdout.index("import numpy") :], known)  # as a user would
    expected = xmoco.embed(weights, photos, options=xmoco.EvalOptions("cpu", size=24))
    assert list(known["names"]) == expected.names
    np.testing.assert_allclose(known["features"], expected.features, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("size", "kept"), [(224, 512), (1024, 1170)])
def test_large_pictures_are_shrunk_when_decoded_as_in_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, kept: int
) -> None:
    draw(tmp_path / "large.png", 0, 1800, 1200)
    decoded: list[torch.Tensor] = []

    def read(self: EncodedImages, index: int) -> torch.Tensor:
        decoded.append(original(self, index))
        return decoded[-1]

    original = EncodedImages.read
    monkeypatch.setattr(EncodedImages, "read", read)
    network = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    seen = show_pictures(network, tmp_path, InputConfig(size=size), torch.device("cpu"))
    assert seen.vectors.shape == (1, 3)
    assert [image.shape for image in decoded] == [(3, kept * 3 // 2, kept)]


def test_of_other_peoples_weights_is_told_what_was_loaded_and_guessed(photos: Path) -> None:
    file, out = photos.parent / "theirs.pth", photos.parent / "found.npz"
    torch.save(torchvision.models.resnet18().state_dict(), file)
    command = ("embed", file, photos, "--size", "32", "--device", "cpu", "--out")
    outcome = run_cli(*command, out)
    assert_done(outcome)
    assert outcome.stderr.splitlines() == [
        f"xmoco: {file}: mean and std are a guess: ImageNet's.",
        f"xmoco: {file}: format torchvision: 120 tensors loaded; dropped: fc; missing: nothing.",
    ]
    half = ("--mean", "0.5,0.5,0.5")
    outcome = run_cli(*command, photos.parent / "told.npz", *half)
    assert "theirs.pth: std is a guess: ImageNet's." in outcome.stderr
    outcome = run_cli(*command, photos.parent / "both.npz", *half, "--std", "0.5,0.5,0.5")
    assert "guess" not in outcome.stderr


def test_what_cannot_be_read_is_left_out_and_told(weights: Path, tmp_path: Path) -> None:
    folder = tmp_path / "many"
    for number in range(120):
        draw(folder / f"{number:03}.png", number, 8, 8)
    (folder / "007.png").write_bytes(b"no image")
    out = tmp_path / "found.npz"
    outcome = run_cli("embed", weights, folder, "--out", out, "--device", "cpu")
    assert_done(outcome)
    assert "007.png cannot be read" in outcome.stderr
    assert "it was left out" in outcome.stderr
    names, features = np.load(out)["names"], np.load(out)["features"]
    assert len(names) == len(features) == 119
    assert "007.png" not in names
    eighth = names.tolist().index("008.png")
    expected = one_by_one(weights, [folder / "008.png"])
    torch.testing.assert_close(
        torch.from_numpy(features[eighth])[None], expected, rtol=1e-3, atol=1e-3
    )


def test_of_some_pictures_all_but_one_may_be_unreadable(weights: Path, tmp_path: Path) -> None:
    """Nothing takes their place."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.png").write_bytes(b"no image")
    draw(tmp_path / "d.png", 0)
    assert xmoco.embed(weights, tmp_path, options=CPU).names == ["d.png"]
    (tmp_path / "d.png").write_bytes(b"no image")
    none = r"^none of the 4 images can be read; the first is \S+a\.png \(.+\)\.$"
    with pytest.raises(xmoco.UserError, match=none):
        xmoco.embed(weights, tmp_path, options=CPU)
    only = r"^the only image cannot be read: \S+b\.png \(.+\)\.$"
    with pytest.raises(xmoco.UserError, match=only):
        xmoco.embed(weights, tmp_path / "b.png", options=CPU)


def test_a_folder_may_be_called_as_a_set_is(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no vectors of sets, so the folder is meant."""
    monkeypatch.chdir(tmp_path)
    for name in ("patterns", "torchvision:CIFAR10"):
        with pytest.raises(xmoco.UserError, match=f"{name} is no image, folder or archive"):
            xmoco.embed(weights, name, options=CPU)
        draw(tmp_path / name / "a.png", 0)
        assert xmoco.embed(weights, name, options=CPU).names == ["a.png"]


def test_one_process_sees_them(weights: Path, photos: Path) -> None:
    options = xmoco.EvalOptions("cpu", devices=2)
    with pytest.raises(xmoco.UserError, match="embed runs in one process"):
        xmoco.embed(weights, photos, options=options)


def test_mistakes(weights: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.npz"
    out.touch()
    command = ("embed", weights, photos, "--out")
    assert_refused(run_cli(*command, out), "there.npz already exists: remove it or name another")
    assert_refused(run_cli(*command, tmp_path / "a.csv"), "a.csv must end in .npz")
    assert_refused(run_cli(*command, tmp_path / "no/a.npz"), f"there is no folder {tmp_path}/no")
    assert_refused(run_cli(*command, tmp_path / "a.npz", "--size", "4"), "4 px are too small")
    (tmp_path / "empty").mkdir()
    nothing = run_cli("embed", weights, tmp_path / "empty", "--out", tmp_path / "a.npz")
    assert_refused(nothing, "there are no images in")
    misspelt = run_cli("embed", weights, tmp_path / "fotos", "--out", tmp_path / "a.npz")
    assert_refused(misspelt, "there is no folder or archive", "did you mean")


def test_features_that_are_no_numbers(photos: Path, tmp_path: Path) -> None:
    backbone, file = build_backbone("tiny", "cifar", 32), tmp_path / "backbone.safetensors"
    next(backbone.parameters()).data.fill_(float("nan"))
    card = BackboneCard("tiny", "cifar", 32, **GREY, method="xmoco", epochs=1, seed=0)
    save_backbone(backbone, card, file)
    with pytest.raises(xmoco.UserError, match=r"features are not all numbers: .*\.$"):
        xmoco.embed(file, photos, options=CPU)
