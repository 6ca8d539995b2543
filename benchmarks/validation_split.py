"""Carve validation images out of training images, to tune a recipe without the test images.

    python benchmarks/validation_split.py cifar10.tar.xz --out tuning.tar

The archive has train/ and val/, a folder for each class. Which images are held out is a fixed rule:
see ``xmoco.data.subset.held_out``. The test images of the original are not in it.
"""

import argparse
import io
import tarfile
from pathlib import Path

from PIL import Image

from xmoco.config import DataConfig
from xmoco.data import ImageSet, open_images
from xmoco.data.subset import held_out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", help="labelled images: a folder or an archive")
    parser.add_argument("--out", type=Path, required=True, help="the new .tar")
    parser.add_argument("--share", type=float, default=0.1, help="of every class, held out")
    options = parser.parse_args()
    images = open_images(DataConfig(source=options.data), "train")
    assert images is not None
    kept, held = held_out(images, options.share)
    with tarfile.open(options.out, "x") as archive:
        for split, part in (("train", kept), ("val", held)):
            write(archive, split, part)
            print(f"{split}: {len(part):,} images")


def write(archive: tarfile.TarFile, split: str, images: ImageSet) -> None:
    assert images.labels is not None
    assert images.classes is not None
    for index, label in enumerate(images.labels.tolist()):
        file = images.encoded(index)
        content, ending = (
            (encoded_png(images, index), "png") if file is None else (file.data, "jpg")
        )
        member = tarfile.TarInfo(f"{split}/{images.classes[label]}/{index:06d}.{ending}")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))


def encoded_png(images: ImageSet, index: int) -> bytes:
    content = io.BytesIO()
    Image.fromarray(images.read(index).permute(1, 2, 0).numpy()).save(content, format="png")
    return content.getvalue()


if __name__ == "__main__":
    main()
