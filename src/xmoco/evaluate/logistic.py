"""Logistic regression on frozen features, for the paper's frozen transfer.

    sum over samples of the cross entropy + strength / 2 · ‖W‖²

The intercept is not penalised: scikit-learn's objective with C = 1 / strength. Features are taken
as they are, on any device. Whole paths of strengths are wanted, down to very weak ones, and there
plain L-BFGS crawls: features are strongly correlated, so the loss is a long narrow valley. Three
things make it quick, and none changes the minimum:

- The problem is solved in whitened coordinates, where the features are uncorrelated with unit
  spread and the penalty is still diagonal (a rotation keeps ‖W‖, a stretch weighs each axis).
- The Hessian there is nearly diagonal: about the mean of p (1 - p) of the class, plus the penalty
  (Böhning 1992 bounds the first by a constant; where the fit starts, it is known). Every
  coefficient is stretched once more by the inverse root of it.
- Along a path, coefficients move almost in a straight line over log(strength), so each fit starts
  where the last two point.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from xmoco.errors import UserError

STRENGTHS = tuple(10 ** (-6 + 11 * step / 44) for step in range(45))

# scikit-learn's bounds: the largest component of the gradient of the mean loss, and the iterations.
# Here the gradient is the one in the stretched coordinates, whatever the unit of the features.
TOLERANCE = 1e-4
ITERATIONS = 100
# A single fit may begin far from its minimum, and is the one that is judged.
ITERATIONS_ALONE = 1000
# Axes along which the features vary less than this part of the largest variance are rounding.
LEAST_VARIANCE = 1e-11
# A class that is told apart perfectly has no curvature left to divide by.
LEAST_CURVATURE = 1e-6
# So strong a penalty leaves nothing of a weight, and float32 can still hold it.
LARGEST_PENALTY = 1e30
ROWS_AT_ONCE = 8192  # in float64


@dataclass(frozen=True)
class LinearModel:
    """One score per class: vectors @ weightᵀ + bias."""

    weight: Tensor  # (classes, dimensions)
    bias: Tensor  # (classes,)
    converged: bool = True  # whether the fit came to its end before the iterations did

    def scores(self, vectors: Tensor) -> Tensor:
        return F.linear(vectors.to(self.weight), self.weight, self.bias)


def fit(
    vectors: Tensor,
    labels: Tensor,
    classes: int,
    strength: float,
    start: LinearModel | None = None,
) -> LinearModel:
    """The penalised logistic regression of one strength, begun at ``start`` or at zero.

    ``labels`` are class numbers (n,) for the multinomial model, or zeros and ones (n, classes) for
    one independent model per class (one-vs-rest), all of them fitted at once. With two classes the
    multinomial model has two weights, and is scikit-learn's single one of half the strength.
    """
    problem, whitened = _pose(vectors, labels, classes)
    begin = whitened.zeros(classes) if start is None else whitened.coefficients(start)
    return whitened.model(*_minimise(problem, whitened.penalty(strength), begin, ITERATIONS_ALONE))


def fit_path(
    vectors: Tensor, labels: Tensor, classes: int, strengths: Sequence[float] = STRENGTHS
) -> Iterator[tuple[float, LinearModel]]:
    """Fits from the strongest to the weakest, each begun from those before. Labels as in fit."""
    problem, whitened = _pose(vectors, labels, classes)
    # A penalty without end leaves no weights, and shows no direction.
    before = last = (math.inf, whitened.zeros(classes))
    for strength in sorted(set(strengths), reverse=True):
        begin = _extrapolate(before, last, strength)
        found, converged = _minimise(problem, whitened.penalty(strength), begin, ITERATIONS)
        before, last = last, (strength, found)
        yield strength, whitened.model(found, converged)


def _extrapolate(
    before: tuple[float, Tensor], last: tuple[float, Tensor], strength: float
) -> Tensor:
    """Where the line through the last two fits, over log(strength), is at the next strength."""
    if math.isinf(before[0]):
        return last[1]
    steps = math.log(last[0] / strength) / math.log(before[0] / last[0])
    # It is trusted no further than it was seen.
    return last[1] + min(steps, 1) * (last[1] - before[1])


@dataclass(frozen=True)
class _Whitened:
    """Training vectors in uncorrelated coordinates of unit spread, and the way there and back.

    A last coordinate is 1 everywhere, so the intercept is one more coefficient. It is uncorrelated
    with the others too, as those have mean 0.
    """

    coordinates: Tensor  # (axes + 1, n): by axis, as products with it are fastest so on a CPU
    mean: Tensor  # (dimensions,); this and the following in float64
    axes: Tensor  # (dimensions, axes), orthonormal
    spread: Tensor  # (axes,), the standard deviation along each

    def zeros(self, classes: int) -> Tensor:
        return self.coordinates.new_zeros(classes, len(self.coordinates))

    def coefficients(self, model: LinearModel) -> Tensor:
        """(classes, axes + 1): what the model multiplies the coordinates with."""
        weight, bias = model.weight.to(self.axes), model.bias.to(self.axes)
        parts = [weight @ self.axes * self.spread, (bias + weight @ self.mean)[:, None]]
        return torch.cat(parts, dim=1).to(self.coordinates)

    def model(self, coefficients: Tensor, converged: bool) -> LinearModel:
        coefficients = coefficients.to(self.axes)
        weight = (coefficients[:, :-1] / self.spread) @ self.axes.T
        bias = coefficients[:, -1] - weight @ self.mean
        return LinearModel(weight.to(self.coordinates), bias.to(self.coordinates), converged)

    def penalty(self, strength: float) -> Tensor:
        """(axes + 1,): the strength on each coefficient, for the mean loss."""
        if not 0 < strength < math.inf:
            raise UserError(f"the strength of a penalty is a positive number, not {strength}.")
        samples = self.coordinates.shape[1]
        penalty = (strength / samples / self.spread.square()).clamp(max=LARGEST_PENALTY)
        return F.pad(penalty, (0, 1)).to(self.coordinates)


def _pose(vectors: Tensor, labels: Tensor, classes: int) -> tuple["_Problem", _Whitened]:
    targets = _targets(vectors, labels, classes)
    whitened = _whiten(vectors)
    return _Problem(whitened.coordinates, targets, exclusive=labels.ndim == 1), whitened


def _targets(vectors: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Labels as (classes, n) zeros and ones, after a look at everything that is handed in."""
    if vectors.ndim != 2 or vectors.numel() == 0:
        raise UserError(
            "logistic regression needs at least one vector of at least one dimension, as (images, "
            f"dimensions), not {tuple(vectors.shape)}."
        )
    if not bool(vectors.isfinite().all()):
        broken = int((~vectors.isfinite().all(dim=1)).sum())
        raise UserError(
            f"{broken} of {len(vectors)} feature vectors hold a value that is not a finite number; "
            "the weights that made them are damaged or the precision was too low."
        )
    labels = labels.to(vectors.device)
    if labels.shape not in {(len(vectors),), (len(vectors), classes)}:
        raise UserError(
            f"labels of shape {tuple(labels.shape)} do not fit {len(vectors)} vectors and "
            f"{classes} classes; right would be ({len(vectors)},) or ({len(vectors)}, {classes})."
        )
    if labels.ndim == 2:
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise UserError("labels with a column per class may only hold 0 and 1.")
        return labels.T.to(_working_type(vectors))
    if int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise UserError(
            f"labels go from {int(labels.min())} to {int(labels.max())}, but {classes} classes are "
            f"numbered 0 to {classes - 1}."
        )
    return F.one_hot(labels, classes).T.to(_working_type(vectors))


def _working_type(vectors: Tensor) -> torch.dtype:
    return torch.float64 if vectors.dtype == torch.float64 else torch.float32


def _whiten(vectors: Tensor) -> _Whitened:
    # The square of a small spread drowns in float32. MPS has no float64, but a CPU beside it.
    device = torch.device("cpu") if vectors.device.type == "mps" else vectors.device
    samples, dimensions = vectors.shape
    mean = torch.zeros(dimensions, dtype=torch.float64, device=device)
    for block in vectors.split(ROWS_AT_ONCE):
        mean += block.to(mean).sum(dim=0) / samples
    covariance = torch.zeros(dimensions, dimensions, dtype=torch.float64, device=device)
    for block in vectors.split(ROWS_AT_ONCE):
        centred = block.to(mean) - mean
        covariance.addmm_(centred.T, centred, alpha=1 / samples)
    variance, axes = torch.linalg.eigh(covariance)
    varies = variance > LEAST_VARIANCE * variance[-1]
    axes, spread = axes[:, varies], variance[varies].sqrt()
    coordinates = vectors.new_ones(len(spread) + 1, samples, dtype=_working_type(vectors))
    filled = coordinates[:-1].split(ROWS_AT_ONCE, dim=1)
    for part, block in zip(filled, vectors.split(ROWS_AT_ONCE), strict=True):
        part.copy_((axes / spread).T @ (block.to(mean) - mean).T)
    return _Whitened(coordinates, mean, axes, spread)


@dataclass(frozen=True)
class _Problem:
    coordinates: Tensor  # (axes + 1, n), whitened
    targets: Tensor  # (classes, n), zeros and ones
    exclusive: bool  # a sample has one class, so probabilities sum to 1

    def predict(self, coefficients: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities (classes, n), and the mean over samples of the cross entropy."""
        scores = coefficients @ self.coordinates
        if self.exclusive:
            logarithms = scores.log_softmax(dim=0)
            probabilities, gains = logarithms.exp(), logarithms * self.targets
        else:
            probabilities, gains = scores.sigmoid(), self.targets * scores - F.softplus(scores)
        # A line search compares sums that differ in the last digits of float32.
        exact = torch.float32 if gains.device.type == "mps" else torch.float64
        return probabilities, -gains.sum(dtype=exact) / scores.shape[1]

    def curvature(self, coefficients: Tensor) -> Tensor:
        """(classes, 1): of the mean cross entropy, along any coordinate on average."""
        probabilities, _ = self.predict(coefficients)
        curvature = (probabilities * (1 - probabilities)).mean(dim=1, keepdim=True)
        return curvature.clamp(min=LEAST_CURVATURE)


def _minimise(
    problem: _Problem, penalty: Tensor, found: Tensor, iterations: int
) -> tuple[Tensor, bool]:
    """The coefficients (classes, axes + 1) of least mean loss, by L-BFGS from those ``found``.

    And whether there were iterations enough to reach them.
    """
    left, converged = iterations, False
    curvature = problem.curvature(found)
    while left > 0 and not converged:
        found, used = _descend(problem, penalty, found, curvature, left)
        left -= used
        # Far from the start the test of convergence was made with a curvature much too high.
        assumed, curvature = curvature, problem.curvature(found)
        converged = left > 0 and bool((2 * curvature > assumed).all())
    return found, converged


def _descend(
    problem: _Problem, penalty: Tensor, start: Tensor, curvature: Tensor, iterations: int
) -> tuple[Tensor, int]:
    """L-BFGS on stretched coefficients; returns coefficients and the iterations it took, which are
    all only where it did not converge."""
    samples = problem.coordinates.shape[1]
    stretch = (curvature + penalty).rsqrt()
    decay = penalty * stretch.square()  # the penalty on stretched coefficients, from 0 to 1
    stretched = start / stretch

    def mean_loss() -> Tensor:
        probabilities, loss = problem.predict(stretched * stretch)
        slope = probabilities.sub_(problem.targets) @ problem.coordinates.T / samples
        stretched.grad = slope * stretch + decay * stretched
        return loss + (decay * stretched.square()).sum() / 2

    optimiser = torch.optim.LBFGS(
        [stretched],
        max_iter=iterations,
        max_eval=100 * iterations,  # lest they be the limit, and say nothing
        history_size=10,
        tolerance_grad=TOLERANCE,
        tolerance_change=TOLERANCE**2,
        line_search_fn="strong_wolfe",
    )
    optimiser.step(mean_loss)
    return stretched * stretch, optimiser.state[stretched]["n_iter"]
