"""``xmoco embed``: pictures in; what the backbone sees in each of them out, as a vector."""

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from xmoco.data import Unreadable
from xmoco.data.sources import all_pictures
from xmoco.errors import UserError
from xmoco.evaluate.evaluation import EvalOptions, Evaluation, Listener, expect_numbers
from xmoco.evaluate.features import backbone_features
from xmoco.files import write_whole


@dataclass(frozen=True)
class Embedded:
    """Pictures and their vectors, in the same order."""

    names: list[str]
    """Their paths in the folder or the archive."""
    features: NDArray[np.float32]
    """(pictures, size of a feature), as the backbone gives them: not of unit length."""

    def save(self, path: str | Path) -> None:
        """As a file of numpy: ``np.load(path)["names"]`` and ``["features"]``."""

        def write(file: BinaryIO) -> None:
            np.savez(file, names=np.array(self.names), features=self.features)

        write_whole(Path(path), write)


def embed(
    weights: str | Path,
    images: str | Path,
    *,
    options: EvalOptions | None = None,
    listener: Listener | None = None,
) -> Embedded:
    """The features of a picture, or of all in a folder of any depth or an archive.

    Pictures are shown to the backbone as in evaluations: resized, cropped in the middle and
    normalised. One that cannot be read is left out, and the listener told.

    Example::

        found = xmoco.embed("runs/photos", "holiday/")
        features = found.features / np.linalg.norm(found.features, axis=1, keepdims=True)
        similarities = features @ features.T
    """
    options = options or EvalOptions()
    options.expect_one_process("embed")
    pictures, paths = all_pictures(images)
    evaluation = Evaluation.open(weights, options, listener)
    broken = Unreadable(len(pictures))
    features = backbone_features(
        evaluation.weights.backbone,
        pictures,
        evaluation.input,
        evaluation.device,
        readers=options.readers,
        unreadable=broken,
        on_progress=evaluation.on_progress("pictures"),
    )
    expect_numbers(features)
    left_out = dict(broken)
    for where, why in left_out.items():
        evaluation.listener.say(f"{where} cannot be read ({why}); it was left out.")
    # Each has the features of another picture.
    seen = [place for place in range(len(paths)) if pictures.where(place) not in left_out]
    vectors = features.vectors.cpu()[torch.tensor(seen)]
    return Embedded([paths[place] for place in seen], vectors.numpy())


def free_place(out: Path) -> Path:
    """A file that can be written, found out before anything is looked at."""
    if out.exists():
        raise UserError(f"{out} already exists: remove it or name another file with --out.")
    if out.suffix != ".npz":  # numpy's own functions would add it
        raise UserError(f"{out} must end in .npz, as it is a file of numpy.")
    if not out.absolute().parent.is_dir():
        raise UserError(f"there is no folder {out.absolute().parent} for {out.name}.")
    return out


def how_to_load(path: Path) -> str:
    return (
        "import numpy as np\n"
        f"file = np.load({str(path)!r})\n"
        'names, features = file["names"], file["features"]'
    )
