"""The embedded set: reproducible, balanced, and honest (only geometry tells the classes apart)."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from xmoco.data.patterns import FAMILIES, _rank, patterns

CHANCE = 0.10


def grey(images: Tensor) -> Tensor:
    return images.float().mean(1) / 255


def score(classifier: object, describe: Callable[[Tensor], Tensor]) -> float:
    """Test accuracy of a classifier that sees only what ``describe`` says of an image."""
    (train, train_labels, _), (test, test_labels, _) = patterns("train"), patterns("test")
    model = make_pipeline(StandardScaler(), classifier)
    model.fit(describe(train).flatten(1).numpy(), train_labels.numpy())
    return float(model.score(describe(test).flatten(1).numpy(), test_labels.numpy()))


def cosine_knn(describe: Callable[[Tensor], Tensor]) -> float:
    """The project's kNN protocol, spelled out: cosine, k = 20, votes exp(similarity / 0.1)."""
    (train, train_labels, names), (test, test_labels, _) = patterns("train"), patterns("test")
    bank, queries = (
        nn.functional.normalize(describe(images).flatten(1), dim=1) for images in (train, test)
    )
    similarity, neighbours = (queries @ bank.T).topk(20, dim=1)
    votes = torch.zeros(len(test), len(names)).scatter_add_(
        1, train_labels[neighbours], (similarity / 0.1).exp()
    )
    return float((votes.argmax(1) == test_labels).float().mean())


@pytest.mark.parametrize(("split", "per_class"), [("train", 600), ("test", 150)])
def test_ten_equal_classes_of_small_colour_images(split: str, per_class: int) -> None:
    images, labels, names = patterns(split)
    assert images.shape == (10 * per_class, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert len(set(names)) == 10
    assert labels.bincount().tolist() == [per_class] * 10


@pytest.mark.parametrize("split", ["train", "test"])
def test_classes_are_shuffled(split: str) -> None:
    labels = patterns(split)[1]
    repeats = (labels[1:] == labels[:-1]).float().mean()
    assert repeats == pytest.approx(CHANCE, abs=0.04)


def test_no_image_occurs_twice_in_or_across_splits() -> None:
    every = [image.numpy().tobytes() for split in ("train", "test") for image in patterns(split)[0]]
    assert len(set(every)) == len(every)


def test_drawing_again_gives_the_same_and_leaves_global_randomness_alone() -> None:
    images, labels, names = patterns("test")
    before = torch.random.get_rng_state()
    images_again, labels_again, names_again = patterns.__wrapped__("test")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(images_again, images)
    assert torch.equal(labels_again, labels)
    assert names_again == names


def test_a_second_call_costs_nothing() -> None:
    assert patterns("test")[0] is patterns("test")[0]


def test_every_machine_draws_the_same_set() -> None:
    # Coarse on purpose: a last bit of a sine may move a single pixel on another processor.
    images, labels, _ = patterns("test")
    quarters = nn.functional.avg_pool2d(images[:2].double().mean(1, keepdim=True), 16)
    assert labels[:8].tolist() == [1, 4, 3, 3, 1, 3, 3, 3]
    assert quarters.flatten().tolist() == pytest.approx(
        [116.3, 142.8, 136.0, 169.0, 152.3, 128.7, 153.7, 131.0], abs=0.5
    )
    assert images.double().mean().item() == pytest.approx(126.81, abs=0.02)


# Nothing but geometry tells the classes apart.


def mean_colour(images: Tensor) -> Tensor:
    return images.float().mean((2, 3))


def brightness_and_contrast(images: Tensor) -> Tensor:
    values = grey(images).flatten(1)
    return torch.stack([values.mean(1), values.std(1)], dim=1)


def sorted_pixels(images: Tensor) -> Tensor:
    return grey(images).flatten(1).sort(dim=1).values[:, ::16]


def standardised_sorted_pixels(images: Tensor) -> Tensor:
    values = sorted_pixels(images)
    return (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True)


def colour_spread(images: Tensor) -> Tensor:
    return images.float().std((2, 3))


@pytest.mark.parametrize(
    "describe",
    [
        mean_colour,
        colour_spread,
        brightness_and_contrast,
        sorted_pixels,
        standardised_sorted_pixels,
    ],
)
@pytest.mark.parametrize(
    "classifier",
    [KNeighborsClassifier(20), LogisticRegression(C=0.01, max_iter=1000)],
    ids=["knn", "linear"],
)
def test_colours_and_histograms_say_nothing(
    classifier: object, describe: Callable[[Tensor], Tensor]
) -> None:
    assert score(classifier, describe) < CHANCE + 0.03  # four standard deviations of 1,500 guesses


def test_coarseness_says_next_to_nothing() -> None:
    def edge_density(images: Tensor) -> Tensor:
        values = grey(images)
        edges = values.diff(dim=1).abs().mean((1, 2)) + values.diff(dim=2).abs().mean((1, 2))
        return (edges / values.std((1, 2))).unsqueeze(1)

    assert score(KNeighborsClassifier(50), edge_density) < 2 * CHANCE


def test_raw_pixels_do_not_separate_the_classes() -> None:
    assert cosine_knn(lambda images: images.float()) < 0.25
    assert cosine_knn(lambda images: images.float() / 255 - 0.5) < 0.33


def test_an_untrained_network_does_not_separate_the_classes() -> None:
    torch.manual_seed(0)
    widths = (3, 24, 48, 96)
    network = nn.Sequential(
        *(
            layer
            for inputs, outputs in itertools.pairwise(widths)
            for layer in (nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.ReLU())
        ),
        nn.AdaptiveAvgPool2d(1),
    )
    with torch.no_grad():
        assert cosine_knn(lambda images: network(images.float() / 255 - 0.5)) < 0.3


def test_geometry_does_separate_the_classes() -> None:
    # The spectrum's magnitude forgets phase and colour and keeps arrangement.
    def spectrum(images: Tensor) -> Tensor:
        values = grey(images)
        return torch.fft.rfft2(values - values.mean((1, 2), keepdim=True)).abs()

    assert cosine_knn(spectrum) > 0.75


# The formulas have the symmetries their names promise.


def turned(u: Tensor, v: Tensor, turns: float) -> tuple[Tensor, Tensor]:
    cosine, sine = math.cos(math.tau * turns), math.sin(math.tau * turns)
    return cosine * u - sine * v, sine * u + cosine * v


SYMMETRIES: dict[str, list[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "stripes": [lambda u, v: (u + 1, v), lambda u, v: (u, v + 0.3)],
    "zigzag": [lambda u, v: (u + 1, v), lambda u, v: (u, v + 2.2), lambda u, v: (u, -v)],
    "checks": [lambda u, v: (u + 0.5, v + 0.5), lambda u, v: (v, u)],
    "dartboards": [lambda u, v: turned(u, v, 1 / 8)],
    "dots": [lambda u, v: (u + 1, v + 1 / math.sqrt(3)), lambda u, v: turned(u, v, 1 / 6)],
    "rings": [lambda u, v: turned(u, v, 0.123)],
    "swirls": [lambda u, v: turned(u, v, 1 / 12)],
    "bricks": [lambda u, v: (u + 2, v), lambda u, v: (u + 1, v + 1), lambda u, v: (-u, v)],
    "scales": [lambda u, v: (u + 0.5, v + 0.25), lambda u, v: (-u, v)],
    "parquet": [lambda u, v: (u + 2, v + 2), lambda u, v: (v + 2, u)],
}


@pytest.mark.parametrize("name", FAMILIES)
def test_symmetries(name: str) -> None:
    height, _ = FAMILIES[name]
    u, v = torch.empty(2, 5000, dtype=torch.float64).uniform_(
        -3, 3, generator=torch.Generator().manual_seed(0)
    )
    expected = height(u, v)
    assert expected.std() > 0.05
    for move in SYMMETRIES[name]:
        torch.testing.assert_close(height(*move(u, v)), expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("name", "move"),
    [("checks", lambda u, v: (u + 0.5, v)), ("dartboards", lambda u, v: turned(u, v, 1 / 16))],
)
def test_one_field_further_ink_is_paper(
    name: str, move: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
) -> None:
    height, _ = FAMILIES[name]
    u, v = torch.rand(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(height(*move(u, v)), -height(u, v), atol=1e-9, rtol=0)


@given(
    hnp.arrays(
        np.float64, (3, 1, 4, 5), elements=st.floats(-1e6, 1e6, allow_subnormal=False), unique=True
    )
)
def test_ranking_keeps_the_order_and_equalises_the_values(heights: np.ndarray) -> None:
    ranks = _rank(torch.from_numpy(heights)).numpy()
    for image, ranked in zip(heights.reshape(3, -1), ranks.reshape(3, -1), strict=True):
        below = [(image < value).sum() for value in image]
        np.testing.assert_allclose(ranked, np.array(below) / 19)
