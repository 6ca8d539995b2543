"""One typed, strict configuration. Recipes and ``key=value`` overrides merge into it.

Every field's description is what ``xmoco settings`` prints, so it is written for users.
"""

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
)
from pydantic.fields import FieldInfo

from xmoco.errors import UserError, nearest


def _or_else(wanted: str) -> WrapValidator:
    """Says what is wanted when a list of numbers is wrong in any way."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise ValueError(wanted) from None

    return WrapValidator(check)


Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
# Not strict: yaml has lists, not tuples.
Range = Annotated[tuple[float, float], Field(strict=False), _or_else("must be two numbers")]
Rgb = Annotated[tuple[float, float, float], Field(strict=False), _or_else("must be three numbers")]


class Section(BaseModel):
    """A group of settings: strict types, unknown keys refused, never changed after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class DataConfig(Section):
    source: Text = Field(
        "patterns",
        description="A folder of images, a .tar, .tar.gz or .tar.xz, `patterns` (embedded), "
        "or a torchvision set by name (`torchvision:CIFAR10`).",
    )
    labels: Literal["auto", "folders", "none"] = Field(
        "auto",
        description="Whether subfolders are classes: `auto` decides from the layout. "
        "Training never sees labels; the kNN monitor does.",
    )
    root: Text = Field("data", description="Where torchvision sets are kept.")
    download: bool = Field(False, description="Download a torchvision set that is not there yet.")
    short_side: int = Field(
        512,
        ge=32,
        description="Images whose shorter side is longer than this are shrunk to it when decoded.",
    )
    resident_gib: float = Field(
        4.0,
        ge=0,
        description="Sets of equally sized images up to this many GiB are kept decoded on the "
        "training device; larger ones are read and decoded while training.",
    )


class ViewsConfig(Section):
    size: int = Field(224, ge=8, le=1024, description="Side of a view in pixels.")
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
        description="Odd side of the blur kernel at 224 px; it scales with the view's size.",
    )
    blur_sigma: Range = Field((0.1, 2.0), description="Standard deviation of the blur in pixels.")
    mean: Rgb = Field((0.485, 0.456, 0.406), description="Subtracted from the channels (0 to 1).")
    std: Rgb = Field((0.228, 0.224, 0.225), description="Divides the channels afterwards.")

    @field_validator("crop_scale")
    @classmethod
    def _is_share(cls, share: Range) -> Range:
        if not 0 < share[0] <= share[1] <= 1:
            raise ValueError("must be 0 < low ≤ high ≤ 1")
        return share

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

    @field_validator("std")
    @classmethod
    def _is_positive(cls, deviations: Rgb) -> Rgb:
        if min(deviations) <= 0:
            raise ValueError("must be positive")
        return deviations


Backbone = Literal[
    "tiny",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet50w2",
    "resnet50w4",
]


class ModelConfig(Section):
    backbone: Backbone = Field("resnet50", description="The network that is kept after training.")
    stem: Literal["imagenet", "cifar"] = Field(
        "imagenet",
        description="`imagenet`: 7×7 stride 2 and pooling; `cifar`: 3×3, for small images.",
    )
    head_layers: int = Field(4, ge=2, le=5, description="Layers of the projection head.")
    head_hidden: int = Field(2048, ge=1, description="Width of the head's hidden layers.")
    feature_size: int = Field(128, ge=2, description="Length d of queries and keys.")
    batch_norm: Literal["auto", "plain", "split", "shuffled", "synchronised"] = Field(
        "auto",
        description="What keeps batch statistics from telling a query its key: `split` uses "
        "groups in one process, `shuffled` swaps keys between processes, `synchronised` shares "
        "statistics (CUDA), `plain` does nothing; `auto`: split in one process, shuffled in many.",
    )
    batch_norm_groups: int = Field(8, ge=2, description="Groups of `split` batch norm.")


class MoCoConfig(Section):
    """Settings of every method with a momentum encoder and key banks."""

    bank_length: int = Field(4096, ge=2, description="Keys K kept in each bank.")
    temperature: float = Field(0.2, gt=0, description="τ: divides similarities before the softmax.")
    key_momentum: float = Field(
        0.999, ge=0, le=1, description="m: g ← m·g + (1−m)·f after every step."
    )


class XMoCoConfig(MoCoConfig):
    name: Literal["xmoco"] = Field("xmoco", description="Extended momentum contrast.")
    sharpness: float = Field(2.0, gt=0, description="λ: how closely labels follow similarities.")
    positive_mass: float = Field(
        0.9, gt=0, le=1, description="ξ: the share of a soft label given to the positive."
    )
    sinkhorn_iterations: int = Field(3, ge=1, le=1000, description="Rounds of label balancing.")
    history: Literal["queries", "probabilities", "none"] = Field(
        "queries",
        description="Past rows that join the label balancing: `queries` recomputes them against "
        "today's bank (O(K·d) memory), `probabilities` stores them as in the paper (O(K²)).",
    )


class MoCoV2PlusConfig(MoCoConfig):
    name: Literal["mocov2plus"] = Field(
        "mocov2plus", description="MoCo v2 with symmetric InfoNCE and two banks."
    )


class OptimConfig(Section):
    learning_rate: float = Field(
        0.0675, gt=0, description="SGD rate per 256 images; scaled by batch / 256 and printed."
    )
    cosine_offset: float = Field(
        0.1, ge=0, le=1, description="Share of the rate left at the end of the cosine schedule."
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Epochs of linear warm-up.")
    weight_decay: float = Field(1e-4, ge=0, description="Weight decay of SGD.")
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD.")


class TrainConfig(Section):
    epochs: int = Field(200, ge=1, description="Passes over the images.")
    batch: int = Field(512, ge=2, description="Images per step over all processes.")
    accumulate: int = Field(
        1, ge=1, description="Split a step's batch into this many parts to save memory."
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
    devices: int = Field(1, ge=1, description="Processes per machine, each with its own device.")
    nodes: int = Field(1, ge=1, description="Machines.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="Arithmetic of the encoders: `auto` is bf16 on CUDA, fp32 elsewhere."
    )
    readers: int = Field(8, ge=1, description="Threads that read and decode images per process.")


class Config(Section):
    """Everything a run depends on."""

    data: DataConfig = DataConfig()
    views: ViewsConfig = ViewsConfig()
    model: ModelConfig = ModelConfig()
    method: Annotated[XMoCoConfig | MoCoV2PlusConfig, Field(discriminator="name")] = XMoCoConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()
    monitor: MonitorConfig = MonitorConfig()
    run: RunConfig = RunConfig()


METHODS: dict[str, type[MoCoConfig]] = {"xmoco": XMoCoConfig, "mocov2plus": MoCoV2PlusConfig}

# What other programs and the paper call some settings: not keys, but we know what is meant.
OTHER_NAMES = {
    "lr": "learning_rate",
    "wd": "weight_decay",
    "tau": "temperature",
    "lambda": "sharpness",
    "xi": "positive_mass",
    "K": "bank_length",
    "workers": "readers",
}

Settings = dict[str, dict[str, Any]]


def load_config(
    recipe: str | Path | None = None,
    overrides: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Config:
    """The recipe (a name, a yaml file, or none for plain defaults) with changes to it.

    Changes come as ``key=value`` texts and as a mapping of keys to values. A key is
    ``section.field``, or just ``field``: no two sections share a field. All mistakes are reported
    at once, in one ``UserError``.
    """
    mistakes: list[str] = []
    asked: list[tuple[str, Any]] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals:
            asked.append((key.strip(), _parse(key.strip(), text)))
        else:
            mistakes.append(f"{override!r} is not of the form key=value")
    changes: Settings = {}
    for key, value in [*asked, *(settings or {}).items()]:
        path = _find_field(key)
        if path is None:
            known = [name for pair in all_fields() for name in (pair[1], ".".join(pair))]
            mistakes.append(f"unknown key {key!r}{_suggestion(key, known)}")
        else:
            section, field = path
            changes.setdefault(section, {})[field] = value
    return _validated(_merged({} if recipe is None else read_recipe(recipe), changes), mistakes)


def read_config(path: Path) -> Config:
    """The configuration in a run's config.yaml."""
    try:
        return config_from_settings(_read_yaml(_read_text(path), "it"))
    except UserError as error:
        raise UserError(f"{path} cannot be used: {error}") from None


def config_from_settings(settings: Any) -> Config:
    """Settings as they stand in a run's config.yaml."""
    if not isinstance(settings, dict):
        raise UserError("it holds no settings.")
    return _validated(settings, [])


def read_recipe(recipe: str | Path, heirs: tuple[str, ...] = ()) -> Settings:
    """The settings of a recipe, those of the recipe it ``inherits`` from included.

    ``heirs`` are the recipes that inherit from this one.
    """
    text, where = _recipe_text(recipe)
    if where in heirs:
        raise UserError(f"{where} inherits from itself.")
    content = _read_yaml(text, where) or {}
    if not isinstance(content, dict):
        raise UserError(
            f"{where} must hold sections such as `train:`, not {type(content).__name__}."
        )
    parent = content.pop("inherits", None)
    if parent is not None and not isinstance(parent, str):
        raise UserError(f"{where} must inherit from one recipe by name, not from {parent!r}.")
    for section, fields in content.items():
        if section == "method" and isinstance(fields, str):
            content[section] = {"name": fields}
        elif not isinstance(fields, dict):
            raise UserError(f"{where}: {section} must hold keys and values, not {fields!r}.")
    if parent is None:
        return content
    if _is_file(parent):  # looked for beside the file that inherits from it
        parent = (Path(recipe).parent / parent).resolve()
    return _merged(read_recipe(parent, (*heirs, where)), content)


def recipe_names() -> list[str]:
    folder = resources.files("xmoco") / "recipes"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


def all_fields() -> dict[tuple[str, str], FieldInfo]:
    """Every (section, field) of any method's configuration."""
    found: dict[tuple[str, str], FieldInfo] = {}
    for section, info in Config.model_fields.items():
        kinds = METHODS.values() if section == "method" else [info.annotation]
        for kind in kinds:
            assert isinstance(kind, type)
            assert issubclass(kind, Section)
            found |= {(section, field): about for field, about in kind.model_fields.items()}
    return found


def setting_descriptions(config: Config) -> dict[str, list[tuple[str, str, str]]]:
    """By section: key, value and meaning of every setting."""
    described = {}
    for section in Config.model_fields:
        values = getattr(config, section)
        described[section] = [
            (field, _shown(getattr(values, field)), info.description or "")
            for field, info in type(values).model_fields.items()
        ]
    return described


def _shown(value: Any) -> str:
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True)
    return text.removesuffix("\n...\n").strip()


def config_yaml(config: Config) -> str:
    settings = config.model_dump(mode="json")
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def differences(old: Config, new: Config) -> list[str]:
    """``section.field: old → new`` for everything but where the run takes place.

    A run keeps the batch norm it chose, so asking for ``auto`` again agrees with any.
    """
    before, after = old.model_dump(), new.model_dump()
    found = []
    for section in before:
        if section == "run":
            continue
        for field in before[section] | after[section]:
            was, now = before[section].get(field), after[section].get(field)
            agrees = was == now or (field, now) == ("batch_norm", "auto")
            if not agrees:
                found.append(f"{section}.{field}: {was} → {now}")
    return found


def _recipe_text(recipe: str | Path) -> tuple[str, str]:
    if str(recipe) in recipe_names():
        resource = resources.files("xmoco") / "recipes" / f"{recipe}.yaml"
        return resource.read_text(encoding="utf-8"), f"recipe {recipe}"
    if _is_file(recipe):
        try:
            return _read_text(Path(recipe)), str(recipe)
        except UserError as error:
            raise UserError(f"cannot read the recipe {recipe}: {error}") from None
    names = recipe_names()
    raise UserError(
        f"unknown recipe {str(recipe)!r}{nearest(str(recipe), names)}; "
        f"there are {', '.join(names)}, or give a .yaml file."
    )


def _is_file(recipe: str | Path) -> bool:
    return Path(recipe).suffix in {".yaml", ".yml"}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(getattr(error, "strerror", None) or "it is not a text file") from None


def _read_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-45
        raise UserError(f"{where} is not valid yaml: {' '.join(str(error).split())}") from None


def _find_field(key: str) -> tuple[str, str] | None:
    if key == "method":
        return "method", "name"
    return next((pair for pair in all_fields() if key in (pair[1], ".".join(pair))), None)


def _parse(key: str, text: str) -> Any:
    """The value of ``key=text``: yaml, except that a setting which is text is taken as it is."""
    path = _find_field(key)
    if path is not None and all_fields()[path].annotation is str:
        return text
    try:
        return _read_yaml(text, key)
    except UserError:
        return text


def _merged(below: Settings, above: Settings) -> Settings:
    """``above`` laid over ``below``, key by key.

    Where ``above`` names the method, what ``below`` says for other methods only is left out.
    """
    name = above.get("method", {}).get("name")
    if isinstance(name, str) and name in METHODS:
        method = below.get("method", {})
        own = METHODS[name].model_fields
        foreign = {field for section, field in all_fields() if section == "method"} - own.keys()
        below = below | {"method": {k: v for k, v in method.items() if k not in foreign}}
    return below | {section: below.get(section, {}) | above[section] for section in above}


def _validated(settings: Settings, mistakes: list[str]) -> Config:
    settings = dict(settings)
    method = settings.get("method")
    if isinstance(method, dict):
        settings["method"] = {"name": "xmoco"} | method
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        mistakes = mistakes + [_sentence(item) for item in error.errors()]
    if mistakes:
        raise UserError("; ".join(dict.fromkeys(mistakes)) + ".")
    return config


def _suggestion(key: str, known: Iterable[str]) -> str:
    meant = OTHER_NAMES.get(key.rpartition(".")[2])
    return f" (did you mean {meant}?)" if meant else nearest(key, known)


# By pydantic's name of an error, where its own words are not a user's.
_WANTED = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text, in quotes if it looks like something else",
    "string_too_short": "must not be empty",
    "model_type": "must hold keys and values",
    "model_attributes_type": "must hold keys and values",
}


def _sentence(error: Any) -> str:
    """One pydantic error as ``section.field = value: what it must be``."""
    place = [str(part) for part in error["loc"]]
    method = place.pop(1) if place[0] == "method" and len(place) > 1 else None
    key, value = ".".join(place), error["input"]
    fields = all_fields()
    match error["type"]:
        case "extra_forbidden" if method and ("method", place[1]) in fields:
            return f"{method} has no setting {place[1]}"
        case "extra_forbidden" | "invalid_key":
            known = map(".".join, fields) if len(place) > 1 else Config.model_fields
            return f"unknown key {key!r}{_suggestion(key, known)}"
        case "union_tag_invalid":
            name = value.get("name")
            methods = ", ".join(METHODS)
            return f"unknown method {name!r}{nearest(str(name), METHODS)}; there are {methods}"
        case "value_error":
            wanted = str(error["ctx"]["error"])
        case kind:
            wanted = _WANTED.get(kind) or error["msg"].replace("Input should", "must")
    return f"{key} = {value!r}: {wanted}"


class _Loader(yaml.SafeLoader):
    """Safe yaml that reads 1e-4 as a number: yaml 1.1 asks for 1.0e-4."""


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads: the text 1e-4 needs quotes."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )
