"""What a careless or hostile person may give to xmoco, by kind.

A case is made by a function of a random number generator, a folder of its own and the templates:
good files, which it changes. It writes its input and returns the action that takes it. The action
may raise what the command line turns into a sentence, and nothing else.
"""

import contextlib
import io
import json
import os
import random
import shutil
import string
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from safetensors.torch import save

from mutations import TEXTS, any_value, changed_bytes, changed_value
from xmoco import pretraining
from xmoco.cli import main
from xmoco.config import KINDS as KINDS_OF
from xmoco.config import DataConfig, InputConfig
from xmoco.data.decode import EncodedImage, UnreadableImage, decode_rgb
from xmoco.data.imagesets import ArrayImages
from xmoco.data.jpeg import plain_jpeg
from xmoco.data.sources import open_images
from xmoco.detect.sources import open_detection
from xmoco.errors import UserError
from xmoco.evaluate.cache import cached_features
from xmoco.nn.backbone_files import BackboneCard, save_backbone
from xmoco.nn.backbones import build_backbone
from xmoco.nn.weights import load_weights
from xmoco.records import ClassifierProtocol, KnnProtocol, Measured, Record, read_records
from xmoco.report.history import read_history
from xmoco.report.page import write_report
from xmoco.report.panels import panels
from xmoco.report.tables import draw_transfer
from xmoco.settings import all_fields, load_config, recipe_names

Action = Callable[[], object]

SENTENCES = (UserError, UnreadableImage)
"""What becomes a sentence; and so does an ``OSError`` of the system."""


class NotASentence(Exception):  # noqa: N818
    """A command ended in another way than it should."""


@dataclass
class Templates:
    """Good files, by kind."""

    folder: Path
    images: dict[str, bytes] = field(default_factory=dict)
    archives: dict[str, bytes] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        """A run of a few steps, stopped in the middle."""
        return self.folder / "run"

    @property
    def pictures(self) -> Path:
        return self.folder / "pictures"

    @property
    def weights(self) -> Path:
        return self.folder / "backbone.safetensors"

    @property
    def shards(self) -> Path:
        """Folders of shards, by kind."""
        return self.folder / "shards"

    @property
    def scenes(self) -> Path:
        """Folders with boxes, by layout."""
        return self.folder / "scenes"


# Making the templates


def picture(side: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 255, (5, 5, 3), dtype=np.uint8))
    return small.resize((side, side + 3), Image.Resampling.BICUBIC)


def make_templates(folder: Path) -> Templates:
    templates = Templates(folder)
    for number in range(12):
        place = templates.pictures / f"class{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        picture(16, number).save(place / f"{number}.png")
    for name, kind, mode, options in (
        ("plain.jpg", "JPEG", "RGB", {}),
        ("progressive.jpg", "JPEG", "RGB", {"progressive": True}),
        ("exif.jpg", "JPEG", "RGB", {"exif": _exif()}),
        ("cmyk.jpg", "JPEG", "CMYK", {}),
        ("grey.jpg", "JPEG", "L", {}),
        ("rgb.png", "PNG", "RGB", {}),
        ("alpha.png", "PNG", "RGBA", {}),
        ("palette.png", "PNG", "P", {"transparency": 3}),
        ("deep.png", "PNG", "I;16", {}),
        ("a.gif", "GIF", "P", {"transparency": 1}),
        ("a.bmp", "BMP", "RGB", {}),
        ("a.tif", "TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("deep.tif", "TIFF", "F", {}),
        ("a.webp", "WEBP", "RGBA", {"lossless": True}),
        ("a.jp2", "JPEG2000", "RGB", {}),
        ("a.tga", "TGA", "RGB", {"compression": "tga_rle"}),
        ("a.ppm", "PPM", "RGB", {}),
        ("a.avif", "AVIF", "RGB", {}),
    ):
        file = io.BytesIO()
        image = picture(24)
        image = image.convert("I").convert(mode) if mode == "I;16" else image.convert(mode)
        with contextlib.suppress(KeyError, OSError):  # a Pillow without the format
            image.save(file, kind, **options)
            templates.images[name] = file.getvalue()
    templates.images["program.jpg"] = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"
    for name, form, mode in (
        ("ustar.tar", tarfile.USTAR_FORMAT, "w"),
        ("gnu.tar", tarfile.GNU_FORMAT, "w"),
        ("pax.tar", tarfile.PAX_FORMAT, "w"),
        ("a.tar.gz", tarfile.GNU_FORMAT, "w:gz"),
        ("a.tar.xz", tarfile.GNU_FORMAT, "w:xz"),
        ("a.tar.bz2", tarfile.GNU_FORMAT, "w:bz2"),
    ):
        templates.archives[name] = _archive(templates.pictures, form, mode)
    templates.recipes = {name: _recipe_text(name) for name in recipe_names()}
    _write_scenes(templates.scenes)
    _write_shards(templates)
    save_backbone(build_backbone("tiny", "cifar"), card(), templates.weights)
    _make_run(templates)
    return templates


def _recipe_text(name: str) -> str:
    return (resources.files("xmoco") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def _exif() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def _archive(pictures: Path, form: int, mode: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=form) as archive:
        archive.add(pictures, "set")
        long = tarfile.TarInfo("set/" + "long" * 40 + ".png")
        content = (pictures / "class0" / "0.png").read_bytes()
        long.size, long.pax_headers = len(content), {"comment": "é"}
        if form != tarfile.USTAR_FORMAT:
            archive.addfile(long, io.BytesIO(content))
        link = tarfile.TarInfo("set/link.png")
        link.type, link.linkname = tarfile.LNKTYPE, "set/class0/0.png"
        archive.addfile(link)
    return file.getvalue()


def card() -> BackboneCard:
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.2, 0.2)
    return BackboneCard("tiny", "cifar", 32, mean, std, "xmoco", epochs=2, seed=0)


def quick_recipe(pictures: Path) -> dict[str, Any]:
    return {
        "data": {"source": str(pictures), "short_side": 32},
        "input": {"size": 8},
        "views": {"blur": 0.0},
        "model": {
            **{"backbone": "tiny", "stem": "cifar", "batch_norm": "plain"},
            **{"head_layers": 2, "head_hidden": 8, "feature_size": 8},
        },
        "method": {"bank_length": 8},
        "train": {"epochs": 2, "batch": 4, "log_every": 1},
        "monitor": {"knn_k": 3},
        "run": {"device": "cpu", "readers": 1},
    }


def _make_run(templates: Templates) -> None:
    recipe = templates.folder / "quick.yaml"
    recipe.write_text(yaml.safe_dump(quick_recipe(templates.pictures)))
    with no_pictures():
        pretraining.pretrain(recipe, out=templates.run)
    # All but the last step: so there is something left to do.
    (templates.run / "backbone.safetensors").unlink()


def no_pictures() -> Any:
    """Without the drawings of a report, which take longer than the run."""
    return patch.object(
        pretraining, "draw_report", lambda _, training, *__: training.run.path / "report.html"
    )


def _write_scenes(folder: Path) -> None:
    """The same two pictures with boxes in COCO's, VOC's and YOLO's layout."""
    for split in ("train", "val"):
        for place in (
            folder / "coco" / split,
            folder / "yolo" / "images" / split,
            folder / "yolo" / "labels" / split,
        ):
            place.mkdir(parents=True, exist_ok=True)
        entries: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": []}
        entries["categories"] = [{"id": 1, "name": "block"}, {"id": 2, "name": "disc"}]
        for number in range(2):
            picture(32, number).save(folder / "coco" / split / f"{number}.png")
            picture(32, number).save(folder / "yolo" / "images" / split / f"{number}.png")
            entries["images"].append(
                {"id": number, "file_name": f"{split}/{number}.png", "width": 32, "height": 35}
            )
            entries["annotations"].append(
                {
                    **{"id": number + 1, "image_id": number, "category_id": 1 + number},
                    **{"bbox": [4, 5, 10, 12], "area": 120, "iscrowd": 0},
                    "segmentation": [[4, 5, 14, 5, 14, 17, 4, 17]],
                }
            )
            label = folder / "yolo" / "labels" / split / f"{number}.txt"
            label.write_text(f"{number} 0.3 0.4 0.2 0.3\n")
        (folder / "coco" / f"instances_{split}.json").write_text(json.dumps(entries))
    config = {"path": ".", "train": "images/train", "val": "images/val", "names": ["a", "b"]}
    (folder / "yolo" / "data.yaml").write_text(yaml.safe_dump(config))
    year = folder / "voc" / "VOC2007"
    for place in (year / "Annotations", year / "JPEGImages", year / "ImageSets" / "Main"):
        place.mkdir(parents=True)
    for split, stem in (("trainval", "000001"), ("test", "000002")):
        picture(32).save(year / "JPEGImages" / f"{stem}.jpg")
        (year / "ImageSets" / "Main" / f"{split}.txt").write_text(f"{stem}\n")
        (year / "Annotations" / f"{stem}.xml").write_text(
            f"<annotation><filename>{stem}.jpg</filename><size><width>32</width>"
            "<height>35</height><depth>3</depth></size><object><name>cat</name>"
            "<difficult>0</difficult><bndbox><xmin>3</xmin><ymin>4</ymin><xmax>20</xmax>"
            "<ymax>30</ymax></bndbox></object></annotation>"
        )


def _write_shards(templates: Templates) -> None:
    tars, parquet = templates.shards / "tar", templates.shards / "parquet"
    tars.mkdir(parents=True)
    parquet.mkdir()
    contents = [path.read_bytes() for path in sorted(templates.pictures.rglob("*.png"))]
    for number in range(2):
        mine = contents[6 * number : 6 * number + 6]
        with tarfile.open(tars / f"train-{number}.tar", "w") as archive:
            for place, content in enumerate(mine):
                for ending, held in ((".png", content), (".cls", b"%d" % (place % 3))):
                    member = tarfile.TarInfo(f"{number}{place}{ending}")
                    member.size = len(held)
                    archive.addfile(member, io.BytesIO(held))
        rows = [{"bytes": content, "path": f"{place}.png"} for place, content in enumerate(mine)]
        table = pa.table({"image": pa.array(rows), "label": pa.array([0, 1, 2] * 2)})
        compression = ("none", "snappy")[number]
        pq.write_table(table, parquet / f"train-{number}.parquet", compression=compression)


# Commands


def command(*arguments: str | Path) -> None:
    """``xmoco ARGUMENTS`` in this process: it must end well, or with one line that says why, which
    is raised."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    before, sys.argv = sys.argv, ["xmoco", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.argv = before
    said = err.getvalue()
    if status == 0:
        return
    usage = status == 2 and (not said or "Usage:" in said or "─ Error ─" in said)  # typer's own
    sentence = said.splitlines()[-1:] == [said.rstrip("\n")] and said.startswith("xmoco: ")
    if status != 2 or not (usage or sentence):
        raise NotASentence(f"status {status}: {said[-2000:]}")
    if sentence and not said.rstrip("\n").isprintable():
        raise NotASentence(f"control codes: {said!r}")
    raise UserError(said)


# Kinds of cases


def recipes(rng: random.Random, folder: Path, templates: Templates) -> Action:
    text = rng.choice(list(templates.recipes.values()))
    if rng.random() < 0.4:
        content = changed_bytes(rng, text.encode(), [t.encode() for t in TEXTS[:-10]])
    else:
        settings = yaml.safe_load(text) or {}
        for _ in range(rng.randrange(3)):
            section, name = rng.choice(list(all_fields()))
            settings.setdefault(section, {})
            if isinstance(settings[section], dict):
                settings[section][name] = any_value(rng)
        settings = changed_value(rng, settings)
        try:
            content = yaml.safe_dump(settings, allow_unicode=True).encode(errors="surrogateescape")
        except (ValueError, RecursionError):
            content = repr(settings).encode(errors="replace")
    path = folder / "recipe.yaml"
    path.write_bytes(content)
    return lambda: command("settings", "--recipe", path)


def settings(rng: random.Random, _: Path, templates: Templates) -> Action:
    fields = [".".join(pair) if rng.random() < 0.5 else pair[1] for pair in all_fields()]
    asked = []
    for _ in range(rng.choice((1, 1, 2, 5))):
        key = rng.choice(fields) if rng.random() < 0.9 else rng.choice(TEXTS)
        value = rng.choice((rng.choice(TEXTS), repr(any_value(rng)), str(any_value(rng))))
        asked.append(f"{key}={value}" if rng.random() < 0.95 else value)
    recipe = rng.choice([*templates.recipes, rng.choice(TEXTS)])
    return lambda: load_config(recipe, asked)


WORDS = (
    *("pretrain", "evaluate", "knn", "linear", "finetune", "transfer", "tables", "run", "export"),
    *("settings", "--recipe", "-r", "--data", "--out", "--resume", "--weights", "--dry-run"),
    *("--to", "timm", "onnx", "torchvision", "--k", "--size", "--mean", "--std", "--device", "cpu"),
    *("--preset", "moco", "--epochs", "--fraction", "--records", "--seed", "--help", "-h", "--"),
    *("demo", "cifar10", "patterns", "torchvision:CIFAR10", "epochs=1", "batch=8", "0", "-1", "3"),
    *("WEIGHTS", "PICTURES", "RUN", "out", "main", "xi", "--seeds", "0,1", "--no-cache", "--mode"),
)


def command_lines(rng: random.Random, folder: Path, templates: Templates) -> Action:
    places = {
        "WEIGHTS": str(templates.weights),
        "PICTURES": str(templates.pictures),
        "RUN": str(templates.run),
    }
    words = [
        places.get(word, word)
        for word in rng.choices(WORDS, k=rng.choice((1, 2, 3, 4, 6, 9)))
        if rng.random() < 0.95
    ]
    first = rng.choice((["pretrain"], ["evaluate", "knn"], ["export"], ["tables"], ["settings"]))
    words = [*(first if rng.random() < 0.7 else []), *words]
    for place in range(len(words)):
        if rng.random() < 0.1:
            words[place] = rng.choice(TEXTS).replace("\0", "")  # which no command line can hold
        elif rng.random() < 0.05:
            words[place] += rng.choice(string.printable)

    def act() -> None:
        # What a right command line would begin, in their stead.
        begins = UserError("it would begin now.")
        with (
            patch.object(pretraining, "_run", side_effect=begins),
            patch("xmoco.planning.images_per_second", return_value=100.0),
            patch("xmoco.fabric.Fabric.launch", _launch_alone),
            patch("xmoco.demo.run_demo", side_effect=begins),
            patch("xmoco.tables.running.run_table", side_effect=begins),
            patch("xmoco.evaluate.evaluation.Evaluation.features", side_effect=begins),
            patch("xmoco.train.in_folder.train_in_folder", side_effect=begins),
            patch("xmoco.nn.weights.load_torchvision", side_effect=begins),
            patch("xmoco.nn.weights.load_timm", side_effect=begins),
        ):
            command(*words)

    del folder
    return act


def _launch_alone(fabric: Any, *_: Any) -> None:
    if fabric._strategy.launcher is not None:
        raise UserError("it would start processes now.")


def images(rng: random.Random, _: Path, templates: Templates) -> Action:
    name = rng.choice(list(templates.images))
    data = changed_bytes(rng, templates.images[name], list(templates.images.values()))
    short_side = rng.choice((None, 32, 512))

    def act() -> None:
        plain_jpeg(EncodedImage(data, short_side))
        decode_rgb(data, short_side)

    return act


def archives(rng: random.Random, folder: Path, templates: Templates) -> Action:
    name = rng.choice(list(templates.archives))
    content = templates.archives[name]
    if name.endswith(".tar") and rng.random() < 0.7:
        content = _other_header(rng, content)
    else:
        content = changed_bytes(rng, content, list(templates.archives.values()))
    path = folder / name
    path.write_bytes(content)

    def act() -> None:
        found = open_images(DataConfig(source=str(path)), rng.choice(("train", "test")))
        for index in range(len(found or ())):
            assert found is not None
            with contextlib.suppress(UnreadableImage):
                found.read(index)

    return act


HEADER_FIELDS = ((0, 100), (124, 12), (156, 1), (157, 100), (257, 8), (345, 155))
"""Begin and length: name, size, kind, target of a link, kind of archive, and more of the name."""


def _other_header(rng: random.Random, content: bytes) -> bytes:
    """Any field of a header, with the sum that belongs to it."""
    data = bytearray(content)
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    for at in rng.sample(headers, min(len(headers), rng.choice((1, 1, 2, 5)))):
        begin, length = rng.choice(HEADER_FIELDS)
        value = rng.choice(
            (
                *(b"\xff" * 12, b"\x80" + b"\xff" * 11, b"-0000000512\0", b"77777777777\0", b""),
                *(rng.randbytes(length), b"../../x.png", b"/etc/passwd", b"x", b"L", b"S", b"g"),
            )
        )
        data[at + begin : at + begin + length] = value[:length].ljust(length, b"\0")
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


LABELS = "image,labels\n1.png,cat;dog\n2.png,\n3.png,dog\n"


def label_files(rng: random.Random, folder: Path, templates: Templates) -> Action:
    split = folder / "set" / "train"
    split.mkdir(parents=True)
    for number, source in enumerate(sorted(templates.pictures.rglob("*.png"))[:3], start=1):
        shutil.copy(source, split / f"{number}.png")
    others = [text.encode(errors="replace") for text in TEXTS]
    content = changed_bytes(rng, LABELS.encode(), [b'"', b",,", b"\r", b"\xff\xfe", *others])
    (split / "labels.csv").write_bytes(content)
    return lambda: open_images(DataConfig(source=str(folder / "set")), "train")


def folders(rng: random.Random, folder: Path, templates: Templates) -> Action:
    """Names, links, pipes and levels."""
    top = folder / "set"
    top.mkdir()
    places = [top]
    content = list(templates.images.values())
    for _ in range(rng.randrange(1, 25)):
        place = rng.choice(places)
        name = rng.choice((rng.choice(TEXTS), "train", "val", "test", "a", "b", ".hidden", "é"))
        name = name.replace("/", "_").replace("\0", "_")[:60] or "x"
        path = place / (name + rng.choice((".png", ".jpg", ".JPG", "", ".tar")))
        if os.path.lexists(path):
            continue
        target = rng.choice((*places, top, "/dev/zero", "/proc/self/pagemap", "nothing", "/dev"))
        with contextlib.suppress(OSError, ValueError):
            match rng.randrange(6):
                case 0 | 1:
                    path.mkdir()
                    places.append(path)
                case 2 | 3:
                    path.write_bytes(rng.choice(content))
                case 4:
                    path.symlink_to(target)
                case _:
                    os.mkfifo(path)

    def act() -> None:
        for split in ("train", "test"):
            data = DataConfig(labels=rng.choice(("auto", "folders", "none")))
            found = open_images(data.model_copy(update={"source": str(top)}), split)
            for index in range(min(10, len(found or ()))):
                assert found is not None
                with contextlib.suppress(UnreadableImage):
                    found.read(index)

    return act


def shards(rng: random.Random, folder: Path, templates: Templates) -> Action:
    """Tar files or Parquet files, or the index of them that is kept."""
    place = folder / "set"
    kind = rng.choice(("tar", "parquet"))
    shutil.copytree(templates.shards / kind, place)
    files = sorted(place.iterdir())
    data = DataConfig(source=str(place))
    if rng.random() < 0.3:
        open_images(data, "train")
        files = list((folder / "out" / "cache").rglob("*.index"))
        assert files, "where is the index?"
    file = rng.choice(files)
    content = file.read_bytes()
    if kind == "tar" and file.suffix == ".tar" and rng.random() < 0.5:
        file.write_bytes(_other_header(rng, content))
    elif kind == "parquet" and file.suffix == ".parquet" and rng.random() < 0.5:
        # Half of the rest are headers of pages and the footer.
        end = len(content) - rng.randrange(min(2000, len(content)))
        file.write_bytes(content[:end] + changed_bytes(rng, content[end:]))
    else:
        file.write_bytes(changed_bytes(rng, content))

    def act() -> None:
        found = open_images(data, "train")
        for index in range(len(found or ())):
            assert found is not None
            found.where(index)
            with contextlib.suppress(UnreadableImage):
                found.read(index)

    return act


def boxes(rng: random.Random, folder: Path, templates: Templates) -> Action:
    layout = rng.choice(("coco", "voc", "yolo"))
    place = folder / layout
    shutil.copytree(templates.scenes / layout, place)
    kinds = ("*.json", "*.xml", "*.txt", "*.yaml")
    file = rng.choice([path for kind in kinds for path in sorted(place.rglob(kind))])
    if file.suffix == ".json" and rng.random() < 0.7:
        file.write_text(json.dumps(changed_value(rng, json.loads(file.read_text()))))
    elif file.suffix == ".yaml" and rng.random() < 0.7:
        with contextlib.suppress(ValueError):
            file.write_text(yaml.safe_dump(changed_value(rng, yaml.safe_load(file.read_text()))))
    else:
        others = [text.encode(errors="replace") for text in TEXTS]
        file.write_bytes(changed_bytes(rng, file.read_bytes(), others))

    def act() -> None:
        train, test = open_detection(place)
        assert len(train)
        assert len(test)

    return act


def weights(rng: random.Random, folder: Path, templates: Templates) -> Action:
    state: dict[str, Any] = dict(build_backbone("tiny", "cifar").state_dict())
    match rng.randrange(5):
        case 0:
            path = folder / "a.safetensors"
            path.write_bytes(changed_bytes(rng, templates.weights.read_bytes()))
        case 1:
            path = folder / "a.safetensors"
            header = changed_value(rng, json.loads(card().as_json()))
            path.write_bytes(save(state, metadata={"xmoco": _dumped(header)}))
        case 2:
            path = folder / "a.pth"
            torch.save(state, path, _use_new_zipfile_serialization=rng.random() < 0.7)
            path.write_bytes(changed_bytes(rng, path.read_bytes()))
        case 3:
            path = folder / "a.pth"
            torch.save(_other_state(rng, state), path)
        case _:
            path = folder / "a.ckpt"
            newest = sorted((templates.run / "checkpoints").glob("*.ckpt"))[-1]
            content = torch.load(newest, weights_only=True)
            torch.save(_other_state(rng, content), path)
    return lambda: load_weights(path)


def _dumped(content: Any) -> str:
    try:
        return json.dumps(content)
    except (ValueError, RecursionError):
        return "[" * 2000


class _Harm:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


def _other_state(rng: random.Random, state: dict[str, Any]) -> Any:
    """Tensors and values of a checkpoint, a few of them others."""
    state = dict(state)
    for _ in range(rng.choice((1, 1, 2, 4))):
        holder: Any = state
        while isinstance(holder, dict) and holder:
            key = rng.choice(list(holder))
            if not isinstance(holder[key], dict) or rng.random() < 0.3:
                break
            holder[key] = dict(holder[key])
            holder = holder[key]
        if not isinstance(holder, dict) or not holder:
            return state
        other: Any
        match rng.randrange(8):
            case 0:
                other = any_value(rng)
            case 1:
                other = torch.zeros(rng.choice(((), (0,), (3,), (1, 2, 3), (2, 3, 3, 3))))
            case 2:
                other = torch.eye(3).to_sparse()
            case 3:
                other = torch.empty(3, device="meta")
            case 4:
                other = torch.zeros(1).expand(rng.choice((10, 10**9)))
            case 5:
                other = _Harm()
            case 6:
                other = state
            case _:
                other = torch.full((3,), rng.choice((float("nan"), float("inf"))))
        if rng.random() < 0.2:
            del holder[key]
        elif rng.random() < 0.2:
            holder[rng.choice((*TEXTS, 3, None, (1, 2)))] = holder.pop(key)
        else:
            holder[key] = other
    return state


def resumed_runs(rng: random.Random, folder: Path, templates: Templates) -> Action:
    """A run folder in which something is not as it was left."""
    run = folder / "out" / "run"
    shutil.copytree(templates.run, run)
    saved = sorted((run / "checkpoints").glob("*.ckpt"))
    if rng.random() < 0.7:
        saved[-1].unlink()  # so that a step or two are left
        saved.pop()
    others = [text.encode(errors="replace") for text in TEXTS]
    match rng.randrange(6):
        case 0 | 1:
            content = torch.load(saved[-1], weights_only=True)
            torch.save(_other_state(rng, content), saved[-1])
        case 2:
            saved[-1].write_bytes(changed_bytes(rng, saved[-1].read_bytes()))
        case 3:
            metrics = run / "metrics.jsonl"
            lines = [json.loads(line) for line in metrics.read_text().splitlines()]
            changed = [changed_value(rng, line) for line in lines]
            metrics.write_text("".join(_dumped(line) + "\n" for line in changed))
        case 4:
            file = run / rng.choice(("config.yaml", "environment.json", "metrics.jsonl"))
            file.write_bytes(changed_bytes(rng, file.read_bytes(), others))
        case _:
            file = run / "environment.json"
            file.write_text(_dumped(changed_value(rng, json.loads(file.read_text()))))

    def act() -> None:
        with no_pictures(), patch("xmoco.fabric.Fabric.launch", _launch_alone):
            command("pretrain", "--resume", "--out", run)

    return act


EXTREMES = (
    *(0, 1, 2, 3, 5, 17, 100, 10**5, 2**31, 2**40, 2**53),
    *(1e-30, 1e-3, 0.1, 0.5, 1.0, 1.5, 1e3, 1e9, True, False),
    *([0.001, 0.001], [0.1, 1.0], [0.5, 1000.0], [1e-6, 1e-6, 1e-6], [0.0, 50.0, 0.5]),
)
APART = {
    *("source", "root", "device", "devices", "nodes"),  # of which other cases are
    # What is asked for takes so long, or so much memory.
    *("epochs", "local_crops", "readers", "size", "local_size", "eval_size", "feature_size"),
}


def odd_runs(rng: random.Random, folder: Path, templates: Templates) -> Action:
    """Settings that are right by themselves, taken at their word: a run of three steps."""
    settings = quick_recipe(templates.pictures)
    settings["train"]["epochs"] = 1
    settings["method"] = {"name": rng.choice(sorted(KINDS_OF["method"]))}
    settings["optim"] = {"name": rng.choice(("sgd", *KINDS_OF["optim"]))}
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    fields = [(section, name) for section, name in all_fields() if name not in APART]
    asked: list[str] = []
    wanted = rng.choice((1, 2, 2, 3, 5))
    for _ in range(200):
        section, name = rng.choice(fields)
        annotation = all_fields()[section, name].annotation
        literals = [value for value in get_args(annotation) if isinstance(value, str)]
        value = rng.choice(literals) if literals else rng.choice(EXTREMES)
        with contextlib.suppress(UserError):
            load_config(recipe, [*asked, f"{section}.{name}={value}"])
            asked.append(f"{section}.{name}={value}")
        if len(asked) == wanted:
            break

    def act() -> None:
        with no_pictures(), patch("xmoco.fabric.Fabric.launch", _launch_alone):
            command("pretrain", "--recipe", recipe, "--out", folder / "out" / "run", *asked)

    return act


def caches(rng: random.Random, folder: Path, _: Templates) -> Action:
    backbone = build_backbone("tiny", "cifar").eval()
    pixels = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    found = ArrayImages("zeros", pixels, torch.zeros(4, dtype=torch.int64), ("a",))
    cache = folder / "out"
    said: list[str] = []

    def look() -> None:
        features = cached_features(
            backbone,
            found,
            InputConfig(size=8),
            torch.device("cpu"),
            readers=1,
            folder=cache,
            say=said.append,
        )
        assert features.vectors.shape[0] == 4

    look()
    (file,) = cache.glob("*.safetensors")
    content = file.read_bytes()
    if rng.random() < 0.3:
        length = int.from_bytes(content[:8], "little")
        header = changed_value(rng, json.loads(content[8 : 8 + length]))
        text = _dumped(header).encode()
        content = len(text).to_bytes(8, "little") + text + content[8 + length :]
        file.write_bytes(content)
    else:
        file.write_bytes(changed_bytes(rng, content))
    return look


def records(rng: random.Random, folder: Path, _: Templates) -> Action:
    protocol = {
        **{"data": "photos (test)", "backbone": "resnet50", "digest": "0a1b", "epoch": 2},
        **{"size": 32, "judged_images": 10, "split": "test", "k": 20, "temperature": 0.1},
        **{"bank_images": 20, "name": "transfer, frozen", "set": "Pets", "metric": "top-1"},
        **{"label_fraction": 0.5, "crop_size": 32, "labelled": False},
    }
    measure = rng.choice(("knn_top1", "linear_top1", "transfer_frozen", "transfer_end_to_end"))
    record = Record(measure, 50.0, "%", "xmoco", "work", protocol, 0)
    line = record.json()
    changed = _dumped(changed_value(rng, json.loads(line)))
    text = f"{line}\n{changed}\n".encode(errors="surrogatepass")
    if rng.random() < 0.3:
        text = changed_bytes(rng, text)
    file = folder / "records.jsonl"
    file.write_bytes(text)

    def act() -> None:
        if rng.random() < 0.1 and measure.startswith("transfer"):
            draw_transfer([file], folder / "out" / "tables")
        elif rng.random() < 0.1:
            command("tables", "transfer", file, "--out", folder / "out" / "tables")
        else:
            kind = KnnProtocol if measure == "knn_top1" else ClassifierProtocol
            read_records(file, Measured[kind], (measure,))  # type: ignore[valid-type]

    return act


def reports(rng: random.Random, folder: Path, templates: Templates) -> Action:
    run = folder / "out"
    run.mkdir(exist_ok=True)
    for name in ("config.yaml", "environment.json", "metrics.jsonl"):
        content = (templates.run / name).read_bytes()
        if rng.random() < 0.5:
            if name == "metrics.jsonl" and rng.random() < 0.7:
                lines = [changed_value(rng, json.loads(line)) for line in content.splitlines()]
                content = "".join(_dumped(line) + "\n" for line in lines).encode()
            elif name == "environment.json" and rng.random() < 0.7:
                content = _dumped(changed_value(rng, json.loads(content))).encode()
            else:
                content = changed_bytes(rng, content)
        (run / name).write_bytes(content)
    drawn = rng.random() < 0.04

    def act() -> None:
        panels(read_history(run))
        if drawn:
            write_report(run, views_png=None, neighbours_png=None, summary={})

    return act


def zipped_weights(rng: random.Random, folder: Path, templates: Templates) -> Action:
    """The archive that torch writes, packed in other ways."""
    newest = sorted((templates.run / "checkpoints").glob("*.ckpt"))[-1]
    path = folder / "a.pth"
    with (
        zipfile.ZipFile(newest) as good,
        zipfile.ZipFile(path, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as other,
    ):
        for part in good.infolist():
            if rng.random() < 0.05:
                continue
            content = good.read(part)
            if rng.random() < 0.2:
                content = changed_bytes(rng, content)
            name = part.filename if rng.random() < 0.95 else repr(rng.choice(TEXTS))
            other.writestr(name, content)
    return lambda: load_weights(path)


KINDS: dict[str, tuple[Callable[[random.Random, Path, Templates], Action], int]] = {
    "recipes": (recipes, 1500),
    "settings": (settings, 1200),
    "command lines": (command_lines, 1500),
    "images": (images, 2500),
    "archives": (archives, 1200),
    "shards": (shards, 400),
    "label files": (label_files, 500),
    "folders": (folders, 400),
    "boxes": (boxes, 500),
    "weights": (weights, 900),
    "zipped weights": (zipped_weights, 200),
    "resumed runs": (resumed_runs, 250),
    "odd runs": (odd_runs, 250),
    "caches": (caches, 250),
    "records": (records, 900),
    "reports": (reports, 400),
}
"""Of each kind, the function and how many cases there are."""
