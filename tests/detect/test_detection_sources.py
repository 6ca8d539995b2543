"""COCO's json, VOC's XML and YOLO's text are read alike, and every mistake in them is named."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scenes import write_scenes

from xmoco.detect.masks import bitmap_of_runs
from xmoco.detect.objects import DetectionSet
from xmoco.detect.sources import open_detection
from xmoco.errors import UserError

SQUARE = [4, 2, 8, 6]
TRIANGLE = [[4, 2, 12, 2, 4, 8]]


def picture(path: Path, size: tuple[int, int] = (20, 10), **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, "grey").save(path, **options)


def coco(folder: Path, annotations: list[dict[str, Any]] | None = None, **changes: Any) -> Path:
    """Two training images and one to be judged by; ``annotations`` are those of training."""
    if annotations is None:
        annotations = [{"image_id": 1, "category_id": 7, "bbox": SQUARE}]
    categories = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}]
    for split, ids in (("train", (1, 2)), ("val", (5,))):
        for number in ids:
            picture(folder / f"{split}2017" / f"{number}.png")
        own = (
            annotations if split == "train" else [{"image_id": 5, "category_id": 3, "bbox": SQUARE}]
        )
        content = {
            "images": [{"id": n, "file_name": f"{n}.png", "width": 20, "height": 10} for n in ids],
            "annotations": [{"id": n, **entry} for n, entry in enumerate(own, start=1)],
            "categories": categories,
        }
        content |= changes.get(split, {})
        file = folder / "annotations" / f"instances_{split}2017.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))
    return folder


def voc(folder: Path, year: str = "VOC2007", parts: tuple[str, ...] = ("trainval", "test")) -> Path:
    """One image in each part: a cat, and a dog that is difficult."""
    top = folder / year
    (top / "ImageSets" / "Main").mkdir(parents=True)
    (top / "Annotations").mkdir()
    for part in parts:
        stem = f"{year[3:]}_{part}"
        picture(top / "JPEGImages" / f"{stem}.jpg")
        objects = "".join(
            f"<object><name>{name}</name><difficult>{difficult}</difficult>"
            "<bndbox><xmin>5</xmin><ymin>3</ymin><xmax>12</xmax><ymax>8</ymax></bndbox>"
            "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part></object>"
            for name, difficult in (("cat", 0), ("dog", 1))
        )
        (top / "Annotations" / f"{stem}.xml").write_text(
            f"<annotation><filename>{stem}.jpg</filename><size><width>20</width>"
            f"<height>10</height><depth>3</depth></size>{objects}</annotation>"
        )
        (top / "ImageSets" / "Main" / f"{part}.txt").write_text(f"{stem}\n")
        (top / "ImageSets" / "Main" / f"cat_{part}.txt").write_text(f"{stem} 1\n")
    return folder


def yolo(folder: Path, lines: str = "1 0.4 0.5 0.4 0.6\n") -> Path:
    for split in ("train", "val"):
        picture(folder / "images" / split / "1.png")
        picture(folder / "images" / split / "2.png")  # has no objects
        labels = folder / "labels" / split
        labels.mkdir(parents=True)
        (labels / "1.txt").write_text(lines if split == "train" else "0 0.5 0.5 1 1\n")
    (folder / "data.yaml").write_text(
        "train: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n"
    )
    return folder


def told(found: DetectionSet) -> list[tuple[int, str, list[float]]]:
    return [
        (int(image), found.categories[label], box.tolist())
        for image, label, box in zip(
            found.objects.images, found.objects.labels, found.objects.boxes, strict=True
        )
    ]


def test_coco(tmp_path: Path) -> None:
    entries = [
        {"image_id": 2, "category_id": 3, "bbox": [0, 0, 2.5, 3], "iscrowd": 1, "area": 4.5},
        {"image_id": 1, "category_id": 7, "bbox": SQUARE},
        {"image_id": 2, "category_id": 7, "bbox": [1, 1, 2, 2]},
    ]
    train, val = open_detection(coco(tmp_path, entries))
    assert train.name == f"folder {tmp_path.name} (train)"
    assert train.categories == val.categories == ("cat", "dog")
    assert train.sizes.tolist() == [[10, 20]] * 2
    assert told(train) == [
        (0, "cat", [4, 2, 12, 8]),
        (1, "dog", [0, 0, 2.5, 3]),
        (1, "cat", [1, 1, 3, 3]),
    ]
    assert train.objects.ignored.tolist() == [False, True, False]
    assert train.objects.areas.tolist() == [48, 4.5, 4]
    assert train.objects.masks is None
    assert told(val) == [(0, "dog", [4, 2, 12, 8])]
    assert train.images.read(1).shape == (3, 10, 20)
    assert [told(train.to_learn_from())[i][1] for i in range(2)] == ["cat", "cat"]


def test_masks_of_coco(tmp_path: Path) -> None:
    column = {"size": [10, 20], "counts": [40, 10, 150]}
    entries = [
        {"image_id": 1, "category_id": 7, "bbox": SQUARE, "segmentation": segmentation}
        for segmentation in (TRIANGLE, column, {"size": [10, 20], "counts": "X1:f4"})
    ]
    train, _ = open_detection(coco(tmp_path, entries))
    assert train.objects.masks is not None
    triangle, plain, packed = (bitmap_of_runs(m, 10, 20) for m in train.objects.masks)
    assert 20 <= triangle.sum() <= 28
    assert triangle[2, 5]
    assert not triangle[7, 11]
    assert np.argwhere(plain.any(axis=0)).ravel().tolist() == [4]
    assert np.array_equal(plain, packed)


def test_only_images_with_objects_are_learnt_from(tmp_path: Path) -> None:
    train, _ = open_detection(coco(tmp_path, [{"image_id": 2, "category_id": 3, "bbox": SQUARE}]))
    learnt = train.to_learn_from()
    assert (len(train), len(learnt)) == (2, 1)
    assert told(learnt) == [(0, "dog", [4, 2, 12, 8])]
    assert learnt.images.where(0).endswith("2.png")
    assert learnt.digest() != train.digest()


def test_voc(tmp_path: Path) -> None:
    train, test = open_detection(voc(tmp_path))
    assert train.rules == test.rules == "voc"
    assert train.categories == ("cat", "dog")
    assert told(train) == [(0, "cat", [4, 2, 12, 8]), (0, "dog", [4, 2, 12, 8])]
    assert train.objects.ignored.tolist() == [False, True]
    assert len(train.to_learn_from().objects) == 2, "what is difficult is learnt from"
    assert test.images.where(0).endswith("2007_test.jpg")


def test_both_years_of_voc(tmp_path: Path) -> None:
    voc(voc(tmp_path), "VOC2012", ("trainval", "train", "val"))
    train, test = open_detection(tmp_path)
    names = [Path(train.images.where(place)).name for place in range(len(train))]
    assert names == ["2007_trainval.jpg", "2012_trainval.jpg"]
    assert len(test) == 1
    train, test = open_detection(tmp_path / "VOC2012")  # has no test
    assert Path(train.images.where(0)).name == "2012_train.jpg"
    assert Path(test.images.where(0)).name == "2012_val.jpg"


def test_yolo(tmp_path: Path) -> None:
    lines = "1 0.4 0.5 0.4 0.6\n\n0 0.2 0.2 0.6 0.2 0.2 0.8\n"
    train, val = open_detection(yolo(tmp_path, lines))
    assert train.categories == ("cat", "dog")
    assert len(train) == 2
    assert len(train.to_learn_from()) == 1
    boxes = [[4, 2, 12, 8], [4, 2, 12, 8]]
    np.testing.assert_allclose(train.objects.boxes, boxes, atol=1e-9)
    assert train.objects.labels.tolist() == [1, 0]
    assert train.objects.masks is None, "not every object has one"
    assert told(val) == [(0, "cat", [0, 0, 20, 10])]
    by_yaml, _ = open_detection(tmp_path / "data.yaml")
    assert told(by_yaml) == told(train)
    assert by_yaml.name == train.name


def test_yolo_polygons_and_other_layouts(tmp_path: Path) -> None:
    """As exports often have it: the yaml file tells of the folder above, images lie in splits."""
    for split in ("train", "valid"):
        # A phone's picture: stored on its side, shown upright.
        exif = Image.Exif()
        exif[0x0112] = 6
        picture(tmp_path / split / "images" / "1.jpg", (10, 20), exif=exif)
        (tmp_path / split / "labels").mkdir()
        (tmp_path / split / "labels" / "1.txt").write_text("0 0.2 0.2 0.6 0.2 0.2 0.8")
    (tmp_path / "data.yaml").write_text(
        "train: ../train/images\nval: ../valid/images\nnc: 1\nnames: ['cat']\n"
    )
    train, _ = open_detection(tmp_path)
    assert train.sizes.tolist() == [[10, 20]]
    assert train.objects.masks is not None
    assert 20 <= bitmap_of_runs(train.objects.masks[0], 10, 20).sum() <= 28


def test_archives(tmp_path: Path) -> None:
    write_scenes(tmp_path / "scenes")
    with tarfile.open(tmp_path / "scenes.tar.xz", "w:xz") as archive:
        archive.add(tmp_path / "scenes", "scenes")
    for split, other in zip(
        open_detection(tmp_path / "scenes"), open_detection(tmp_path / "scenes.tar.xz"), strict=True
    ):
        assert split.digest() == other.digest()
        assert (split.images.read(1) == other.images.read(1)).all()
    assert other.name == "archive scenes.tar.xz (val)"


def test_large_images_are_shrunk_when_decoded(tmp_path: Path) -> None:
    train, _ = open_detection(coco(tmp_path), short_side=5)
    assert train.images.read(0).shape == (3, 5, 10)
    assert train.sizes[0].tolist() == [10, 20], "boxes are in pixels of the original"


def test_boxes_of_no_area_are_left_out_and_named(tmp_path: Path) -> None:
    boxes = [SQUARE, [4, 2, 0, 6], [4, 2, 8, -1], [20, 2, 8, 6], [-8, 2, 8, 6], [15, 5, 50, 50]]
    entries = [{"image_id": 1, "category_id": 7, "bbox": box} for box in boxes]
    train, _ = open_detection(coco(tmp_path, entries))
    assert train.objects.boxes.tolist() == [[4, 2, 12, 8], [15, 5, 65, 55]]
    assert [where.partition(" of ")[0] for where in train.dropped] == [
        f"annotation {number}" for number in (2, 3, 4, 5)
    ]


def annotated(**changes: Any) -> Callable[[Path], Path]:
    entry = {"image_id": 1, "category_id": 7, "bbox": SQUARE}
    return lambda path: coco(path, [entry | changes])


def without(name: str) -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        coco(path)
        (path / name).unlink()
        return path

    return make


def changed(make: Callable[[Path], Path], name: str, old: str, new: str) -> Callable[[Path], Path]:
    def written(path: Path) -> Path:
        make(path)
        text = (path / name).read_text()
        assert old in text
        (path / name).write_text(text.replace(old, new))
        return path

    return written


def empty(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


RLE = {"size": [10, 20], "counts": [40, 10, 150]}
MISTAKES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no annotations": (empty, "holds no annotations that are known"),
    "no validation file": (
        without("annotations/instances_val2017.json"),
        "no json file of validation images",
    ),
    "an image is missing": (
        without("train2017/2.png"),
        r"1 of 2 images that .*instances_train2017.json names are not there: train2017/2.png",
    ),
    "unknown category": (
        annotated(category_id=9),
        r"annotation 1 of .* has category 9, which is not among",
    ),
    "unknown image": (annotated(image_id=9), "annotation 1 of .* is about image 9"),
    "no box": (annotated(bbox=[1, 2]), r"must have a bbox of four numbers, and has \[1, 2\]"),
    "a box of no numbers": (annotated(bbox=[1, 2, 3, float("nan")]), "is not four numbers"),
    "a mask of another size": (
        annotated(segmentation=RLE | {"size": [20, 10]}),
        "the mask of annotation 1 of .* is of 10 × 20 pixels, but its image of 20 × 10",
    ),
    "a mask with too many pixels": (
        annotated(segmentation=RLE | {"counts": [40, 10, 151]}),
        "the mask of .* cannot be read: its runs are not of 20 × 10 pixels",
    ),
    "a mask of nonsense": (annotated(segmentation=RLE | {"counts": "~"}), "its text is damaged"),
    "a mask of another kind": (annotated(segmentation="cat"), "neither polygons nor run lengths"),
    "nothing to judge by": (
        lambda path: coco(path, val={"annotations": []}),
        "has no objects that a detector could be judged by",
    ),
    "no validation images": (
        lambda path: coco(path, val={"annotations": [], "images": []}),
        "instances_val2017.json has no images",
    ),
    "nothing to learn from": (lambda path: coco(path, []), "no image with an object to learn from"),
    "categories of validation only": (
        lambda path: coco(path, val={"categories": [{"id": 3, "name": "cow"}]}),
        "categories that the training images do not have: cow",
    ),
    "no categories": (lambda path: coco(path, train={"categories": []}), "has no categories"),
    "an id that is no number": (
        lambda path: coco(path, train={"categories": [{"id": "3"}]}),
        "id = '3' in .* must be a whole number",
    ),
    "an image of no height": (
        changed(coco, "annotations/instances_train2017.json", '"height": 10', '"height": 0'),
        "the height of .* cannot be 0 pixels: an image has 1 to 65,535",
    ),
    "VOC's huge image": (
        changed(voc, "VOC2007/Annotations/2007_test.xml", ">20<", ">1e30<"),
        r"the width in .*2007_test.xml cannot be 1e\+30 pixels",
    ),
    "two images of an id": (
        changed(coco, "annotations/instances_train2017.json", '"id": 2, "file', '"id": 1, "file'),
        "two images of the same id",
    ),
    "not COCO's json": (
        changed(coco, "annotations/instances_train2017.json", '"images"', '"pictures"'),
        "is not COCO's json",
    ),
    "no json at all": (
        changed(
            coco,
            "annotations/instances_train2017.json",
            "{",
            "",
        ),
        "is not json",
    ),
    "VOC without an image": (
        changed(voc, "VOC2007/Annotations/2007_test.xml", "2007_test.jpg", "gone.jpg"),
        r"1 of 1 images of .* \(test\) are not there: VOC2007/JPEGImages/gone.jpg",
    ),
    "VOC without a file": (
        changed(voc, "VOC2007/ImageSets/Main/test.txt", "2007_test", "other"),
        "other.xml is not there, though a list names its image",
    ),
    "VOC's unknown category": (
        changed(voc, "VOC2007/Annotations/2007_test.xml", ">dog<", ">dug<"),
        r"object 2 of .*2007_test.xml is a 'dug' \(did you mean dog\?\), which no training image",
    ),
    "VOC's broken file": (
        changed(voc, "VOC2007/Annotations/2007_test.xml", "</annotation>", ""),
        "2007_test.xml is not XML",
    ),
    "VOC's number": (
        changed(voc, "VOC2007/Annotations/2007_test.xml", ">3<", ">three<"),
        "bndbox/ymin must be a number, and is 'three'",
    ),
    "VOC's empty list": (
        changed(voc, "VOC2007/ImageSets/Main/test.txt", "2007_test", ""),
        "there are no test images",
    ),
    "YOLO's unknown class": (
        lambda path: yolo(path, "2 0.5 0.5 0.1 0.1"),
        "line 1 of .*1.txt has class 2, but the yaml file names only classes 0 to 1",
    ),
    "YOLO's short line": (
        lambda path: yolo(path, "\n1 0.5 0.5"),
        "line 2 of .*1.txt must have 5 numbers, or a class and a polygon, and has 3",
    ),
    "YOLO's words": (lambda path: yolo(path, "cat 0.5"), "must be numbers only"),
    "YOLO without images": (
        changed(yolo, "data.yaml", "images/val", "images/test"),
        "there are no images in images/test",
    ),
    "YOLO without validation": (changed(yolo, "data.yaml", "val: images/val", ""), "has no val"),
    "YOLO without classes": (changed(yolo, "data.yaml", "{0: cat, 1: dog}", "[]"), "no classes"),
    "YOLO's number of classes": (
        changed(yolo, "data.yaml", "names:", "nc: 3\nnames:"),
        "data.yaml has nc: 3, but names 2 classes",
    ),
    "YOLO's boxes in pixels": (
        lambda path: yolo(path, "1 40 50 4 6"),
        r"learn from: no box has an area inside its image, as that of line 1 of .*\.txt",
    ),
    "a yaml file of others": (
        lambda path: changed(yolo, "data.yaml", "names:", "classes:")(path) / "data.yaml",
        "data.yaml is no yaml file of YOLO, with names, train and val",
    ),
    "YOLO's gap": (
        changed(yolo, "data.yaml", "1: dog", "2: dog"),
        "must number its classes 0, 1, 2",
    ),
    "no folder": (lambda path: path / "nowhere", "there is no folder or archive"),
}


@pytest.mark.parametrize(("make", "sentence"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_named(make: Callable[[Path], Path], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{sentence}.*\.$") as error:
        open_detection(make(tmp_path))
    assert "\n" not in str(error.value)


def test_an_image_of_yolo_that_cannot_be_read(tmp_path: Path) -> None:
    (yolo(tmp_path) / "images" / "train" / "1.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"1.png cannot be read .*\.$"):
        open_detection(tmp_path)
