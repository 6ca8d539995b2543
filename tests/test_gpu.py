"""Whole steps on a GPU: for every method, a replayed CUDA graph does what plain steps do.

Momentum, rate and weights of terms change with the step, before and after the recording.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from xmoco.config import Config
from xmoco.data import ArrayImages
from xmoco.methods import Method, build_method
from xmoco.pretraining import prepare_training
from xmoco.settings import load_config
from xmoco.task import StepOutput
from xmoco.train.engine import build_fabric
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
AFTER = (WARM_UP + 2) / PER_EPOCH  # in epochs: something changes when the graph is recorded already
SWAV = f"method=swav prototypes=12 freeze_prototypes_epochs={AFTER}"
METHODS = {
    "xmoco": f"{BANKS} consistency_warmup_epochs=2",
    "xmoco, probabilities": f"{BANKS} history=probabilities",
    "mocov2plus": f"method=mocov2plus {BANKS}",
    "simclr": "method=simclr",
    "byol": "method=byol predictor_hidden=32 key_momentum=0.5",
    "swav, queue": f"{SWAV} queue_length=32 queue_from_epoch={AFTER}",
    "swav, small crops": f"{SWAV} local_crops=3 local_size=12",
    "lars": f"{BANKS} optim=lars learning_rate=16 trust=0.02",
    "adamw": f"{BANKS} optim=adamw learning_rate=0.016",
}


class Course(NamedTuple):
    """What steps told, and where they led."""

    steps: list[StepOutput]
    method: Method
    start: dict[str, Tensor]
    graphed: bool

    def way(self, part: str) -> Tensor:
        """How far the weights of a part of the method have come."""
        state = self.method.state_dict()
        names = [name for name in parameters(self.method) if name.partition(".")[0] == part]
        return torch.cat([(state[name] - self.start[name]).flatten() for name in names])


def parameters(method: Method) -> list[str]:
    return [name for name, _ in method.named_parameters()]


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Two courses are compared here, and cuDNN's usual sums are never the same twice."""
    with torch.backends.cudnn.flags(deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Course]:
    """Takes all steps, replayed as soon as they can be."""
    monkeypatch.setattr("xmoco.train.step.HOST_SHARE", 0.0)  # always record

    def course(settings: str, build: Callable[[Config], Method] = build_method) -> Course:
        config = load_config(None, [*SMALL, *settings.split()])
        fabric = build_fabric(config.run)
        torch.backends.cudnn.benchmark = False  # its choice would be another every time
        training = prepare_training(config, fabric, pictures(), RunFolder(tmp_path), build)
        method = training.task
        assert isinstance(method, Method)
        method.train()
        start = {name: value.clone() for name, value in method.state_dict().items()}
        with closing(training.batches.from_step(0)) as stream:
            steps = [training.advance(stream, step == MEASURED) for step in range(STEPS)]
        stepper = training.stepper
        graphed = isinstance(stepper, GraphedStepper) and stepper.graph is not None
        return Course(steps, method, start, graphed)

    return course


def pictures() -> ArrayImages:
    generator = torch.Generator().manual_seed(0)
    colours = torch.rand(IMAGES, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(colours, (20, 20), mode="bilinear")
    return ArrayImages("pictures", (255 * smooth).to(torch.uint8))


def uncapturable(config: Config) -> Method:
    method = build_method(config)
    method.capturable = False
    return method


def assert_same_course(found: Course, expected: Course) -> None:
    """As far as float32 can tell: sums are taken in other orders, and 20 steps add that up."""
    for ours, theirs in zip(found.steps, expected.steps, strict=True):
        assert_close(ours.loss, theirs.loss, rtol=1e-3, atol=1e-3)
        assert ours.terms.keys() == theirs.terms.keys()
        for name, term in ours.terms.items():
            assert_close(term, theirs.terms[name], rtol=1e-3, atol=1e-3)
        assert ours.metrics.keys() == theirs.metrics.keys()
    assert_same_end(found, expected)
    for name, value in expected.method.state_dict().items():
        if not value.is_floating_point():  # counters
            assert torch.equal(found.method.state_dict()[name], value), name


def assert_same_end(found: Course, expected: Course) -> None:
    for part in {name.partition(".")[0] for name in parameters(expected.method)}:
        way = expected.way(part)
        assert way.norm() > 0, part
        assert (found.way(part) - way).norm() < 0.02 * way.norm(), part


@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS.keys())
def test_a_graph_takes_the_course_of_plain_steps(
    settings: str, take: Callable[..., Course]
) -> None:
    plain, graphed = take(settings, uncapturable), take(settings)
    assert (plain.graphed, graphed.graphed) == (False, True)
    assert_same_course(graphed, plain)
    assert graphed.steps[MEASURED].metrics


def test_xmoco_without_its_ideas_is_mocov2plus(take: Callable[..., Course]) -> None:
    ours = take(f"{BANKS} label_weight=0 consistency_weight=0")
    moco = take(f"method=mocov2plus {BANKS}")
    assert ours.graphed
    assert moco.graphed
    for our_step, their_step in zip(ours.steps, moco.steps, strict=True):
        assert_close(our_step.loss, their_step.loss, rtol=1e-3, atol=1e-3)
    assert_same_end(ours, moco)


def test_what_changes_with_the_step_changes_the_course(take: Callable[..., Course]) -> None:
    """Lest the above compare two courses that both stood still."""
    rising, fixed = (take(f"{BANKS} consistency_warmup_epochs={epochs}") for epochs in (2, 0))
    risen = take(f"method=mocov2plus {BANKS}")
    constant = take("method=mocov2plus bank_length=48 key_momentum=0.5")
    for one, other in ((rising, fixed), (risen, constant)):
        way = other.way("momentum_encoder")
        assert (one.way("momentum_encoder") - way).norm() > 0.02 * way.norm()
