"""Other people's ResNets: whose checkpoint is this, and where in it is the backbone?

Every project saves its networks under names of its own. ``FORMATS`` says, one row per habit, where
the backbone stands and which other name gives the project away. Names are looked at after
``flat_tensors`` has joined nested dictionaries with dots and left out the wrappers that say
nothing (``state_dict``, ``module`` …). Whatever is not the backbone (heads, predictors, momentum
copies, queues, optimisers) is dropped, and reported. Which ResNet it is follows from the shapes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from xmoco.config import Backbone
from xmoco.errors import UserError
from xmoco.nn.backbones import build_backbone


@dataclass(frozen=True)
class Layout:
    name: str
    prefix: str  # stands before the backbone's own names
    marks: tuple[str, ...]  # one of these starts a name that others with this prefix do not have
    cifar_padding: int = 1  # of the 3×3 stem


# The first row that fits counts: special ones stand above general ones.
FORMATS = (
    Layout("mocov3", "base_encoder.", ("momentum_encoder.",)),
    Layout("mocov2", "encoder_q.", ("encoder_q.fc.0.",)),
    Layout("mocov1", "encoder_q.", ("encoder_q.fc.",)),
    Layout("deepclusterv2", "", ("prototypes.prototypes0.",)),
    Layout("swav", "", ("prototypes.", "projection_head.")),
    Layout("dino", "teacher.backbone.", ("student.",)),
    Layout("byol", "online_network.encoder.", ("target_network.",)),  # yaox12/BYOL-PyTorch
    Layout("byol", "online_network_state_dict.encoder.", ("target_network",)),  # sthalles
    Layout("byol", "online_encoder.net.", ("online_predictor.",)),  # lucidrains/byol-pytorch
    Layout("solo-learn", "backbone.", ("classifier.",), cifar_padding=2),
    Layout("solo-learn", "encoder.", ("classifier.",), cifar_padding=2),  # older versions
    Layout("simsiam", "encoder.", ("encoder.fc.",)),
    Layout("lightly", "backbone.", ("projection_head.", "online_classifier.", "teacher_backbone.")),
    Layout("lightly", "teacher_backbone.", ("student_backbone.",)),
    Layout("barlowtwins", "backbone.", ("bn.",)),
    Layout("vicreg", "backbone.", ("projector.",)),
    # torchvision and timm, and the backbones that Barlow Twins, VICReg and DINO publish by
    # themselves: every name starts with the empty mark.
    Layout("torchvision", "", ("",)),
)

CONTAINERS = ("state_dict", "model")  # what training programs call the whole network
WRAPPERS = ("module", "_orig_mod")  # DataParallel and its kin; torch.compile

# Blocks, how many in each stage, channels of the stem.
ARCHITECTURES: dict[tuple[str, tuple[int, ...], int], Backbone] = {
    ("basic", (1, 1, 1, 1), 16): "tiny",
    ("basic", (2, 2, 2, 2), 64): "resnet18",
    ("basic", (3, 4, 6, 3), 64): "resnet34",
    ("bottleneck", (3, 4, 6, 3), 64): "resnet50",
    ("bottleneck", (3, 4, 23, 3), 64): "resnet101",
    ("bottleneck", (3, 8, 36, 3), 64): "resnet152",
    ("bottleneck", (3, 4, 6, 3), 128): "resnet50w2",
    ("bottleneck", (3, 4, 6, 3), 256): "resnet50w4",
}
# Shape of a filter of the first convolution.
STEMS: dict[tuple[int, ...], str] = {(3, 7, 7): "imagenet", (3, 3, 3): "cifar"}
STAGES = ("layer1", "layer2", "layer3", "layer4")
PARTS = ("conv1", "bn1", *STAGES)  # all of a ResNet that has tensors, in order

# Part of a name, and what has such names.
OTHER_NETWORKS = {
    "patch_embed.": "a vision transformer",
    "conv_proj.": "a vision transformer",
    "downsample_layers.": "a ConvNeXt",
    "conv1.0.": "a ResNet whose stem has several convolutions",
    "features.": "a VGG, EfficientNet or the like",
    "stages.": "a RegNet, ConvNeXt or the like",
}


@dataclass(frozen=True)
class LoadReport:
    """What became of a checkpoint's tensors."""

    layout: str
    loaded: int  # tensors that went into the backbone
    dropped: tuple[str, ...] = ()  # parts of the checkpoint that are not the backbone
    missing: tuple[str, ...] = ()  # counters of batches, which nothing depends on

    @property
    def labelled(self) -> bool:
        """Whether the checkpoint is of a classifier, which was trained with labels."""
        return self.layout == "torchvision" and "fc" in self.dropped

    def __str__(self) -> str:
        dropped = ", ".join(self.dropped) or "nothing"
        missing = f"{len(self.missing)} batch counters" if self.missing else "nothing"
        return (
            f"layout {self.layout}: {self.loaded} tensors loaded; "
            f"dropped: {dropped}; missing: {missing}"
        )


@dataclass(frozen=True)
class FoundBackbone:
    backbone: ResNet
    name: Backbone
    stem: str
    report: LoadReport


def flat_tensors(checkpoint: Mapping[Any, object]) -> dict[str, Tensor]:
    """All tensors of nested dictionaries, under dotted names without containers and wrappers."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _walk(checkpoint):
        parts = [part for part in name.split(".") if part not in WRAPPERS]
        while len(parts) > 1 and parts[0] in CONTAINERS:
            parts = parts[1:]
        tensors.setdefault(".".join(parts), tensor)
    return tensors


def find_backbone(tensors: Mapping[str, Tensor], where: str) -> FoundBackbone:
    """The backbone among ``flat_tensors``; ``where`` they come from is said in errors."""
    layout = _recognise(tensors, where)
    names = _backbone_names(tensors, layout.prefix)
    state = {ours: tensors[theirs] for theirs, ours in names.items()}
    state |= {name: _merged_statistics(name, state) for name in state if ".running_" in name}
    name, stem = _architecture(state, where)
    backbone = build_backbone(name, stem)
    missing = _differences(state, backbone, name, where)
    backbone.load_state_dict(state, strict=False)
    if stem == "cifar":
        backbone.conv1.padding = (layout.cifar_padding, layout.cifar_padding)
    if not _stem_has_relu(names):
        backbone.add_module("relu", nn.Identity())
    others = (_part(theirs, layout.prefix) for theirs in tensors if theirs not in names)
    report = LoadReport(layout.name, len(state), tuple(dict.fromkeys(others)), missing)
    return FoundBackbone(backbone, name, stem, report)


def refuse_other(what: str, where: str) -> UserError:
    """The error for a network that is none of ours."""
    known = ", ".join(ARCHITECTURES.values())
    return UserError(f"{where} holds {what}, but the backbones here are {known}.")


def _walk(branch: Mapping[Any, object], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in branch.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}.")


def _recognise(tensors: Mapping[str, Tensor], where: str) -> Layout:
    for layout in FORMATS:
        ours = set(_backbone_names(tensors, layout.prefix).values())
        marked = any(name.startswith(layout.marks) for name in tensors)
        if marked and {"conv1.weight", "layer1.0.conv1.weight"} <= ours:
            return layout
    for part, network in OTHER_NETWORKS.items():
        if any(f".{part}" in f".{name}" for name in tensors):
            raise refuse_other(network, where)
    first = ", ".join(list(tensors)[:5]) or "none at all"
    raise UserError(
        f"{where} does not say which backbone it holds, and nobody's layout has such names: {first}"
        f"{', …' if len(tensors) > 5 else '.'}"
    )


def _backbone_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """The names that belong to a ResNet under ``prefix``, each with torchvision's name for it.

    Where the ResNet was cut into a plain list of modules, these have numbers instead of names;
    modules without tensors (ReLU, pooling) leave gaps.
    """
    inside = [name for name in names if name.startswith(prefix)]
    heads = {name: name.removeprefix(prefix).partition(".")[0] for name in inside}
    numbers = sorted({int(head) for head in heads.values() if head.isdecimal()})
    titles = {part: part for part in PARTS}
    if len(numbers) >= len(PARTS):
        titles = {str(n): part for n, part in zip(numbers, PARTS, strict=False)}
    return {
        name: (titles[head] + name[len(prefix + head) :]).replace(".shortcut.", ".downsample.")
        for name, head in heads.items()
        if head in titles
    }


def _stem_has_relu(names: Mapping[str, str]) -> bool:
    """False where modules were numbered and no place is left for a ReLU after the batch norm.

    lightly's own ResNet calls that ReLU as a function, so it is lost in the list of modules that
    lightly's CIFAR benchmarks train.
    """
    theirs = {ours: name for name, ours in names.items()}
    bn, layer = (
        theirs[ours].removesuffix(rest).rpartition(".")[2]
        for ours, rest in (("bn1.weight", ".weight"), ("layer1.0.conv1.weight", ".0.conv1.weight"))
    )
    return not layer.isdecimal() or int(layer) > int(bn) + 1


def _merged_statistics(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """Running statistics of split batch norm (lightly) as one set: their mean, as it does."""
    running, weight = state[name], state.get(name.rpartition(".")[0] + ".weight")
    channels = running.numel() if weight is None else weight.numel()
    if running.dim() == 1 and 0 < channels < len(running) and len(running) % channels == 0:
        return running.view(-1, channels).mean(dim=0)
    return running


def _architecture(state: Mapping[str, Tensor], where: str) -> tuple[Backbone, str]:
    shape = tuple(state["conv1.weight"].shape)
    blocks = tuple(
        len({name.split(".")[1] for name in state if name.startswith(f"{stage}.")})
        for stage in STAGES
    )
    kind = "bottleneck" if "layer1.0.conv3.weight" in state else "basic"
    name = ARCHITECTURES.get((kind, blocks, shape[0] if shape else 0))
    stem = STEMS.get(shape[1:])
    if name is None or stem is None:
        counts = ", ".join(map(str, blocks))
        first = " × ".join(map(str, shape))
        raise refuse_other(f"a ResNet of {counts} {kind} blocks on a stem of {first}", where)
    return name, stem


def _differences(
    state: Mapping[str, Tensor], backbone: ResNet, name: Backbone, where: str
) -> tuple[str, ...]:
    """Refuses tensors that do not make up ``backbone``; the batch counters that are missing."""
    expected = backbone.state_dict()
    for key, tensor in state.items():
        if key not in expected:
            raise refuse_other(f"a relative of {name} that has a {key} as well", where)
        if tensor.shape != expected[key].shape:
            theirs, ours = (" × ".join(map(str, t.shape)) for t in (tensor, expected[key]))
            raise refuse_other(f"a relative of {name} whose {key} is {theirs}, not {ours}", where)
    missing = [key for key in expected if key not in state]
    weights = [key for key in missing if not key.endswith(".num_batches_tracked")]
    if weights:
        raise UserError(
            f"{where} holds a {name} without {len(weights)} of its tensors, as {weights[0]}: "
            "it was cut or saved incompletely."
        )
    return tuple(missing)


def _part(name: str, prefix: str) -> str:
    """The part of a checkpoint a dropped name belongs to: as much as tells it from the backbone."""
    parts = name.split(".")
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(parts, prefix.split("."), strict=False))
    return ".".join(parts[: len(list(shared)) + 1])
