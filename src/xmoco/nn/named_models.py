"""Models of torchvision and timm by name, with their weights; and untrained ones."""

import difflib
import logging
from dataclasses import replace

import torch
import torchvision.models

from xmoco.errors import UserError, nearest
from xmoco.nn.architectures import BACKBONES, timm_library, timm_models
from xmoco.nn.backbone_files import BackboneCard, Weights
from xmoco.nn.backbones import build_backbone, create_timm
from xmoco.nn.checkpoint_formats import IMAGENET, LoadReport, find_backbone

SCRATCH = "scratch"  # what records call a backbone without any training
LONGEST_NAME = 100
"""Letters of what may be a misspelt model."""


def load_torchvision(name: str, given: str) -> Weights:
    """A trained model: torchvision's name for it, then perhaps that of certain weights."""
    model, _, version = name.partition(":")
    known = [entry.torchvision for entry in BACKBONES.values() if entry.torchvision]
    if model not in known:
        raise UserError(
            f"{given} is not among the models taken by name, which are {', '.join(known)}"
            f"{nearest(model, known)}."
        )
    versions = torchvision.models.get_model_weights(model).__members__
    if version and version not in versions:
        raise UserError(f"torchvision has no weights {version} for {model}: {', '.join(versions)}.")
    try:
        tensors = versions[version or "DEFAULT"].get_state_dict(
            progress=False, check_hash=True, map_location="cpu", weights_only=True
        )
    except (OSError, RuntimeError) as error:
        raise _unavailable(given, error) from None
    found = find_backbone(tensors, given)
    return Weights.of_others(found, given, found.pixels)


def untrained(name: str, given: str) -> Weights:
    """A backbone as it is before any training, for comparison."""
    if name not in BACKBONES:
        raise UserError(
            f"{given} is no backbone: after scratch: there may be {', '.join(BACKBONES)}"
            f"{nearest(name, BACKBONES)}."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = build_backbone(name)
    card = BackboneCard.of_others(name, "imagenet", 224, SCRATCH, IMAGENET)
    return Weights(backbone.eval(), card, LoadReport(SCRATCH, 0))


def load_timm(name: str, given: str) -> Weights:
    """A trained model: timm's name for it, then perhaps that of certain weights."""
    architecture = name.partition(".")[0]
    try:
        known = timm_models()
    except ValueError as error:
        raise UserError(f"no weights of {given}: {error}.") from None
    if architecture not in known:
        # Among a thousand names, one is always a little like it.
        near = difflib.get_close_matches(architecture[:LONGEST_NAME], known, n=1, cutoff=0.7)
        raise UserError(f"timm has no model {architecture}{nearest(architecture, near)}.")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every attempt
    try:
        trained = timm_library().get_pretrained_cfg(name)
        size = trained.input_size[-1]
        model, _ = create_timm(name, size, pretrained=True)
    except Exception as error:  # the hub's libraries each have errors of their own
        raise _unavailable(given, error) from None
    labelled = trained.num_classes > 0
    pixels = tuple(trained.mean), tuple(trained.std)
    if architecture in _TIMM_RESNETS:
        found = find_backbone(model.state_dict(), given)
        report = replace(found.report, labelled=labelled)
        return Weights.of_others(replace(found, report=report), given, pixels)
    card = BackboneCard.of_others(f"timm:{architecture}", "imagenet", size, given, pixels)
    report = LoadReport("timm", len(model.state_dict()), labelled=labelled)
    return Weights(model.eval(), card, report)


# Those that are ours by another name; the arguments of others make them what they are.
_TIMM_RESNETS = {
    entry.timm.name for entry in BACKBONES.values() if entry.timm and not entry.timm.arguments
}


def _unavailable(given: str, error: Exception) -> UserError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return UserError(
        f"the weights of {given} could not be fetched ({reason}): download them where there is a "
        "network, and give the file."
    )
