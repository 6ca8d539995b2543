"""Other people's ResNets: whose checkpoint is this, and where in it is the backbone?

Every project saves its networks under names of its own. ``FORMATS`` says, one row per habit, where
the backbone stands and which other name gives the project away. Names are looked at after
``flat_tensors`` has joined nested dictionaries with dots and left out the wrappers that say
nothing (``state_dict``, ``module`` …). Whatever is not the backbone (heads, predictors, momentum
copies, queues, optimisers) is dropped, and reported. Which ResNet it is follows from the shapes.
A ResNet in a place that no row knows is taken too, if there is no other beside it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torchvision.models.resnet import ResNet

from xmoco.errors import UserError
from xmoco.nn.architectures import BACKBONES
from xmoco.nn.backbones import build_resnet

Pixels = tuple[tuple[float, float, float], tuple[float, float, float]]  # mean and std
IMAGENET: Pixels = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR10: Pixels = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class CheckpointFormat:
    name: str
    prefix: str  # stands before the backbone's own names
    marks: tuple[str, ...]  # one of these starts a name that others with this prefix do not have
    classifier: str | None = None  # part of the checkpoint that only training with labels leaves
    cifar_padding: int = 1  # of the 3×3 stem
    cifar_pixels: tuple[str, Pixels] = ("CIFAR-10", CIFAR10)  # whose mean and std a 3×3 stem sees


# The first row that fits counts: special ones stand above general ones.
FORMATS = (
    CheckpointFormat("mocov3", "base_encoder.", ("momentum_encoder.",)),
    CheckpointFormat("mocov2", "encoder_q.", ("encoder_q.fc.0.",)),
    CheckpointFormat("mocov1", "encoder_q.", ("encoder_q.fc.",)),
    CheckpointFormat("deepclusterv2", "", ("prototypes.prototypes0.",)),
    CheckpointFormat("swav", "", ("prototypes.", "projection_head.")),
    CheckpointFormat("dino", "teacher.backbone.", ("student.",)),
    # Three projects by the name of BYOL: yaox12, sthalles, lucidrains.
    CheckpointFormat("byol", "online_network.encoder.", ("target_network.",)),
    CheckpointFormat("byol", "online_network_state_dict.encoder.", ("target_network",)),
    CheckpointFormat("byol", "online_encoder.net.", ("online_predictor.",)),
    CheckpointFormat("solo-learn", "backbone.", ("classifier.",), cifar_padding=2),
    CheckpointFormat("solo-learn", "encoder.", ("classifier.",), cifar_padding=2),  # older versions
    CheckpointFormat("simsiam", "encoder.", ("encoder.fc.",)),
    # lightly's benchmarks show CIFAR-10 as they show ImageNet.
    CheckpointFormat(
        "lightly",
        "backbone.",
        ("projection_head.", "online_classifier.", "teacher_backbone."),
        cifar_pixels=("ImageNet", IMAGENET),
    ),
    CheckpointFormat(
        "lightly",
        "teacher_backbone.",
        ("student_backbone.",),
        cifar_pixels=("ImageNet", IMAGENET),
    ),
    CheckpointFormat("barlowtwins", "backbone.", ("bn.",)),
    CheckpointFormat("vicreg", "backbone.", ("projector.",)),
    CheckpointFormat(
        "vissl",
        "classy_state_dict.base_model.model.trunk._feature_blocks.",
        ("classy_state_dict.",),
    ),
    # transformers: the classifier, and the model by itself.
    CheckpointFormat("huggingface", "resnet.", ("resnet.embedder.",), classifier="classifier"),
    CheckpointFormat("huggingface", "", ("embedder.",)),
    # torchvision and timm, and the backbones that Barlow Twins, VICReg and DINO publish by
    # themselves: every name starts with the empty mark.
    CheckpointFormat("torchvision", "", ("",), classifier="fc"),
)

GUESS = "mean and std are a guess:"
CONTAINERS = ("state_dict", "model")  # what training programs call the whole network
WRAPPERS = ("module", "_orig_mod")  # DataParallel and its kin; torch.compile

# Names that transformers gives to the parts of a ResNet, and torchvision's for them. Layers have
# numbers, from 0: a convolution and its norm have the same one.
HUGGING_FACE = re.compile(
    r"(?:embedder\.embedder|encoder\.stages\.(?P<stage>[0-9]{1,3})\.layers\.(?P<block>[0-9]{1,3})"
    r"\.(?:layer\.(?P<layer>[0-9]{1,3})|shortcut))\.(?P<kind>convolution|normalization)\.(?P<rest>\w+)"
)

NUMBER = re.compile("[0-9]{1,3}")  # of a module in a list

# Blocks, how many in each stage, channels of the stem.
ARCHITECTURES: dict[tuple[str, tuple[int, ...], int], str] = {
    (backbone.block, backbone.blocks, backbone.width): name for name, backbone in BACKBONES.items()
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
    "regnet.": "a RegNet",
    "stages.": "a RegNet, ConvNeXt or the like",
}


@dataclass(frozen=True)
class LoadReport:
    """What became of a checkpoint's tensors."""

    format: str
    loaded: int  # tensors that went into the backbone
    dropped: tuple[str, ...] = ()  # parts of the checkpoint that are not the backbone
    missing: tuple[str, ...] = ()  # counters of batches, which nothing depends on
    labelled: bool = False  # whether it was trained with labels, as a classifier tells
    notes: tuple[str, ...] = ()  # what a user should know beside

    def __str__(self) -> str:
        if not self.loaded:
            return "weights: random, nothing was loaded"
        dropped = ", ".join(self.dropped) or "nothing"
        missing = f"{len(self.missing)} batch counters" if self.missing else "nothing"
        facts = (f"dropped: {dropped}", f"missing: {missing}", *self.notes)
        return f"format {self.format}: {self.loaded} tensors loaded; {'; '.join(facts)}"


@dataclass(frozen=True)
class FoundBackbone:
    backbone: ResNet
    name: str
    stem: str
    pixels: Pixels
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
    row = _recognise(tensors, where)
    names = _backbone_names(tensors, row.prefix)
    state = {ours: tensors[theirs] for theirs, ours in names.items()}
    state |= {name: _merged_statistics(name, state) for name in state if ".running_" in name}
    name, stem = _architecture(state, where)
    backbone = build_resnet(name, stem)
    missing = _differences(state, backbone, name, where)
    try:
        backbone.load_state_dict(state, strict=False)
    except RuntimeError:  # of kinds that cannot be turned into each other
        raise refuse_other(f"a {name} of numbers that are no weights", where) from None
    pixels, notes = IMAGENET, tuple[str, ...]()
    if stem == "cifar":
        backbone.conv1.padding = (row.cifar_padding, row.cifar_padding)
        whose, pixels = row.cifar_pixels
        notes = (guess_of(whose),)
    if not _stem_has_relu(names):
        backbone.add_module("relu", nn.Identity())
    others = (part_of(theirs, row.prefix) for theirs in tensors if theirs not in names)
    dropped = tuple(dict.fromkeys(others))
    labelled = row.classifier is not None and row.classifier in dropped
    report = LoadReport(row.name, len(state), dropped, missing, labelled, notes)
    return FoundBackbone(backbone, name, stem, pixels, report)


def guess_of(whose: str) -> str:
    """Said of weights whose mean and std are not known."""
    return f"{GUESS} {whose}'s"


def refuse_other(what: str, where: str) -> UserError:
    """The error for a network that is none of ours."""
    known = ", ".join(BACKBONES)
    return UserError(f"{where} holds {what}, but the backbones known by their tensors are {known}.")


def _walk(branch: Mapping[Any, object], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in branch.items():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{key}.")


def _recognise(tensors: Mapping[str, Tensor], where: str) -> CheckpointFormat:
    for row in FORMATS:
        marked = any(name.startswith(row.marks) for name in tensors)
        if marked and _begins_a_resnet(tensors, row.prefix):
            return row
    places = _places(tensors)
    if len(places) == 1:
        place = places[0]
        return CheckpointFormat(f"torchvision under {place}", place, (), f"{place}fc")
    if places:
        raise UserError(
            f"{where} holds several ResNets, under {' and '.join(places)}, and nobody's format "
            "says which of them counts: give a file with one."
        )
    for part, network in OTHER_NETWORKS.items():
        if any(f".{part}" in f".{name}" for name in tensors):
            raise refuse_other(network, where)
    first = ", ".join(list(tensors)[:5]) or "none at all"
    raise UserError(
        f"{where} does not say which backbone it holds, and nobody's format has such names: {first}"
        f"{', …' if len(tensors) > 5 else '.'}"
    )


def _places(names: Iterable[str]) -> list[str]:
    """Prefixes under which there is a ResNet, with torchvision's names or numbers."""
    names = list(names)
    first_block = re.compile(r"(?P<prefix>(?:.*\.)?)(?:layer1|[0-9]{1,3})\.0\.conv1\.weight")
    found = filter(None, map(first_block.fullmatch, names))
    prefixes = dict.fromkeys(match["prefix"] for match in found)
    return [prefix for prefix in prefixes if _begins_a_resnet(names, prefix)]


def _begins_a_resnet(names: Iterable[str], prefix: str) -> bool:
    ours = _backbone_names(names, prefix).values()
    return {"conv1.weight", "layer1.0.conv1.weight"} <= set(ours)


def _backbone_names(names: Iterable[str], prefix: str) -> dict[str, str]:
    """The names that belong to a ResNet under ``prefix``, each with torchvision's name for it.

    Where the ResNet was cut into a plain list of modules, these have numbers instead of names;
    modules without tensors (ReLU, pooling) leave gaps.
    """
    inside = [name for name in names if name.startswith(prefix)]
    heads = {name: name.removeprefix(prefix).partition(".")[0] for name in inside}
    numbers = sorted({int(head) for head in heads.values() if NUMBER.fullmatch(head)})
    titles = {part: part for part in PARTS}
    if len(numbers) >= len(PARTS):
        titles = {str(n): part for n, part in zip(numbers, PARTS, strict=False)}
    found = {
        name: (titles[head] + name[len(prefix + head) :]).replace(".shortcut.", ".downsample.")
        for name, head in heads.items()
        if head in titles
    }
    matches = ((name, HUGGING_FACE.fullmatch(name.removeprefix(prefix))) for name in inside)
    return found | {name: _from_hugging_face(match) for name, match in matches if match}


def _from_hugging_face(name: re.Match[str]) -> str:
    """torchvision's name for a tensor that transformers calls ``name``."""
    is_norm, rest = name["kind"] == "normalization", name["rest"]
    if name["stage"] is None:
        return f"{'bn1' if is_norm else 'conv1'}.{rest}"
    block = f"layer{int(name['stage']) + 1}.{name['block']}"
    if name["layer"] is None:
        return f"{block}.downsample.{int(is_norm)}.{rest}"
    return f"{block}.{'bn' if is_norm else 'conv'}{int(name['layer']) + 1}.{rest}"


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
    return not NUMBER.fullmatch(layer) or int(layer) > int(bn) + 1


def _merged_statistics(name: str, state: Mapping[str, Tensor]) -> Tensor:
    """Running statistics of split batch norm (lightly) as one set: their mean, as it does."""
    running, weight = state[name], state.get(name.rpartition(".")[0] + ".weight")
    channels = running.numel() if weight is None else weight.numel()
    if running.dim() == 1 and 0 < channels < len(running) and len(running) % channels == 0:
        return running.float().reshape(-1, channels).mean(dim=0)
    return running


def _architecture(state: Mapping[str, Tensor], where: str) -> tuple[str, str]:
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
    state: Mapping[str, Tensor], backbone: ResNet, name: str, where: str
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


def part_of(name: str, prefix: str) -> str:
    """The part of a checkpoint a dropped name belongs to: as much as tells it from the backbone."""
    parts = name.split(".")
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(parts, prefix.split("."), strict=False))
    return ".".join(parts[: len(list(shared)) + 1])
