"""Images on disk become batches on the device, and batches become views.

``sources`` finds the images (a folder, a tar archive, a torchvision set, the embedded patterns) and
``decode`` turns any of them into RGB; ``batches`` brings them to the device in an order that is a
function of seed and epoch; ``views`` crops and recolours whole batches there.
"""

from xmoco.data.batches import Batch, Batches, Unreadable, at_positions, epoch_order, in_order
from xmoco.data.decode import UnreadableImage, decode_rgb
from xmoco.data.sources import ArrayImages, ImageSet, open_images

__all__ = [
    "ArrayImages",
    "Batch",
    "Batches",
    "ImageSet",
    "Unreadable",
    "UnreadableImage",
    "at_positions",
    "decode_rgb",
    "epoch_order",
    "in_order",
    "open_images",
]
