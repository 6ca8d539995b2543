"""One typed, strict configuration. ``xmoco.settings`` makes it of recipes and overrides.

Every field's description is what ``xmoco settings`` prints, so it is written for users.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from xmoco.config.methods import MethodConfig, XMoCoConfig
from xmoco.config.optimizers import OptimConfig, SGDConfig
from xmoco.config.section import Probability, Range, Rgb, Section, Text, checked_share
from xmoco.nn.architectures import BACKBONES, check_backbone, check_stem


class DataConfig(Section):
    source: Text = Field(
        "patterns",
        description="A folder of images, a .tar, .tar.gz or .tar.xz, shards (a folder of .tar or "
        ".parquet, a pattern `train-{000..127}.tar`, or a URL of s3, gs, az or https), `patterns` "
        "(built-in), or a torchvision set by name (`torchvision:CIFAR10`).",
    )
    labels: Literal["auto", "folders", "none"] = Field(
        "auto",
        description="Whether subfolders are classes: `auto` decides from the layout, and takes a "
        "file labels.csv instead where there is one. The kNN monitor uses them, and training only "
        "by method=supervised.",
    )
    root: Text = Field("data", description="Where torchvision sets are kept.")
    download: bool = Field(False, description="Download a torchvision set that is not there yet.")
    short_side: int = Field(
        512,
        ge=32,
        le=2**16,
        description="Images whose shorter side is longer than this are shrunk to it when decoded.",
    )
    preload_gib: float = Field(
        4.0,
        ge=0,
        description="A set that takes at most this many GiB when decoded is kept so on the "
        "training device; larger ones are read and decoded while training.",
    )


class InputConfig(Section):
    """What a backbone is shown: known to evaluation, export and files of weights."""

    size: int = Field(224, ge=8, le=1024, description="Side of a random view in pixels.")
    eval_size: int | None = Field(
        None,
        ge=8,
        le=1024,
        description="Side of evaluation images in pixels. Objects look larger in random crops than "
        "in whole images, so more than `size` often works better; null: `size`. "
        "Changing only `size` resets it to null.",
    )
    mean: Rgb = Field(
        (0.485, 0.456, 0.406),
        description="Channel means, of pixel values from 0 to 1, that are subtracted.",
    )
    std: Rgb = Field(
        (0.228, 0.224, 0.225),
        description="Channel standard deviations by which the result is divided.",
    )

    @property
    def central_size(self) -> int:
        return self.eval_size or self.size

    @field_validator("std")
    @classmethod
    def _is_positive(cls, deviations: Rgb) -> Rgb:
        if min(deviations) <= 0:
            raise ValueError("must be positive")
        return deviations


def checked_ratio(limits: Range) -> Range:
    if not 0 < limits[0] <= limits[1]:
        raise ValueError("must be 0 < low ≤ high")
    return limits


class CropConfig(Section):
    crop_scale: Range = Field((0.2, 1.0), description="Share of the image's area a crop covers.")
    crop_ratio: Range = Field((3 / 4, 4 / 3), description="Width : height of a crop.")
    flip: Probability = Field(0.5, description="Chance of a horizontal flip.")

    @field_validator("crop_scale")
    @classmethod
    def _is_share(cls, share: Range) -> Range:
        return checked_share(share)

    @field_validator("crop_ratio")
    @classmethod
    def _is_ratio(cls, limits: Range) -> Range:
        return checked_ratio(limits)


class ColourConfig(Section):
    jitter: Probability = Field(0.8, description="Chance of colour jitter.")
    brightness: float = Field(0.8, ge=0, le=1, description="Brightness factor within 1 ± this.")
    contrast: float = Field(0.8, ge=0, le=1, description="Contrast factor within 1 ± this.")
    saturation: float = Field(0.8, ge=0, le=1, description="Saturation factor within 1 ± this.")
    hue: float = Field(0.2, ge=0, le=0.5, description="Hue shift within ± this; 0.5: all hues.")
    grey: Probability = Field(0.2, description="Chance of turning grey.")
    invert: Probability = Field(0.0, description="Chance of inverting all colours.")
    blur: Probability = Field(0.5, description="Chance of Gaussian blur.")
    blur_kernel: int = Field(
        23,
        ge=1,
        le=1001,
        description="Odd side of the blur kernel at 224 px; it scales with the view's size.",
    )
    blur_sigma: Range = Field((0.1, 2.0), description="Standard deviation of the blur in pixels.")

    @field_validator("blur_sigma")
    @classmethod
    def _is_positive_range(cls, limits: Range) -> Range:
        return checked_ratio(limits)

    @field_validator("blur_kernel")
    @classmethod
    def _is_odd(cls, side: int) -> int:
        if side % 2 == 0:
            raise ValueError("must be odd")
        return side


class AugmentationConfig(ColourConfig, CropConfig):
    """How random views differ from their image."""


LEAST_WEAK_CROP = 0.2
"""Share of the image's area that crops of weak views cover at least, as in ReSSL, SCE and MSF."""


class WeakCropConfig(Section):
    crop_scale: Range | None = Field(
        None,
        description="Share of the image's area a crop covers; null: that of `views`, but never "
        f"less than {LEAST_WEAK_CROP} and up to the whole image.",
    )
    crop_ratio: Range | None = Field(
        None, description="Width : height of a crop; null: that of `views`."
    )
    flip: Probability | None = Field(
        None, description="Chance of a horizontal flip; null: that of `views`."
    )

    @field_validator("crop_scale")
    @classmethod
    def _is_share(cls, share: Range | None) -> Range | None:
        return None if share is None else checked_share(share)

    @field_validator("crop_ratio")
    @classmethod
    def _is_ratio(cls, limits: Range | None) -> Range | None:
        return None if limits is None else checked_ratio(limits)


class WeakAugmentationConfig(ColourConfig, WeakCropConfig):
    """Views that differ from their image by crop and flip only, where a method wants such."""

    jitter: Probability = Field(0.0, description="Chance of colour jitter.")
    grey: Probability = Field(0.0, description="Chance of turning grey.")
    blur: Probability = Field(0.0, description="Chance of Gaussian blur.")

    def beside(self, views: AugmentationConfig) -> AugmentationConfig:
        """With all that is null, which follows the strong views: weak ones are never cropped more
        than these."""
        settings = self.model_dump(exclude_none=True)
        usual = {
            "crop_scale": (max(LEAST_WEAK_CROP, views.crop_scale[0]), 1.0),
            "crop_ratio": views.crop_ratio,
            "flip": views.flip,
        }
        return AugmentationConfig.model_validate(usual | settings)


Backbone = Annotated[str, AfterValidator(check_backbone)]


class ModelConfig(Section):
    backbone: Backbone = Field(
        "resnet50",
        description=f"The network that is kept after training: {', '.join(BACKBONES)}, or "
        "`timm:NAME`, any model of timm.",
    )
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet",
        description="`imagenet`: 7×7 stride 2 and pooling; `cifar`: 3×3, for small images. Models "
        "of timm have their own, and leave it at `imagenet`.",
    )
    weights: str | None = Field(
        None,
        description="What the backbone starts from: a run folder, a file of weights or a model by "
        "name (also `--weights`); null: random numbers. The head always starts from those.",
    )
    head_layers: int = Field(
        4, ge=1, le=5, description="Layers of the projection head; 1: a linear one."
    )
    head_hidden: int = Field(2048, ge=1, description="Width of the head's hidden layers.")
    feature_size: int = Field(128, ge=2, description="Length d of queries and keys.")
    batch_norm: Literal["auto", "plain", "split", "shuffled", "synchronised"] = Field(
        "auto",
        description="How to keep batch statistics from leaking which key belongs to a query: "
        "`split` uses groups within one process, `shuffled` exchanges keys between "
        "processes, `synchronised` shares statistics (CUDA), `plain` does nothing. "
        "`auto`: for methods with keys, split in one process and shuffled in several; "
        "for others plain, or synchronised in several on CUDA.",
    )
    batch_norm_groups: int = Field(
        8,
        ge=2,
        description="Groups of `split` batch norm. With `batch_norm=auto` there are fewer where a "
        "batch cannot be divided into so many.",
    )

    @field_validator("stem")
    @classmethod
    def _suits_the_backbone(cls, stem: str, settings: ValidationInfo) -> str:
        return check_stem(settings.data.get("backbone", ""), stem)


class TrainConfig(Section):
    epochs: int = Field(200, ge=1, description="Passes over the images.")
    batch: int = Field(512, ge=2, description="Images per step over all processes.")
    accumulate: int = Field(
        1,
        ge=1,
        description="Split a step's batch into this many parts to save memory. Each part has its "
        "own batch statistics, and of its step it is compared only with the parts "
        "before it, whose keys are in the banks already; SimCLR's negatives come from "
        "the same part only.",
    )
    seed: int = Field(0, ge=0, description="Order of samples and views are functions of it.")
    checkpoint_minutes: float = Field(
        10.0,
        ge=0,
        description="Minutes between checkpoints; one is also written at epoch ends, unless they "
        "come so fast that this would take more than 2 % of the time.",
    )
    log_every: int = Field(20, ge=1, description="Steps between lines in metrics.jsonl.")


class MonitorConfig(Section):
    knn_every: int = Field(1, ge=0, description="Epochs between kNN measurements; 0: never.")
    knn_k: int = Field(200, ge=1, description="Neighbours that vote.")
    knn_temperature: float = Field(
        0.1, gt=0, description="A neighbour's vote has the weight exp(cosine similarity / this)."
    )
    knn_images: int = Field(
        50_000,
        ge=1,
        description="At most this many training images vote, and at most as many test images are "
        "evaluated.",
    )


class RunConfig(Section):
    """Where and how it runs. All of these may change when a run is resumed, and what
    ``settings.FREE`` names."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="Kind of device.")
    devices: int = Field(
        1, ge=1, le=1024, description="Processes per machine, each with its own device."
    )
    nodes: int = Field(1, ge=1, le=2**16, description="Machines.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Arithmetic of the encoders: `auto` is bf16 on CUDA, fp32 elsewhere."
    )
    skip_bad_steps: bool = Field(
        False,
        description="Skip steps whose loss is NaN, infinite or a thousand times as large as "
        "before; otherwise the run stops there. Takes memory for a copy of all "
        "weights.",
    )
    readers: int = Field(
        8,
        ge=1,
        le=256,
        description="Threads of each process that read and decode images; on CUDA each has a small "
        "process read for it, and another decode what the GPU does not.",
    )
    wandb: str | None = Field(
        None,
        min_length=1,
        description="Project of Weights & Biases to log to as well, with the package's extra "
        "`wandb`; null: none.",
    )


class Config(Section):
    """Everything a run depends on."""

    data: DataConfig = DataConfig()
    input: InputConfig = InputConfig()
    views: AugmentationConfig = AugmentationConfig()
    weak_views: WeakAugmentationConfig = WeakAugmentationConfig()
    model: ModelConfig = ModelConfig()
    method: Annotated[MethodConfig, Field(discriminator="name")] = XMoCoConfig()
    optim: Annotated[OptimConfig, Field(discriminator="name")] = SGDConfig()
    train: TrainConfig = TrainConfig()
    monitor: MonitorConfig = MonitorConfig()
    run: RunConfig = RunConfig()


def _by_name(union: Any) -> dict[str, type[Section]]:
    return {kind.model_fields["name"].default: kind for kind in get_args(union)}


# Sections of several kinds, of which ``name`` chooses one; the first is the default.
KINDS: dict[str, dict[str, type[Section]]] = {
    "method": _by_name(MethodConfig),
    "optim": _by_name(OptimConfig),
}
