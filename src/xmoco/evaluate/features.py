"""Features of whole image sets from a frozen backbone: what every frozen judge looks at.

They are float32 and as the backbone gives them; who wants unit length (kNN) or equal scales (a
classifier) sees to it. Room for all of them is taken once: on the device where they are few, in
host memory where they are many (those of ImageNet take 10 GB).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xmoco.config import InputConfig
from xmoco.data import Batch, ImageSet, Unreadable, in_order
from xmoco.data.batches import Progress
from xmoco.data.imagesets import ArrayImages, RaggedImages
from xmoco.data.unreadable import allowed
from xmoco.data.views import central
from xmoco.distributed import gather_parts, own_part, processes, share_buffers

BATCH = 256
ON_DEVICE = 2 * 2**30
"""Features of up to this many bytes are kept on the device."""
FEW = 100_000
"""Images to which cuDNN's search for the best algorithms does not pay."""


def left_out_of(images: ImageSet) -> Unreadable:
    """Notes images that cannot be read and do not count: another in its place would be judged
    twice and, where every image is judged by all the others, by itself. There may be as many as
    are replaced in training."""
    return Unreadable(len(images), left_out=True, most=allowed(len(images)))


def unreadable_fact(images: int, used: int) -> dict[str, int]:
    """What a protocol says of images that could not be read; nothing where all could."""
    return {"unreadable": images - used} if used < images else {}


class Features(NamedTuple):
    """What was seen of a set, in its order."""

    vectors: Tensor
    """float32 (n, d), as the backbone gives them; on the device or, where large, on the CPU."""
    labels: Tensor | None
    """int64 (n,) or, with several labels per image, bool (n, classes), on the CPU. Those of the
    images really seen: an unreadable one is replaced by the next, which may be of another class,
    unless such are left out."""
    places: Tensor
    """int64 (n,), on the CPU: where in the set they stand. All but those left out."""


def backbone_features(
    backbone: nn.Module,
    images: ImageSet,
    input: InputConfig,
    device: torch.device,
    readers: int = 8,
    *,
    border: bool = True,
    together: bool = False,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> Features:
    """Features of the central views, the backbone in eval mode.

    With a ``border`` the central view leaves one out, as is usual for ImageNet; without, it is as
    large as the image allows (see ``central``). The backbone is left in the mode it was found in.
    ``together``, each process looks at a part of the images, with the first one's running
    statistics, and gets the features of all. Where ``unreadable`` says that images are left out,
    they have no features.
    """

    def see(batch: Batch) -> Tensor:
        pixels = central(batch.images, batch.sizes, input.central_size, input, border=border)
        features: Tensor = backbone(pixels.contiguous(memory_format=torch.channels_last))
        return features

    if together:
        share_buffers(backbone)
    was_training = backbone.training
    backbone.eval()
    try:
        return _features(see, images, device, readers, together, unreadable, on_progress)
    finally:
        backbone.train(was_training)


def pixel_features(
    images: ImageSet,
    input: InputConfig,
    device: torch.device,
    readers: int = 8,
    *,
    together: bool = False,
    unreadable: Unreadable | None = None,
) -> Features:
    """Raw pixels of small central views: what no learning at all gives."""
    side = pixel_side(input)

    def see(batch: Batch) -> Tensor:
        return central(batch.images, batch.sizes, side, input).flatten(1)

    return _features(see, images, device, readers, together, unreadable)


def pixel_side(input: InputConfig) -> int:
    """Of the views whose pixels are taken: 32 px at most."""
    return min(input.central_size, 32)


def home(images: int, size: int, device: torch.device) -> torch.device:
    """Where the features of so many images live: on the device, if that leaves room for others."""
    return device if 4 * images * size <= ON_DEVICE else torch.device("cpu")


@contextmanager
def cudnn_search_where_it_pays(images: int) -> Iterator[None]:
    """For few images, cuDNN takes the algorithms it thinks best, and keeps to them for batches of
    that shape and precision. To try them all, as it does for training, takes seconds for every
    shape, that of a set's last batch included: longer than to look at some thousand images."""
    searched = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = searched and images > FEW
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = searched


@torch.no_grad()
def _features(
    see: Callable[[Batch], Tensor],
    images: ImageSet,
    device: torch.device,
    readers: int,
    together: bool,
    unreadable: Unreadable | None = None,
    on_progress: Progress | None = None,
) -> Features:
    vectors, labels, done = None, [], 0
    together = together and len(images) >= processes()  # or some would have nothing to see
    part = own_part(len(images)) if together else range(len(images))
    batches = in_order(images, BATCH, device, part=part, readers=readers, unreadable=unreadable)
    with closing(batches), cudnn_search_where_it_pays(len(part)):
        for batch in batches:
            seen = see(batch)
            if vectors is None:  # only now the size of a feature is known
                place = home(len(images), seen.shape[1], device)
                vectors = torch.empty(len(part), seen.shape[1], device=place)
            vectors[done : done + len(seen)] = seen
            if batch.labels is not None:
                labels.append(batch.labels)
            done += len(seen)
            if on_progress is not None:
                on_progress(done, len(part))
    assert vectors is not None, "a set without images is refused when it is opened"
    known = torch.cat(labels) if labels else None
    leaves_out = unreadable is not None and unreadable.left_out
    shown = _shown(images, unreadable or ())[part.start : part.stop] if leaves_out else None
    if together:
        vectors = gather_parts(vectors, len(images), device)
        known = None if known is None else gather_parts(known, len(images), device)
        shown = None if shown is None else gather_parts(shown, len(images), device)
    places = torch.arange(len(images)) if shown is None else _first_of_each(shown)
    if len(places) < len(images):
        vectors = vectors[places.to(vectors.device)]
        known = None if known is None else known[places]
    return Features(vectors, known, places)


def places_seen(images: ImageSet, unreadable: Iterable[tuple[str, str]]) -> Tensor:
    """Where in the set each image that can be read stands: once, also where a set that is decoded
    already has one in another's place, too."""
    return _first_of_each(_shown(images, unreadable))


def _shown(images: ImageSet, unreadable: Iterable[tuple[str, str]]) -> Tensor:
    """Which image stands at each place; -1 where none does."""
    if isinstance(images, ArrayImages | RaggedImages):
        return images.shown
    shown = torch.arange(len(images))
    gone = dict(unreadable)
    if gone:  # names are asked for only then: there may be millions
        shown[[place for place in range(len(images)) if images.where(place) in gone]] = -1
    return shown


def _first_of_each(shown: Tensor) -> Tensor:
    first: dict[int, int] = {}
    for place, image in enumerate(shown.tolist()):
        if image >= 0:
            first.setdefault(image, place)
    return torch.tensor([*first.values()], dtype=torch.int64)
