"""The fused operation against torch's batch norm, one group at a time.

Kernels run on CUDA where there is some. Elsewhere Triton's interpreter runs them on the CPU: see
test_interpreted_kernels.py.
"""

import copy
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.resnet import BasicBlock, Bottleneck

from xmoco.nn import blocks
from xmoco.nn.backbones import ScaledResNet
from xmoco.nn.batchnorm import split_statistics, stack_views
from xmoco.nn.blocks import FusedBatchNorm2d, fuse_layers
from xmoco.nn.encoder import Encoder
from xmoco.nn.heads import mlp_head

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
too_long = pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")


@pytest.fixture
def fused_norm() -> ModuleType:
    return importlib.import_module("xmoco.nn.fused_norm")


@pytest.fixture
def small_tiles(fused_norm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows make several tiles, and programmes walk through several of them."""
    monkeypatch.setattr(fused_norm, "TILE", 128)
    monkeypatch.setattr(fused_norm, "CHANNELS", 8)
    monkeypatch.setattr(fused_norm, "PROGRAMMES", 4)


@pytest.fixture
def always_fused(fused_norm: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too; there in few programmes, since the interpreter takes them in turn."""
    monkeypatch.setattr(blocks, "fusible", lambda *_: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # it would blur the comparison
    monkeypatch.setattr(fused_norm, "TILE", 4096 if CUDA else 1 << 16)
    monkeypatch.setattr(fused_norm, "STRIP", 8 if CUDA else 256)


@dataclass
class Case:
    """A batch with what goes with it, and how it is normalised."""

    shape: tuple[int, ...]
    groups: int = 1
    views: int = 1
    residual: bool = False
    relu: bool = False
    dtype: torch.dtype = torch.float32
    offset: float = 1.0

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(len(self.shape) + self.groups)
        channels = self.shape[1]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE)

        tensors = {
            "x": (2 * normal(*self.shape) + self.offset).to(self.dtype),
            "residual": normal(*self.shape).to(self.dtype),
            "weight": normal(channels),
            "bias": normal(channels),
            "running_mean": normal(channels),
            "running_var": normal(channels) ** 2,
        }
        if len(self.shape) == 4:
            for name in ("x", "residual"):
                tensors[name] = tensors[name].contiguous(memory_format=torch.channels_last)
        return tensors

    def gradient(self) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


LEARNT = ("x", "residual", "weight", "bias")


def expected(case: Case) -> dict[str, Tensor | None]:
    """Result, gradients and running statistics, in float64 and in small steps."""
    known = {name: value.double() for name, value in case.tensors().items()}
    for name in LEARNT:
        known[name].requires_grad_()
    mean, var = known["running_mean"], known["running_var"]
    result = torch.zeros_like(known["x"])
    for view in torch.arange(case.shape[0]).chunk(case.views):
        means, variances = [], []
        for group in range(case.groups):
            members = view[group :: case.groups]
            means.append(mean.clone())
            variances.append(var.clone())
            result[members] = F.batch_norm(
                known["x"][members], means[-1], variances[-1], known["weight"], known["bias"], True
            )
        mean, var = torch.stack(means).mean(0), torch.stack(variances).mean(0)
    if case.residual:
        result = result + known["residual"]
    if case.relu:
        result = result.relu()
    # As the operation gets it: rounded to the type of its result.
    result.backward(case.gradient().to(case.dtype).double())
    gradients = {f"d_{name}": known[name].grad for name in LEARNT}
    return {"result": result, "running_mean": mean, "running_var": var, **gradients}


def found(case: Case, operation: Callable[..., Tensor]) -> dict[str, Tensor | None]:
    known = case.tensors()
    for name in LEARNT:
        known[name].requires_grad_()
    batches = torch.tensor(3, device=DEVICE)
    result = operation(
        known["x"],
        known["residual"] if case.residual else None,
        *(known[name] for name in ("weight", "bias", "running_mean", "running_var")),
        batches,
        groups=case.groups,
        views=case.views,
        relu=case.relu,
        momentum=0.1,
        eps=1e-5,
    )
    assert result.dtype == case.dtype
    if len(case.shape) == 4:
        assert result.is_contiguous(memory_format=torch.channels_last)
    assert batches.item() == 3 + case.views
    result.backward(case.gradient().to(case.dtype))
    gradients = {f"d_{name}": known[name].grad for name in LEARNT}
    statistics = {name: known[name] for name in ("running_mean", "running_var")}
    return {"result": result, **statistics, **gradients}


def assert_agrees(
    case: Case, operation: Callable[..., Tensor], rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    right = expected(case)
    for name, value in found(case, operation).items():
        wanted = right[name]
        if wanted is None:
            assert value is None, name
        else:
            assert value is not None, name
            assert_close(
                value.double(), wanted, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((6, 5, 3, 7)),
        Case((6, 5, 3, 7), relu=True),
        Case((6, 5, 3, 7), residual=True),
        Case((6, 16, 3, 7), residual=True, relu=True),
        Case((16, 8, 4, 4), groups=8, residual=True, relu=True),
        Case((24, 9, 5, 3), groups=3, views=2, relu=True),
        Case((12, 19, 2, 3), groups=2, views=3, residual=True, relu=True),
        Case((64, 20), groups=8, relu=True),
        Case((10, 3), views=1, groups=5),
    ],
    ids=repr,
)
@pytest.mark.usefixtures("small_tiles")
def test_it_equals_torch_on_every_group(case: Case, fused_norm: ModuleType) -> None:
    assert_agrees(case, fused_norm.fused_batch_norm)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case((8, 130, 5, 5), groups=2, residual=True, relu=True),
        Case((16, 16, 33, 9), groups=2, views=2, relu=True),
    ],
    ids=repr,
)
def test_tiles_of_full_size(case: Case, fused_norm: ModuleType) -> None:
    assert_agrees(case, fused_norm.fused_batch_norm)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
def test_bfloat16_is_rounded_only_at_the_end(fused_norm: ModuleType) -> None:
    """The interpreter cuts digits off where a GPU rounds."""
    case = Case((16, 8, 4, 4), groups=2, residual=True, relu=True, dtype=torch.bfloat16)
    assert_agrees(case, fused_norm.fused_batch_norm, rtol=2**-7 if INTERPRETED else 2**-8)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
def test_a_mean_far_from_zero_does_not_spoil_the_variance(fused_norm: ModuleType) -> None:
    """In float32, E[x²] − E[x]² would have no correct digit left here."""
    case = Case((32, 4, 4, 4), groups=2, offset=20_000.0)
    assert_agrees(case, fused_norm.fused_batch_norm, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
def test_it_takes_any_memory_format(fused_norm: ModuleType) -> None:
    """Channels first, and a gradient that is one number expanded."""
    case = Case((8, 6, 3, 3), groups=2, relu=True)
    known = case.tensors()
    results, gradients = [], []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        x = known["x"].detach().contiguous(memory_format=memory_format).requires_grad_()
        statistics = (known["running_mean"].clone(), known["running_var"].clone())
        batches = torch.tensor(0, device=DEVICE)
        result = fused_norm.fused_batch_norm(
            x, None, known["weight"], known["bias"], *statistics, batches,
            groups=2, views=1, relu=True, momentum=0.1, eps=1e-5,
        )  # fmt: skip
        result.sum().backward()
        results.append(result)
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*results)
    assert torch.equal(*gradients)


@pytest.mark.gpu
def test_what_is_not_a_number_is_not_hidden(fused_norm: ModuleType) -> None:
    case = Case((4, 2, 2, 2), relu=True, offset=float("nan"))
    result = found(case, fused_norm.fused_batch_norm)["result"]
    assert result is not None
    assert result.isnan().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("small_tiles")
def test_torch_accepts_the_operations(fused_norm: ModuleType) -> None:
    """Schema, mutations, fake tensors and gradients, as torch.compile relies on them."""
    known = Case((4, 3, 2, 2)).tensors()
    statistics = (known["running_mean"], known["running_var"], torch.tensor(0, device=DEVICE))
    inputs = (known["x"], *statistics, 2, 1, 0.1, 1e-5)
    torch.library.opcheck(fused_norm._statistics, inputs)
    mean, scale = fused_norm._statistics(*inputs)
    learnt = [known[name].requires_grad_() for name in LEARNT]
    torch.library.opcheck(fused_norm._normalise, (*learnt, mean, scale, 2, 1, True))


def encoders(block: type[BasicBlock | Bottleneck]) -> tuple[Encoder, Encoder]:
    """The same network with split norms, plain and fused."""
    torch.manual_seed(0)
    backbone = ScaledResNet(block, [1, 1, 1, 1], width=8)
    backbone.add_module("maxpool", nn.Identity())
    backbone.add_module("fc", nn.Identity())
    plain = Encoder(backbone, mlp_head(64 * block.expansion, 16, 8, layers=2))
    split_statistics(plain, groups=2)
    stack_views(plain, views=2)
    plain.to(DEVICE).to(memory_format=torch.channels_last)
    fused = copy.deepcopy(plain)
    fuse_layers(fused)
    return plain, fused


def learn(encoder: Encoder, bf16: bool = False) -> dict[str, Tensor]:
    """Features, gradients and running statistics after one batch."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(16, 3, 32, 32, generator=generator).to(DEVICE)
    target = torch.randn(16, 8, generator=generator).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=bf16):
        features = encoder(images)
    (features * target).sum().backward()
    learnt = {"features": features, **dict(encoder.named_buffers())}
    for name, value in encoder.named_parameters():
        assert value.grad is not None
        learnt[name] = value.grad
    return {name: value.double() for name, value in learnt.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("block", [BasicBlock, pytest.param(Bottleneck, marks=too_long)])
@pytest.mark.usefixtures("always_fused")
def test_a_network_learns_the_same(block: type[BasicBlock | Bottleneck]) -> None:
    plain, fused = (learn(encoder) for encoder in encoders(block))
    assert fused.keys() == plain.keys()
    for name, value in fused.items():
        error = (value - plain[name]).norm() / (plain[name].norm() + 1e-6)
        assert error < 1e-3, name


@too_long
@pytest.mark.gpu
@pytest.mark.usefixtures("always_fused")
def test_a_network_in_bfloat16_errs_no_more() -> None:
    """Than the plain one does, which rounds between norm, addition and ReLU."""
    plain, fused = encoders(BasicBlock)
    right = learn(copy.deepcopy(plain))
    plain_values, fused_values = learn(plain, bf16=True), learn(fused, bf16=True)

    def error(values: dict[str, Tensor]) -> float:
        differences = [(values[name] - right[name]).flatten() for name in right]
        return torch.cat(differences).norm().item()

    assert error(fused_values) < 1.5 * error(plain_values)


@pytest.mark.gpu
@pytest.mark.usefixtures("always_fused")
def test_it_compiles_whole() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6, 3, 3, device=DEVICE).contiguous(memory_format=torch.channels_last)
    results = []
    for compiled in (False, True):
        layer = nn.Sequential(nn.BatchNorm2d(6), nn.ReLU()).to(DEVICE)
        fuse_layers(split_statistics(layer, groups=2))
        run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
        query = x.clone().requires_grad_()
        result = run(query)
        result.square().sum().backward()
        assert isinstance(layer[0], FusedBatchNorm2d)
        results.append((result, query.grad, layer[0].weight.grad, *layer[0].buffers()))
    for eager, whole in zip(*results, strict=True):
        assert_close(whole, eager)
