"""Whole steps on a GPU: for every method, a replayed CUDA graph does what plain steps do.

Momentum, rate and weights of terms change with the step, before and after the recording. Training
is chaotic: a rounding grows tenfold in a few steps. So every step starts from the same state.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from xmoco.config import Config
from xmoco.data import ArrayImages, Batch
from xmoco.methods import Method, build_method
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.train.engine import build_fabric
from xmoco.train.loop import Training
from xmoco.train.run_folder import RunFolder
from xmoco.train.step import WARM_UP, GraphedStepper

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
STEPS = 2 * WARM_UP + 4
MEASURED = WARM_UP + 3  # a step with metrics, which is never replayed
IMAGES, BATCH = 128, 16
PER_EPOCH = IMAGES // BATCH
SMALL = (
    *("size=16", "eval_size=null", "blur=0.2", "epochs=3", f"batch={BATCH}", "learning_rate=0.8"),
    *("backbone=tiny", "stem=cifar", "head_layers=2", "head_hidden=32", "feature_size=16"),
    *("batch_norm_groups=4", "warmup_epochs=0.5", f"device={DEVICE}", "precision=fp32"),
)
BANKS = "bank_length=48 key_momentum=0.5 key_momentum_end=0.99"
IDEAS = "label_weight=0.8 consistency_weight=0.5 consistency_warmup_epochs=2"
AFTER = (WARM_UP + 2) / PER_EPOCH  # in epochs: something changes when the graph is recorded already
SWAV = f"method=swav prototypes=12 freeze_prototypes_epochs={AFTER}"
METHODS = {
    "xmoco": f"{BANKS} consistency_warmup_epochs=2",
    "xmoco, probabilities": f"{BANKS} history=probabilities",
    "xmoco, large stem": f"{BANKS} stem=imagenet size=64",
    "xmoco, small views": f"{BANKS} weak_keys=true local_crops=3 local_size=12",
    "mocov2plus": f"method=mocov2plus {BANKS}",
    "simclr": "method=simclr",
    "byol": "method=byol predictor_hidden=32 key_momentum=0.5",
    "swav, queue": f"{SWAV} queue_length=32 queue_from_epoch={AFTER}",
    "swav, small crops": f"{SWAV} local_crops=3 local_size=12",
    "ressl": f"method=ressl {BANKS}",
    "sce": f"method=sce {BANKS} symmetric=true",
    "co2": f"method=co2 {BANKS} agreement_warmup_epochs=2",
    "simsiam": "method=simsiam predictor_hidden=32",
    "barlowtwins": "method=barlowtwins",
    "vicreg": "method=vicreg learning_rate=0.08",
    "alignuniform": f"method=alignuniform {BANKS}",
    "jcl": f"method=jcl {BANKS} key_views=3",
    "jcl, ideas": f"method=jcl {BANKS} key_views=3 symmetric=true {IDEAS}",
    "simclr, ideas": f"method=simclr {IDEAS}",
    "instdisc, ideas": f"method=instdisc {IDEAS}",
    "mocov2plus, ideas": f"method=mocov2plus {BANKS} {IDEAS}",
    "moco, ideas": f"method=moco {BANKS} symmetric=true {IDEAS}",
    "co2, ideas": f"method=co2 {BANKS} symmetric=true {IDEAS}",
    "sce, consistency": f"method=sce {BANKS} symmetric=true consistency_weight=0.5",
    "msf": f"method=msf {BANKS} predictor_hidden=32",
    "mnn": f"method=mnn {BANKS} predictor_hidden=32",
    "supervised": "method=supervised",
    "instdisc": "method=instdisc",
    "moco": f"method=moco {BANKS}",
    "lars": f"{BANKS} optim=lars learning_rate=16 trust=0.02",
    "lars, clipped": f"{BANKS} optim=lars learning_rate=16 trust=0.02 clip=true",
    "adamw": f"{BANKS} optim=adamw learning_rate=0.016",
}


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Two courses are compared here, and cuDNN's usual sums are never the same twice."""
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Training]:
    """Trainings at their start, whose steps are replayed as soon as they can be."""
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)  # always record

    def make(settings: str, build: Callable[[Config], Method] = build_method) -> Training:
        config = load_config(None, [*SMALL, *settings.split()])
        fabric = build_fabric(config.run)
        torch.backends.cudnn.benchmark = False  # its choice would be another every time
        training = prepare_training(config, fabric, pictures(), RunFolder(tmp_path), build)
        training.task.train()
        return training

    return make


def pictures() -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    colours = torch.rand(IMAGES, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(colours, (20, 20), mode="bilinear")
    labels = (colours.mean(dim=(1, 2, 3)) > 0.5).long()
    return ArrayImages("pictures", (255 * smooth).to(torch.uint8), labels, ("dark", "bright"))


def uncapturable(config: Config) -> Method:
    method = build_method(config)
    method.capturable = False
    return method


def is_graphed(training: Training) -> bool:
    stepper = training.stepper
    return isinstance(stepper, GraphedStepper) and stepper.graph is not None


def take_over(follower: Training, leader: Training) -> None:
    """Weights, memories and the optimiser's state, in place, where a recorded graph finds them."""
    follower.task.load_state_dict(leader.task.state_dict())
    pairs = zip(follower.task.parameters(), leader.task.parameters(), strict=True)
    for own, other in pairs:
        for name, value in leader.optimizer.state.get(other, {}).items():
            place = follower.optimizer.state[own].get(name)
            if isinstance(place, Tensor):
                place.copy_(value)


def weights(training: Training) -> dict[str, Tensor]:
    """By part of the method: all its parameters in a row."""
    parts: dict[str, list[Tensor]] = {}
    for name, value in training.task.named_parameters():
        parts.setdefault(name.partition(".")[0], []).append(value.detach().flatten().clone())
    return {part: torch.cat(values) for part, values in parts.items()}


def assert_same_steps(ours: Training, theirs: Training, terms: bool = True) -> None:
    """Step by step, each from the state of ``theirs``; weights go the same way, to a hundredth."""
    with closing(theirs.batches.from_step(0)) as stream:
        batches: list[Batch] = [next(stream) for _ in range(STEPS)]
    for step, batch in enumerate(batches):
        if step:
            take_over(ours, theirs)
        before = weights(theirs)
        measured = step == MEASURED
        found = ours.advance(iter([batch]), measured)
        expected = theirs.advance(iter([batch]), measured)
        assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-4)
        if terms:
            assert found.terms.keys() == expected.terms.keys()
            for name, term in found.terms.items():
                assert_close(term, expected.terms[name], rtol=1e-4, atol=1e-4)
        assert bool(found.metrics) == bool(expected.metrics) == measured
        after, ended = weights(theirs), weights(ours)
        for part, start in before.items():
            way = (after[part] - start).norm()
            # Weights have seven digits, so of a short way fewer are known.
            rounding = 1e-6 * start.norm()
            assert (ended[part] - after[part]).norm() <= 0.01 * way + rounding, (step, part)


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS.keys())
def test_a_graph_takes_the_steps_of_plain_ones(
    settings: str, made: Callable[..., Training]
) -> None:
    plain, graphed = made(settings, uncapturable), made(settings)
    assert_same_steps(graphed, plain)
    assert (is_graphed(plain), is_graphed(graphed)) == (False, True)
    for name, value in plain.task.state_dict().items():
        if isinstance(value, Tensor) and not value.is_floating_point():  # counters
            assert torch.equal(graphed.task.state_dict()[name], value), name


def test_what_may_not_be_recorded_takes_plain_steps(made: Callable[..., Training]) -> None:
    """UOTA inverts a matrix at every step; it begins when others are recorded already."""
    share = (WARM_UP + 2) / (3 * PER_EPOCH)
    training = made(f"{SWAV.replace('swav', 'uota')} local_crops=2 outliers_from={share}")
    before = weights(training)
    with closing(training.batches.from_step(0)) as stream:
        losses = torch.stack([training.advance(stream).loss for _ in range(STEPS)])
    assert losses.isfinite().all()
    assert not is_graphed(training)
    assert all((weights(training)[part] - start).norm() > 0 for part, start in before.items())


def test_xmoco_without_its_ideas_is_mocov2plus(made: Callable[..., Training]) -> None:
    """What is left between two such runs is rounding, which training makes grow."""
    ours = made(f"{BANKS} label_weight=0 consistency_weight=0")
    moco = made(f"method=mocov2plus {BANKS}")
    assert_same_steps(ours, moco, terms=False)
    assert is_graphed(ours)
    assert is_graphed(moco)


def test_one_hot_soft_labels_are_infonce_too(made: Callable[..., Training]) -> None:
    """With ξ 1 the labels still come from the streamed balancing, and are one-hot all the same."""
    ours = made(f"{BANKS} positive_mass=1 consistency_weight=0")
    plain = made(f"{BANKS} label_weight=0 consistency_weight=0")
    plain_history = {k: v for k, v in ours.task.state_dict().items() if "soft_labels" in k}
    assert plain_history, "it has a history, which the other has not"
    assert_same_loss(ours, plain)


def assert_same_loss(ours: Training, theirs: Training) -> None:
    """Where memories differ, only the first steps compare: as long as roundings are small."""
    with closing(theirs.batches.from_step(0)) as stream:
        for _ in range(4):
            batch = next(stream)
            found, expected = ours.advance(iter([batch])), theirs.advance(iter([batch]))
            assert_close(found.loss, expected.loss, rtol=1e-4, atol=1e-4)


def test_what_changes_with_the_step_changes_the_course(made: Callable[..., Training]) -> None:
    """Lest the above compare two courses that both stood still."""

    def moved(settings: str) -> Tensor:
        training = made(settings)
        before = weights(training)["momentum_encoder"]
        with closing(training.batches.from_step(0)) as stream:
            for _ in range(STEPS):
                training.advance(stream)
        return weights(training)["momentum_encoder"] - before

    rising, fixed = (moved(f"{BANKS} consistency_warmup_epochs={epochs}") for epochs in (2, 0))
    risen = moved(f"method=mocov2plus {BANKS}")
    constant = moved("method=mocov2plus bank_length=48 key_momentum=0.5")
    for one, other in ((rising, fixed), (risen, constant)):
        assert (one - other).norm() > 0.05 * other.norm()
