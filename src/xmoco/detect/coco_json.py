"""COCO's json: images, categories and annotations with boxes and, perhaps, polygons or RLE."""

import json
from collections.abc import Iterator, Mapping
from posixpath import dirname, join, normpath
from typing import Any

import numpy as np

from xmoco.data.imagesets import EncodedImages
from xmoco.data.trees import Tree
from xmoco.detect.masks import runs_of_polygons, runs_of_text
from xmoco.detect.objects import (
    Annotation,
    DetectionSet,
    Integers,
    Runs,
    checked_side,
    collected,
    some_of,
)
from xmoco.errors import UserError
from xmoco.text import printable

LARGEST_JSON = 2**32
"""Bytes: the boxes and masks of COCO take 450 MB."""
PARTS = ("images", "annotations", "categories")


def read_coco(
    tree: Tree,
    path: str,
    name: str,
    short_side: int | None,
    categories: tuple[str, ...] | None = None,
) -> DetectionSet:
    """What the file at ``path`` tells; ``categories`` are those of the training images, if it is
    about others."""
    where = tree.where(path)
    content = _read(tree, path, where)
    own = {_number(c, "id", where): str(c.get("name", c["id"])) for c in content["categories"]}
    if not own:
        raise UserError(f"{where} has no categories.")
    known = tuple(printable(name) for name in own.values()) if categories is None else categories
    unknown = [name for name in map(printable, own.values()) if name not in known]
    if unknown:
        raise UserError(
            f"{where} has categories that the training images do not have: {some_of(unknown)}."
        )
    label = {number: known.index(printable(name)) for number, name in own.items()}
    entries = sorted(content["images"], key=lambda entry: _number(entry, "id", where))
    images = {_number(entry, "id", where): place for place, entry in enumerate(entries)}
    if len(images) < len(entries):
        raise UserError(f"{where} has two images of the same id.")
    if not entries:
        raise UserError(f"{where} has no images.")
    paths = _image_paths(tree, path, [str(entry.get("file_name", "")) for entry in entries], where)
    sizes = np.array(
        [
            [
                checked_side(_number(entry, side, where), f"{where}: the {side} of {_short(entry)}")
                for side in ("height", "width")
            ]
            for entry in entries
        ]
    )
    objects, dropped = collected(_annotations(content, images, label, sizes, where), sizes)
    return DetectionSet(
        EncodedImages(name, tree, paths, None, None, short_side),
        sizes,
        objects,
        known,
        "coco",
        dropped,
    )


def _read(tree: Tree, path: str, where: str) -> Mapping[str, Any]:
    try:
        content = json.loads(tree.read(path, LARGEST_JSON))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not json ({error}).") from None
    for part in PARTS:
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise UserError(
                f"{where} is not COCO's json: it must have lists of {', '.join(PARTS)}."
            )
    found: Mapping[str, Any] = content
    return found


def _number(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{where}: {key} = {value!r} in {_short(entry)} must be a whole number.")
    return value


def _short(entry: Mapping[str, Any]) -> str:
    text = json.dumps(entry, default=str)
    return printable(text if len(text) <= 80 else f"{text[:77]}...")


def _image_paths(tree: Tree, path: str, files: list[str], where: str) -> list[str]:
    """Where the images are: beside the file or above it, or in a folder named as COCO does it."""
    there = set(tree.images())
    here = dirname(path)
    split = path.rpartition("/")[2].removesuffix(".json").rpartition("_")[2]  # train2017
    beside = (here, dirname(here))
    folders = [join(base, inner) for base in beside for inner in ("", split, "images")]
    folders += [join(base, "images", split) for base in beside]
    found = {
        folder: [normpath(join(folder, file)) for file in files]
        for folder in dict.fromkeys(folders)
    }
    best = max(found.values(), key=lambda paths: sum(path in there for path in paths))
    missing = [printable(path) for path in best if path not in there]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(files)} images that {where} names are not there: "
            f"{some_of(missing)}."
        )
    return best


def _annotations(
    content: Mapping[str, Any],
    images: Mapping[int, int],
    label: Mapping[int, int],
    sizes: Integers,
    where: str,
) -> Iterator[Annotation]:
    for entry in content["annotations"]:
        this = f"annotation {entry.get('id', _short(entry))} of {where}"
        image = images.get(_number(entry, "image_id", where))
        if image is None:
            raise UserError(f"{this} is about image {entry['image_id']}, which is not there.")
        category = label.get(_number(entry, "category_id", where))
        if category is None:
            raise UserError(
                f"{this} has category {entry['category_id']}, which is not among the categories."
            )
        try:
            x, y, wide, high = map(float, entry["bbox"])
        except (LookupError, TypeError, ValueError):
            told = entry.get("bbox")
            raise UserError(f"{this} must have a bbox of four numbers, and has {told!r}.") from None
        area = entry.get("area")
        height, width = map(int, sizes[image])
        yield Annotation(
            this,
            image,
            (x, y, x + wide, y + high),
            category,
            ignored=bool(entry.get("iscrowd", 0)),
            area=float(area) if isinstance(area, int | float) else None,
            mask=_mask(entry.get("segmentation"), height, width, this),
        )


def _mask(told: Any, height: int, width: int, this: str) -> Runs | None:
    """Of polygons, or of run lengths, packed in a text or not."""
    try:
        match told:
            case None | []:
                return None
            case [*polygons]:
                drawable = [polygon for polygon in polygons if len(polygon) >= 6]
                return runs_of_polygons(drawable, height, width) if drawable else None
            case {"size": [int() as high, int() as wide], "counts": counts}:
                if (high, wide) != (height, width):
                    raise UserError(
                        f"the mask of {this} is of {wide} × {high} pixels, but its image of "
                        f"{width} × {height}."
                    )
                runs = (
                    np.array(counts, dtype=np.int64)
                    if isinstance(counts, list)
                    else runs_of_text(counts)
                )
                if runs.min(initial=0) < 0 or runs.sum() != height * width:
                    raise ValueError(f"its runs are not of {width} × {height} pixels")
                return runs
        raise ValueError("it is neither polygons nor run lengths")
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"the mask of {this} cannot be read: {error}.") from None
