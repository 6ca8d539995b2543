"""``xmoco embed``: pictures in; what the backbone sees in each of them out, as a vector."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from xmoco.evaluate.evaluation import EvalOptions, Evaluation, Listener
from xmoco.files import write_whole
from xmoco.pictures import show_pictures


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
    evaluation = Evaluation.open(weights, options, listener)
    report = evaluation.weights.report
    if report.format != "xmoco" and report.loaded:  # as evaluations do beside their results
        evaluation.listener.say(f"{weights}: {replace(report, notes=())}.")  # those are said
    names, vectors = show_pictures(
        evaluation.weights.backbone,
        images,
        evaluation.input,
        evaluation.device,
        readers=options.readers,
        listener=evaluation.listener,
    )
    return Embedded(names, vectors.numpy())


def how_to_load(path: Path) -> str:
    return (
        "import numpy as np\n"
        f"file = np.load({str(path)!r})\n"
        'names, features = file["names"], file["features"]'
    )
