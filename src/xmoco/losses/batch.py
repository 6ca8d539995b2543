"""XMoCo's ideas over the negatives of a batch, as a module for any training loop."""

from torch import Tensor

from xmoco.losses.contrast import checked_temperature
from xmoco.losses.cross_similarity import CrossSimilarity
from xmoco.losses.ntxent import batch_contrasts
from xmoco.losses.soft_labels import weighted_soft_labels


class BatchXMoCoLoss(CrossSimilarity):
    """NT-Xent, the loss of SimCLR, with soft labels and cross-similarity consistency.

    Call it with the unit-length features of both views (z_s, z_t). It remembers nothing. Inside
    DistributedDataParallel the views of all processes are candidates, with gradients through all.

    Example::

        criterion = BatchXMoCoLoss(temperature=0.5)
        loss, terms = criterion(z_s, z_t)
        loss.backward()

    Args:
        temperature: τ, divides similarities before the softmax.
        sharpness, positive_mass, iterations: of the soft labels, see ``SoftLabels``.
        label_weight: share of the soft labels, the rest being one-hot: at 0 they are NT-Xent's.
        consistency_weight: of the consistency terms; 0 leaves them out.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        sharpness: float = 2.0,
        positive_mass: float = 0.9,
        iterations: int = 3,
        label_weight: float = 1.0,
        consistency_weight: float = 1.0,
    ) -> None:
        # Tomorrow's batch has other negatives: there is no history, whose lengths these were.
        labels = weighted_soft_labels(
            label_weight, 0, 0, sharpness, positive_mass, iterations, "none"
        )
        super().__init__(labels, consistency_weight)
        self.temperature = checked_temperature(temperature)

    def forward(self, z_s: Tensor, z_t: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, a mean over the views of both sides as NT-Xent is, and its terms, each of one
        side; see ``compare``."""
        loss, terms = self.compare(*batch_contrasts(z_s, z_t, self.temperature))
        return loss / 2, terms
