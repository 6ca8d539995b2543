"""YOLO's text files: a line for every object, in shares of the image's width and height.

A line is ``class x y width height``, of which x and y are the centre; or ``class x y x y …``, a
polygon. A yaml file names the classes and the folders of images; labels lie in folders beside them,
called ``labels`` where the images' are called ``images``. An image without a file has no objects.
"""

from collections.abc import Iterator, Mapping
from posixpath import dirname, join, normpath
from typing import Any

import numpy as np

from xmoco.data.decode import exif_orientation, open_image
from xmoco.data.imagesets import EncodedImages
from xmoco.data.trees import Tree
from xmoco.detect.masks import runs_of_polygons
from xmoco.detect.objects import Annotation, DetectionSet, collected
from xmoco.errors import UserError
from xmoco.settings import read_yaml
from xmoco.text import printable

TURNED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
TEST_KEYS = ("val", "valid", "test")


def yolo_file(tree: Tree) -> str | None:
    """The yaml file that describes a set for YOLO, if there is one."""
    for path in sorted(tree.files(("yaml", "yml")), key=lambda path: (path.count("/"), path)):
        if describes_yolo(tree, path):
            return path
    return None


def describes_yolo(tree: Tree, path: str) -> bool:
    return {"names", "train"} <= _yaml(tree, path).keys()


def read_yolo(
    tree: Tree, path: str, name: str, short_side: int | None
) -> tuple[DetectionSet, DetectionSet]:
    content, where = _yaml(tree, path), tree.where(path)
    names = content["names"]
    classes = [*names.values()] if isinstance(names, dict) else names
    if not isinstance(classes, list) or not classes:
        raise UserError(f"{where} names no classes.")
    if isinstance(names, dict) and [*names] != list(range(len(names))):
        raise UserError(f"{where} must number its classes 0, 1, 2 …, and has {[*names]}.")
    if content.get("nc", len(classes)) != len(classes):
        raise UserError(f"{where} has nc: {content['nc']}, but names {len(classes)} classes.")
    test_key = next((key for key in TEST_KEYS if content.get(key)), None)
    if test_key is None:
        raise UserError(f"{where} has no val: images that a detector is judged by.")
    top = join(dirname(path), str(content.get("path") or ""))
    train, test = (
        _split(tree, top, content[key], f"{name} ({key})", classes, short_side, where)
        for key in ("train", test_key)
    )
    return train, test


def _yaml(tree: Tree, path: str) -> Mapping[str, Any]:
    try:
        content = read_yaml(tree.read(path).decode(), path)
    except (UserError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _split(
    tree: Tree,
    top: str,
    told: object,
    name: str,
    classes: list[object],
    short_side: int | None,
    where: str,
) -> DetectionSet:
    # Exported sets often tell ../train/images of a yaml file that lies beside train.
    inside = [normpath(join(base, str(told))).removeprefix("../") for base in (top, dirname(top))]
    images = tree.images()
    paths = next(
        (found for folder in inside if (found := [p for p in images if _within(p, folder)])), []
    )
    if not paths:
        raise UserError(f"there are no images in {printable(str(told))}, which {where} names.")
    sizes = np.array([_size(tree, path) for path in paths])
    annotations = (
        annotation
        for image, path in enumerate(paths)
        for annotation in _annotations(tree, path, image, sizes[image], len(classes))
    )
    objects, dropped = collected(annotations, sizes)
    return DetectionSet(
        EncodedImages(name, tree, paths, None, None, short_side),
        sizes,
        objects,
        tuple(printable(str(one)) for one in classes),
        "coco",
        dropped,
    )


def _within(path: str, folder: str) -> bool:
    return folder in ("", ".") or path.startswith(f"{folder}/")


def _size(tree: Tree, path: str) -> tuple[int, int]:
    """Height and width, as a viewer shows the image."""
    try:
        with open_image(tree.read(path)) as image:
            width, height = image.size
            return (width, height) if exif_orientation(image) in TURNED else (height, width)
    except Exception as error:  # decoders raise anything on broken data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise UserError(f"{tree.where(path)} cannot be read ({reason}).") from None


def _annotations(
    tree: Tree, path: str, image: int, size: Any, classes: int
) -> Iterator[Annotation]:
    folder, slash, file = path.rpartition("/")
    before, _, after = f"/{folder}/".rpartition("/images/")
    labels = f"{before}/labels/{after}".strip("/") if "/images/" in f"/{folder}/" else folder
    text_file = f"{labels}{slash}{file.rpartition('.')[0]}.txt"
    if not tree.holds(text_file):
        return
    height, width = map(int, size)
    lines = tree.read(text_file).decode(errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        this = f"line {number} of {tree.where(text_file)}"
        try:
            label, *numbers = map(float, line.split())
        except ValueError:
            raise UserError(f"{this} must be numbers only, and is {printable(line)!r}.") from None
        if label not in range(classes):
            known = "only class 0" if classes == 1 else f"only classes 0 to {classes - 1}"
            raise UserError(f"{this} has class {label:g}, but the yaml file names {known}.")
        if len(numbers) == 4:
            x, y, wide, high = numbers
            box = (x - wide / 2, y - high / 2, x + wide / 2, y + high / 2)
            mask = None
        elif len(numbers) >= 6 and len(numbers) % 2 == 0:
            xs, ys = numbers[0::2], numbers[1::2]
            box = (min(xs), min(ys), max(xs), max(ys))
            points = np.array(numbers).reshape(-1, 2) * (width, height)
            mask = runs_of_polygons([points.ravel().tolist()], height, width)
        else:
            raise UserError(
                f"{this} must have 5 numbers, or a class and a polygon, and has {len(numbers) + 1}."
            )
        left, top, right, bottom = box
        pixels = (left * width, top * height, right * width, bottom * height)
        yield Annotation(this, image, pixels, int(label), mask=mask)
