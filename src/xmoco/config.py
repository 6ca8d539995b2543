"""One typed, strict configuration. ``xmoco.settings`` makes it of recipes and overrides.

Every field's description is what ``xmoco settings`` prints, so it is written for users.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)

from xmoco.nn.architectures import BACKBONES, check_backbone, check_stem


def _or_else(wanted: str) -> WrapValidator:
    """Says what is wanted when a list of numbers is wrong in any way."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(wanted) from None

    return WrapValidator(check)


LARGEST_NUMBER = 2**53
"""Up to here, floating point tells whole numbers apart."""

Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
# Not strict: yaml has lists, not tuples.
Range = Annotated[tuple[float, float], Field(strict=False), _or_else("must be two numbers")]
Rgb = Annotated[tuple[float, float, float], Field(strict=False), _or_else("must be three numbers")]


def checked_share(share: Range) -> Range:
    if not 0 < share[0] <= share[1] <= 1:
        raise ValueError("must be 0 < low ≤ high ≤ 1")
    return share


class Section(BaseModel):
    """A group of settings: strict types, unknown keys refused, never changed after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_countable(cls, value: Any) -> Any:
        """No setting needs such numbers, and beyond them arithmetic overflows."""
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and abs(number) > LARGEST_NUMBER:
                raise ValueError(f"must not be beyond {LARGEST_NUMBER:,}")
        return value


class DataConfig(Section):
    source: Text = Field(
        "patterns",
        description="A folder of images, a .tar, .tar.gz or .tar.xz, shards (a folder of .tar or "
        ".parquet, a pattern `train-{000..127}.tar`, or a URL of s3, gs, az or https), `patterns` "
        "(embedded), or a torchvision set by name (`torchvision:CIFAR10`).",
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
        description="Side of the central view in evaluations. Random crops show things larger "
        "than whole images do, so more than `size` may suit; null: `size`. It is null again where "
        "only `size` is changed.",
    )
    mean: Rgb = Field((0.485, 0.456, 0.406), description="Subtracted from the channels (0 to 1).")
    std: Rgb = Field((0.228, 0.224, 0.225), description="Divides the channels afterwards.")

    @property
    def central_size(self) -> int:
        return self.eval_size or self.size

    @field_validator("std")
    @classmethod
    def _is_positive(cls, deviations: Rgb) -> Rgb:
        if min(deviations) <= 0:
            raise ValueError("must be positive")
        return deviations


class AugmentationConfig(Section):
    """How random views differ from their image."""

    crop_scale: Range = Field((0.2, 1.0), description="Share of the image's area a crop covers.")
    crop_ratio: Range = Field((3 / 4, 4 / 3), description="Width : height of a crop.")
    flip: Probability = Field(0.5, description="Chance of a horizontal flip.")
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

    @field_validator("crop_scale")
    @classmethod
    def _is_share(cls, share: Range) -> Range:
        return checked_share(share)

    @field_validator("crop_ratio", "blur_sigma")
    @classmethod
    def _is_positive_range(cls, limits: Range) -> Range:
        if not 0 < limits[0] <= limits[1]:
            raise ValueError("must be 0 < low ≤ high")
        return limits

    @field_validator("blur_kernel")
    @classmethod
    def _is_odd(cls, side: int) -> int:
        if side % 2 == 0:
            raise ValueError("must be odd")
        return side


class WeakAugmentationConfig(AugmentationConfig):
    """Views that differ from their image by crop and flip only, where a method wants such."""

    jitter: Probability = Field(0.0, description="Chance of colour jitter.")
    grey: Probability = Field(0.0, description="Chance of turning grey.")
    blur: Probability = Field(0.0, description="Chance of Gaussian blur.")


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
    head_layers: int = Field(
        4, ge=1, le=5, description="Layers of the projection head; 1: a linear one."
    )
    head_hidden: int = Field(2048, ge=1, description="Width of the head's hidden layers.")
    feature_size: int = Field(128, ge=2, description="Length d of queries and keys.")
    batch_norm: Literal["auto", "plain", "split", "shuffled", "synchronised"] = Field(
        "auto",
        description="What keeps batch statistics from telling a query its key: `split` uses "
        "groups in one process, `shuffled` swaps keys between processes, `synchronised` shares "
        "statistics (CUDA), `plain` does nothing. `auto`: where a method has keys to hide, split "
        "in one process and shuffled in many; else plain, or synchronised in many on CUDA.",
    )
    batch_norm_groups: int = Field(8, ge=2, description="Groups of `split` batch norm.")

    @field_validator("stem")
    @classmethod
    def _suits_the_backbone(cls, stem: str, settings: ValidationInfo) -> str:
        return check_stem(settings.data.get("backbone", ""), stem)


class MethodSettings(Section):
    """Settings of every method."""

    name: str

    @property
    def added(self) -> tuple[str, ...]:
        """What the method has of another one."""
        return ()

    @property
    def subject(self) -> str:
        """What records call the method."""
        return "+".join((self.name, *self.added))


class ConsistencyConfig(MethodSettings):
    """XMoCo's consistency, for methods that compare both sides of an image with negatives."""

    consistency_weight: float = Field(
        0.0,
        ge=0,
        description="Weight of XMoCo's cross-similarity consistency, a term more; 0: none.",
    )
    consistency_warmup_epochs: float = Field(
        0.0, ge=0, description="Epochs over which that weight rises linearly from 0."
    )

    @property
    def added(self) -> tuple[str, ...]:
        return ("consistency",) if self.consistency_weight else ()


class IdeasConfig(ConsistencyConfig):
    """Both of XMoCo's ideas, for methods whose labels are one-hot otherwise."""

    label_weight: Probability = Field(
        0.0,
        description="Share of XMoCo's balanced soft labels, the rest being one-hot; 0: none.",
    )
    sharpness: float = Field(
        2.0, gt=0, description="λ: how closely soft labels follow similarities."
    )
    positive_mass: float = Field(
        0.9, gt=0, le=1, description="ξ: the share of a soft label given to the positive."
    )
    sinkhorn_iterations: int = Field(3, ge=1, le=1000, description="Rounds of label balancing.")

    @property
    def added(self) -> tuple[str, ...]:
        return (("labels",) if self.label_weight else ()) + super().added


class BankIdeasConfig(IdeasConfig):
    """The same where negatives are past keys."""

    history: Literal["queries", "probabilities", "none"] = Field(
        "queries",
        description="Past rows that join the label balancing: `queries` recomputes them against "
        "today's bank (O(K·d) memory), `probabilities` stores them as in the paper (O(K²)).",
    )


class MomentumEncoderConfig(MethodSettings):
    """Settings of every method with a momentum encoder."""

    key_momentum: float = Field(
        0.999, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )
    key_momentum_end: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Where m arrives at the end of training, along a half cosine; null: it stays.",
    )


class BankConfig(MomentumEncoderConfig):
    """Settings of every method with a momentum encoder and key banks."""

    bank_length: int = Field(4096, ge=2, description="Keys K kept in each bank.")
    weak_keys: bool = Field(
        False,
        description="Keys are of two more views of an image, made by `weak_views`; not in the "
        "paper.",
    )
    predictor_hidden: int = Field(
        0,
        ge=0,
        description="Width of a predictor's hidden layer between queries and keys; 0: none, as in "
        "the paper.",
    )


class MoCoConfig(BankConfig):
    """Settings of those that choose among keys."""

    temperature: float = Field(0.2, gt=0, description="τ: divides similarities before the softmax.")


class DirectedConfig(BankConfig):
    """Settings of methods whose queries meet keys in one direction, as published, or in both."""

    symmetric: bool = Field(
        False,
        description="Whether both sides of an image have queries and keys, each meeting the "
        "other's; else one view makes queries and another one keys.",
    )

    @field_validator("label_weight", "consistency_weight", check_fields=False)
    @classmethod
    def _has_two_sides(cls, weight: float, settings: ValidationInfo) -> float:
        if weight and not settings.data.get("symmetric"):
            raise ValueError("compares both sides of an image, so it needs symmetric=true")
        return weight


class TwoBanksConfig(BankIdeasConfig, MoCoConfig):
    """Settings of XMoCo, and of what it extends."""

    teacher: Literal["queries", "keys"] = Field(
        "queries",
        description="Whose similarities labels and consistency targets are made of: `queries` as "
        "in the paper, or the momentum encoder's `keys`.",
    )

    @property
    def last_positive_mass(self) -> float:
        """ξ at the end of training."""
        return self.positive_mass


class XMoCoConfig(TwoBanksConfig):
    name: Literal["xmoco"] = Field("xmoco", description="Extended momentum contrast.")
    label_weight: Probability = Field(
        1.0,
        description="Share of the soft labels, the rest being one-hot: 1 is the paper's, 0 leaves "
        "the InfoNCE of MoCo v2+.",
    )
    consistency_weight: float = Field(
        1.0, ge=0, description="Weight of the cross-similarity consistency terms; 0: none."
    )
    positive_mass_end: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Where ξ arrives at the end of training, along a half cosine; null: it stays, "
        "as in the paper.",
    )

    @property
    def last_positive_mass(self) -> float:
        return self.positive_mass_end or self.positive_mass

    @property
    def subject(self) -> str:
        """XMoCo+ with what is not in the paper, lest its figures be taken for the paper's."""
        changes = self.label_weight > 0 and self.last_positive_mass != self.positive_mass
        more = self.teacher == "keys" or self.weak_keys or self.predictor_hidden or changes
        return f"{self.name}+" if more else self.name

    @property
    def added(self) -> tuple[str, ...]:
        return ()  # the two ideas are its own


class MoCoV2PlusConfig(TwoBanksConfig):
    name: Literal["mocov2plus"] = Field(
        "mocov2plus", description="MoCo v2 with symmetric InfoNCE and two banks."
    )


class MoCoOneWayConfig(BankIdeasConfig, DirectedConfig, MoCoConfig):
    name: Literal["moco"] = Field(
        "moco", description="A query picks its key out of past ones: MoCo, versions 1 and 2."
    )


class ReSSLConfig(DirectedConfig):
    name: Literal["ressl"] = Field(
        "ressl", description="A query is as similar to past keys as its own key is; no positive."
    )
    temperature: float = Field(0.1, gt=0, description="τ of the queries' similarities.")
    key_temperature: float = Field(
        0.04, gt=0, description="τ of the keys' similarities, which queries are to have."
    )
    weak_keys: bool = Field(
        True, description="Keys are of views made by `weak_views`, as in ReSSL's paper."
    )


class SCEConfig(ConsistencyConfig, DirectedConfig):
    name: Literal["sce"] = Field(
        "sce", description="One-hot labels mixed with the similarities of the key to past keys."
    )
    temperature: float = Field(0.1, gt=0, description="τ of the queries' similarities.")
    key_temperature: float = Field(
        0.05, gt=0, description="τ of the keys' similarities, which are part of the labels."
    )
    positive_share: Probability = Field(
        0.5, description="Share of a label given to the positive; 1: InfoNCE."
    )
    weak_keys: bool = Field(
        True, description="Keys are of views made by `weak_views`, as in SCE's paper."
    )


class CO2Config(BankIdeasConfig, DirectedConfig, MoCoConfig):
    name: Literal["co2"] = Field(
        "co2", description="InfoNCE, and a query agrees with its key on all negatives."
    )
    agreement_weight: float = Field(
        0.3, ge=0, description="α: weight of the divergence of a query and its key; 0: none."
    )
    agreement_warmup_epochs: float = Field(
        0.0, ge=0, description="Epochs over which that weight rises linearly from 0."
    )
    agreement_temperature: float = Field(
        0.05, gt=0, description="τ of the similarities to the negatives that are to agree."
    )


class AlignUniformConfig(DirectedConfig):
    name: Literal["alignuniform"] = Field(
        "alignuniform",
        description="Queries lie near their keys, and far from each other and from past keys.",
    )
    symmetric: bool = Field(
        True,
        description="Whether both sides of an image have queries and keys, each meeting the "
        "other's, as in the table of XMoCo's paper; else one view makes queries and another one "
        "keys.",
    )
    align_weight: float = Field(
        3.0, ge=0, description="Weight of the squared distance of queries and their keys."
    )
    uniform_weight: float = Field(
        1.0, ge=0, description="Weight of how unevenly queries spread among the others."
    )
    uniform_sharpness: float = Field(
        3.0, gt=0, description="t: nearness is exp(−t · squared distance)."
    )


class JCLConfig(BankIdeasConfig, DirectedConfig, MoCoConfig):
    name: Literal["jcl"] = Field(
        "jcl", description="InfoNCE with endlessly many keys of an image, as a Gaussian has them."
    )
    symmetric: bool = Field(
        False, description="Whether two views of an image make queries, for the same keys."
    )
    weak_keys: bool = Field(
        False, description="Keys are of views made by `weak_views`; not in JCL's paper."
    )
    key_views: int = Field(
        5, ge=2, le=32, description="Views of an image whose keys make its Gaussian."
    )
    spread_weight: float = Field(
        2.0,
        ge=0,
        description="λ: how much the Gaussian's spread counts at the end of training; it rises "
        "linearly from 0.",
    )


class SimCLRConfig(IdeasConfig):
    name: Literal["simclr"] = Field(
        "simclr", description="Contrast with all other views of the batch; one encoder."
    )
    temperature: float = Field(0.5, gt=0, description="τ: divides similarities before the softmax.")


class BYOLConfig(MomentumEncoderConfig):
    name: Literal["byol"] = Field(
        "byol", description="A predictor tells the momentum encoder's features; no negatives."
    )
    key_momentum: float = Field(
        0.99, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )
    key_momentum_end: float | None = Field(
        1.0,
        ge=0,
        le=1,
        description="Where m arrives at the end of training, along a half cosine; null: it stays.",
    )
    predictor_hidden: int = Field(4096, ge=1, description="Width of the predictor's hidden layer.")


class PrototypesConfig(MethodSettings):
    """Settings of SwAV, and of what extends it."""

    temperature: float = Field(0.1, gt=0, description="τ: divides scores before the softmax.")
    epsilon: float = Field(0.05, gt=0, description="ε: smoothness of the codes.")
    sinkhorn_iterations: int = Field(3, ge=1, le=1000, description="Rounds of code balancing.")
    prototypes: int = Field(3000, ge=2, description="Prototypes; a few per class and more.")
    freeze_prototypes_epochs: float = Field(
        1.0, ge=0, description="Epochs in which prototypes do not move yet."
    )
    queue_length: int = Field(
        0, ge=0, description="Past images that join the code balancing, for small batches; 0: none."
    )
    queue_from_epoch: float = Field(15.0, ge=0, description="The queue takes part from here on.")
    local_crops: int = Field(
        0, ge=0, le=32, description="Small views of every image beside the two full ones."
    )
    local_size: int = Field(96, ge=8, le=1024, description="Side of a small view in pixels.")
    local_scale: Range = Field(
        (0.05, 0.2), description="Share of the image's area a small view covers."
    )

    @field_validator("local_scale")
    @classmethod
    def _is_share(cls, share: Range) -> Range:
        return checked_share(share)


class SwAVConfig(PrototypesConfig):
    name: Literal["swav"] = Field(
        "swav", description="Codes of one view over learned prototypes, told from the others."
    )


class UOTAConfig(PrototypesConfig):
    name: Literal["uota"] = Field(
        "uota", description="SwAV in which views that are unlike their image's others count less."
    )
    outlier_temperature: float = Field(
        350.0, gt=0, description="Divides the squared distance of a view from its image's others."
    )
    outliers_from: Probability = Field(
        0.5, description="Views count unequally from this share of training on."
    )
    outliers_rate: float = Field(
        2.0, gt=0, description="The learning rate is multiplied by this from there on."
    )


class SimSiamConfig(MethodSettings):
    name: Literal["simsiam"] = Field(
        "simsiam", description="A predictor tells the encoder's own features of the other view."
    )
    predictor_hidden: int = Field(512, ge=1, description="Width of the predictor's hidden layer.")


class BarlowTwinsConfig(MethodSettings):
    name: Literal["barlowtwins"] = Field(
        "barlowtwins", description="Features of two views correlate one by one, not with others."
    )
    redundancy_weight: float = Field(
        0.0051, ge=0, description="λ: weight of the correlations of different features."
    )
    loss_scale: float = Field(
        0.024,
        gt=0,
        description="Multiplies the loss, which sums over features; LARS minds it for norms and "
        "biases only.",
    )


class VICRegConfig(MethodSettings):
    name: Literal["vicreg"] = Field(
        "vicreg", description="Views agree, features vary, and do not vary together."
    )
    invariance_weight: float = Field(
        25.0, ge=0, description="Weight of the views' squared difference."
    )
    variance_weight: float = Field(
        25.0, ge=0, description="Weight of what standard deviations lack of 1."
    )
    covariance_weight: float = Field(
        1.0, ge=0, description="Weight of the covariances of different features."
    )


class NeighbourConfig(MomentumEncoderConfig):
    """Settings of methods that tell keys and their neighbours among past keys."""

    key_momentum: float = Field(
        0.99, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )
    predictor_hidden: int = Field(2048, ge=1, description="Width of the predictor's hidden layer.")
    bank_length: int = Field(4096, ge=2, description="Keys K kept in the bank.")
    neighbours: int = Field(
        5, ge=1, description="How many keys of the bank, the nearest ones, are told."
    )
    weak_keys: bool = Field(
        True, description="The view whose keys enter the bank is made by `weak_views`."
    )

    @field_validator("neighbours")
    @classmethod
    def _are_in_the_bank(cls, neighbours: int, settings: ValidationInfo) -> int:
        if neighbours > settings.data.get("bank_length", neighbours):
            raise ValueError("must be at most bank_length")
        return neighbours


class MSFConfig(NeighbourConfig):
    name: Literal["msf"] = Field(
        "msf", description="A predictor tells a key and its nearest neighbours: mean shift."
    )


class MNNConfig(NeighbourConfig):
    name: Literal["mnn"] = Field(
        "mnn", description="A predictor tells a key, and mixtures of it with its neighbours."
    )


class SupervisedConfig(MethodSettings):
    name: Literal["supervised"] = Field(
        "supervised", description="A linear classifier learns labels; the upper reference."
    )


class InstDiscConfig(IdeasConfig):
    name: Literal["instdisc"] = Field(
        "instdisc", description="An image finds its own past look among those of all images."
    )
    temperature: float = Field(
        0.07, gt=0, description="τ: divides similarities before the softmax."
    )
    slot_momentum: float = Field(
        0.5, ge=0, lt=1, description="Share of its past that an image's slot keeps when it is seen."
    )


class OptimizerConfig(Section):
    """Settings of every optimiser."""

    learning_rate: float = Field(
        0.0675, gt=0, description="Rate per 256 images; scaled by batch / 256 and printed."
    )
    cosine_offset: float = Field(
        0.1, ge=0, le=1, description="Share of the rate left at the end of the cosine schedule."
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Epochs of linear warm-up.")
    weight_decay: float = Field(1e-4, ge=0, description="Weight decay.")
    decay_norms_and_biases: bool = Field(
        True, description="Whether weight decay is for norms and biases too."
    )


class SGDConfig(OptimizerConfig):
    name: Literal["sgd"] = Field("sgd", description="Gradient descent with momentum.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    nesterov: bool = Field(False, description="Nesterov's form of the momentum.")


class LARSConfig(OptimizerConfig):
    name: Literal["lars"] = Field(
        "lars", description="SGD whose rate suits every layer's weights, for large batches."
    )
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")
    trust: float = Field(
        0.001, gt=0, description="A layer moves by this share of its weights at rate 1."
    )
    clip: bool = Field(
        False,
        description="A layer moves by that share at any rate, but no further than by SGD with the "
        "rate (LARC).",
    )
    decay_norms_and_biases: bool = Field(
        True,
        description="Whether weight decay is for norms and biases too, and a rate that suits them; "
        "else they move as by SGD.",
    )


class AdamWConfig(OptimizerConfig):
    name: Literal["adamw"] = Field("adamw", description="Adam with decoupled weight decay.")
    betas: Range = Field((0.9, 0.999), description="Decay of the first and second moments.")

    @field_validator("betas")
    @classmethod
    def _are_shares(cls, betas: Range) -> Range:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("must be two numbers from 0 up to 1")
        return betas


class TrainConfig(Section):
    epochs: int = Field(200, ge=1, description="Passes over the images.")
    batch: int = Field(512, ge=2, description="Images per step over all processes.")
    accumulate: int = Field(
        1,
        ge=1,
        description="Split a step's batch into this many parts to save memory. A part has batch "
        "statistics of its own and, of the step, meets only the parts before it: their keys are in "
        "the banks already; SimCLR's negatives come from the part alone.",
    )
    seed: int = Field(0, ge=0, description="Order of samples and views are functions of it.")
    checkpoint_minutes: float = Field(
        10.0, ge=0, description="Minutes between checkpoints; one is also written at epoch ends."
    )
    log_every: int = Field(20, ge=1, description="Steps between lines in metrics.jsonl.")


class MonitorConfig(Section):
    knn_every: int = Field(1, ge=0, description="Epochs between kNN measurements; 0: never.")
    knn_k: int = Field(200, ge=1, description="Neighbours that vote.")
    knn_temperature: float = Field(0.1, gt=0, description="Votes weigh exp(similarity / this).")
    knn_images: int = Field(
        50_000, ge=1, description="At most this many training images vote, and as many are judged."
    )


class RunConfig(Section):
    """Where and how it runs. Only these may change when a run is resumed."""

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
        description="Leave steps out whose loss is no number, or a thousand times as large as "
        "before; otherwise the run ends there. Takes memory for a copy of all weights.",
    )
    readers: int = Field(
        8,
        ge=1,
        le=256,
        description="Threads of each process that read and decode images; on CUDA each has a small "
        "process read for it, and another decode what the GPU does not.",
    )


MethodConfig = (
    XMoCoConfig
    | MoCoV2PlusConfig
    | SimCLRConfig
    | BYOLConfig
    | SwAVConfig
    | ReSSLConfig
    | SCEConfig
    | CO2Config
    | AlignUniformConfig
    | JCLConfig
    | UOTAConfig
    | SimSiamConfig
    | BarlowTwinsConfig
    | VICRegConfig
    | MSFConfig
    | MNNConfig
    | SupervisedConfig
    | InstDiscConfig
    | MoCoOneWayConfig
)
OptimConfig = SGDConfig | LARSConfig | AdamWConfig


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
