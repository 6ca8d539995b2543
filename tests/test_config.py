"""Configuration: inheritance, overrides, strictness, and the paper's numbers in its recipe."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from xmoco.config import KINDS, AugmentationConfig, Config
from xmoco.config.methods import MoCoV2PlusConfig, XMoCoConfig
from xmoco.config.optimizers import AdamWConfig, LARSConfig, SGDConfig
from xmoco.errors import UserError, nearest
from xmoco.settings import (
    OTHER_NAMES,
    all_fields,
    config_yaml,
    differences,
    load_config,
    read_config,
    read_recipe,
    recipe_names,
    setting_descriptions,
)


def test_the_imagenet_recipe_is_the_papers() -> None:
    """Defaults, open points and augmentations of the specification, number by number."""
    config = load_config("imagenet")
    method = config.method
    assert isinstance(method, XMoCoConfig)
    assert (method.bank_length, method.temperature, method.sharpness) == (4096, 0.2, 2.0)
    assert (method.positive_mass, method.key_momentum) == (0.9, 0.999)
    assert (method.sinkhorn_iterations, method.history) == (3, "queries")
    model = config.model
    assert (model.backbone, model.stem) == ("resnet50", "imagenet")
    assert (model.head_layers, model.head_hidden, model.feature_size) == (4, 2048, 128)
    assert model.batch_norm == "auto"
    assert (config.train.batch, config.train.epochs, config.train.accumulate) == (512, 200, 1)
    assert (method.label_weight, method.consistency_weight) == (1, 1)
    optim = config.optim
    assert isinstance(optim, SGDConfig)
    assert not optim.nesterov
    assert optim.decay_norms_and_biases
    assert (optim.learning_rate, optim.cosine_offset, optim.warmup_epochs) == (0.0675, 0.1, 0)
    assert (optim.weight_decay, optim.sgd_momentum) == (1e-4, 0.9)
    views = config.views
    assert (views.crop_scale, views.crop_ratio) == ((0.2, 1.0), (3 / 4, 4 / 3))
    assert (views.flip, views.jitter, views.grey, views.invert) == (0.5, 0.8, 0.2, 0)
    assert (views.brightness, views.contrast, views.saturation, views.hue) == (0.8, 0.8, 0.8, 0.2)
    assert (views.blur, views.blur_kernel, views.blur_sigma) == (0.5, 23, (0.1, 2.0))
    assert (config.input.size, config.input.eval_size) == (224, None)
    assert config.input.mean == (0.485, 0.456, 0.406)
    assert config.input.std == (0.228, 0.224, 0.225)
    assert (config.monitor.knn_k, config.monitor.knn_temperature) == (200, 0.1)


def test_backbones_are_judged_at_the_size_of_views_or_another() -> None:
    assert load_config(None, ["size=96"]).input.central_size == 96
    shown = load_config(None, ["size=96", "eval_size=128"]).input
    assert (shown.size, shown.central_size) == (96, 128)
    assert load_config(None, ["eval_size=null"]).input.central_size == 224
    with pytest.raises(UserError, match=r"input\.eval_size = 7: .* 8\."):
        load_config(None, ["eval_size=7"])


def test_the_size_to_judge_at_belongs_to_the_size_it_was_found_for(tmp_path: Path) -> None:
    def sizes(recipe: str | Path, *overrides: str) -> tuple[int, int | None]:
        shown = load_config(recipe, overrides).input
        return shown.size, shown.eval_size

    assert sizes("cifar10") == (32, 48)
    assert sizes("cifar10", "size=96") == (96, None)
    assert sizes("cifar10", "eval_size=40") == (32, 40)
    assert sizes("cifar10", "size=32") == (32, 48)  # the same size: what suits it stays
    assert sizes("cifar10", "eval_size=128", "size=96") == (96, 128)
    heir = tmp_path / "heir.yaml"
    heir.write_text("inherits: cifar10\ninput: {size: 64}\n")
    assert sizes(heir) == (64, None)
    heir.write_text("inherits: cifar10\ninput: {size: 64, eval_size: 80}\n")
    assert sizes(heir) == (64, 80)
    for others in ("views: {blur: 0.5}", "input: {mean: [0.5, 0.5, 0.5]}"):
        heir.write_text(f"inherits: cifar10\n{others}\n")
        assert sizes(heir) == (32, 48)


def test_recipes_have_names_and_all_load() -> None:
    """Of a set, of a method, or of a method on large images."""
    sets = {"cifar10", "demo", "imagenet", "imagenette"}
    assert sets < set(recipe_names())
    for name in recipe_names():
        config = load_config(name)
        own = name.removesuffix("-imagenet")
        expected = "xmoco" if name in sets else {"mocov1": "moco"}.get(own, own)
        assert config.method.name == expected
        large = name.startswith("imagenet") or name.endswith("-imagenet")
        assert (config.input.size >= 96) == large


def test_a_rate_published_for_a_mean_of_directions_is_halved_for_their_sum() -> None:
    """solo-learn's MoCo v2+: rate 0.3, decay 1e-4. Both are what a step moves weights by."""
    optim = load_config("mocov2plus").optim
    assert 2 * optim.learning_rate == pytest.approx(0.3)
    assert optim.learning_rate * optim.weight_decay == pytest.approx(0.3 * 1e-4)


def test_a_recipe_inherits_key_by_key() -> None:
    parent, child = load_config("imagenet"), load_config("imagenette")
    assert child.input.size == 96
    assert child.input.mean == parent.input.mean
    assert child.views.crop_scale == (0.08, 1.0) != parent.views.crop_scale
    assert child.views.blur_kernel == parent.views.blur_kernel
    assert child.views.brightness == 0.4 != parent.views.brightness
    assert child.method.history == parent.method.history
    assert (parent.method.key_momentum, child.method.key_momentum) == (0.999, 0.99)


def test_files_inherit_from_recipes_and_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("middle.yaml").write_text("inherits: demo\ntrain: {epochs: 7}\n")
    Path("last.yml").write_text("inherits: middle.yaml\ntrain: {batch: 8}\nmethod: mocov2plus\n")
    settings = read_recipe("last.yml")
    assert settings["train"] == read_recipe("demo")["train"] | {"epochs": 7, "batch": 8}
    assert settings["method"]["name"] == "mocov2plus"
    assert read_recipe("middle.yaml")["views"] == read_recipe("demo")["views"]


def test_a_file_is_looked_for_beside_its_heir(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rec").mkdir()
    Path("base.yaml").write_text("train: {epochs: 1}\n")
    Path("rec/base.yaml").write_text("train: {epochs: 2}\n")
    Path("rec/near.yaml").write_text("inherits: base.yaml\n")
    Path("rec/far.yaml").write_text("inherits: ../base.yaml\n")
    assert load_config("rec/near.yaml").train.epochs == 2
    assert load_config("rec/far.yaml").train.epochs == 1


def test_a_recipe_for_another_method_drops_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "plain.yaml").write_text("inherits: imagenet\nmethod: mocov2plus\n")
    config = load_config(tmp_path / "plain.yaml")
    assert isinstance(config.method, MoCoV2PlusConfig)
    assert config.method.bank_length == load_config("imagenet").method.bank_length


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("inherits: ../here/mine.yaml", "inherits from itself"),
        ("inherits: gone.yaml", "gone.yaml: No such file"),
        ("inherits: imagnet", "did you mean imagenet?"),
        ("inherits: [demo]", "must inherit from one recipe by name"),
        ("train: [", "mine.yaml is not valid yaml"),
        ("train: 2024-13-45", "mine.yaml is not valid yaml"),
        ("- 3", "must hold sections such as `train:`, not list"),
        ("train: 3", "train must hold keys and values, not 3"),
        ("1: {epochs: 3}", "unknown key '1'"),
        ("train: {1: 3}", "unknown key 'train.1'"),
        ("train: {epoch: 3}", "unknown key 'train.epoch' (did you mean train.epochs?)"),
        ("optim: {lr: 3}", "unknown key 'optim.lr' (did you mean learning_rate?)"),
        ("trian: {epochs: 3}", "unknown key 'trian' (did you mean train?)"),
        ("data: {source: 3}", "data.source = 3: must be text"),
        ("method: {name: simclr, history: none}", "simclr has no setting history"),
        ("method: {name: mocha}", "unknown method 'mocha'"),
    ],
)
def test_mistakes_in_a_recipe_are_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "here" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        load_config(file)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_recipe_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    assert load_config(tmp_path / "empty.yaml") == load_config() == Config()


def test_hardly_any_sections_share_a_field() -> None:
    """So a key needs no section; but the kinds of several sections have a ``name``."""
    sections: dict[str, list[str]] = {}
    for section, field in all_fields():
        sections.setdefault(field, []).append(section)
    assert sections.pop("name") == list(KINDS)
    shared = [found for found in sections.values() if len(found) > 1]
    assert shared == [["views", "weak_views"]] * len(AugmentationConfig.model_fields)


@pytest.mark.parametrize(
    ("changes", "crop"),
    [
        ("crop_scale=[0.08,1.0]", (0.2, 1.0)),
        ("crop_scale=[0.4,0.6]", (0.4, 1.0)),
        ("crop_scale=[0.8,1.0]", (0.8, 1.0)),
        ("crop_scale=[0.8,1.0] weak_views.crop_scale=[0.1,0.3]", (0.1, 0.3)),
    ],
)
def test_weak_views_are_never_cropped_more_than_the_strong_ones_unless_asked(
    changes: str, crop: tuple[float, float]
) -> None:
    config = load_config("demo", [*changes.split(), "flip=0.1", "views.crop_ratio=[1,2]"])
    weak = config.weak_views.beside(config.views)
    assert (weak.crop_scale, weak.crop_ratio, weak.flip) == (crop, (1, 2), 0.1)
    assert (weak.jitter, weak.grey, weak.blur) == (0, 0, 0)
    own = load_config("demo", ["weak_views.crop_ratio=[1,1]", "weak_views.flip=0"])
    weak = own.weak_views.beside(own.views)
    assert (weak.crop_ratio, weak.flip) == ((1, 1), 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("weak_views.crop_scale=[0,1]", "must be 0 < low ≤ high ≤ 1"),
        ("weak_views.crop_ratio=[2,1]", "must be 0 < low ≤ high"),
    ],
)
def test_crops_of_weak_views_are_possible(change: str, words: str) -> None:
    with pytest.raises(UserError, match=f": {words}.$"):
        load_config("demo", [change])


def test_nesterovs_momentum_needs_momentum() -> None:
    with pytest.raises(UserError) as caught:
        load_config("demo", ["nesterov=true", "sgd_momentum=0"])
    assert str(caught.value).endswith(
        ": is a form of the momentum, so it needs sgd_momentum above 0."
    )
    assert load_config("demo", ["nesterov=true"]).optim.model_dump()["nesterov"]


def test_the_first_section_that_has_a_field_is_meant() -> None:
    before = load_config("demo")
    usual, weak = load_config("demo", ["flip=0.1"]), load_config("demo", ["weak_views.flip=0.1"])
    assert (usual.views.flip, usual.weak_views) == (0.1, before.weak_views)
    assert (weak.views, weak.weak_views.flip) == (before.views, 0.1)


@pytest.mark.parametrize("key", ["optim.weight_decay", "weight_decay"])
@pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4", ".1e-3", "+1e-4"])
def test_numbers_as_people_write_them(key: str, text: str) -> None:
    assert load_config("demo", [f"{key}={text}"]).optim.weight_decay == 1e-4


def test_overrides_win_in_their_order() -> None:
    config = load_config(
        "demo", ["epochs=3", "epochs = 4", "crop_scale=[0.3, 0.9]"], {"batch": 8, "train.seed": 5}
    )
    assert (config.train.epochs, config.train.batch, config.train.seed) == (4, 8, 5)
    assert config.views.crop_scale == (0.3, 0.9)


@pytest.mark.parametrize("text", ["a=b", "a #b", "123", "1e5", "no", "null", "[x", "{a: 1}", "~"])
def test_text_is_taken_as_it_is(text: str) -> None:
    assert load_config("demo", [f"source={text}"]).data.source == text


def test_another_method_keeps_what_fits() -> None:
    config = load_config("demo", ["method=mocov2plus"])
    assert isinstance(config.method, MoCoV2PlusConfig)
    assert config.method.bank_length == load_config("demo").method.bank_length
    back = load_config("demo", ["method=mocov2plus", "method.name=xmoco", "positive_mass=0.5"])
    assert isinstance(back.method, XMoCoConfig)
    assert back.method.positive_mass == 0.5
    assert isinstance(load_config("imagenet", ["method=mocov2plus"]).method, MoCoV2PlusConfig)


@pytest.mark.parametrize(
    "changes",
    [["sharpness=3", "method=ressl"], ["method.name=ressl", "method.sharpness=3"]],
)
def test_a_setting_of_another_method_is_refused_in_any_order(changes: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config("imagenet", [*changes, "hue=3", "epoch=1"])
    for words in ("ressl has no setting sharpness", "views.hue = 3", "did you mean epochs?"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name", ["mocov2plus", "moco", "co2", "jcl", "alignuniform"])
def test_what_a_recipe_gives_xmoco_beyond_the_paper_stays_with_it(name: str) -> None:
    ours, method = (load_config("imagenette", o).method for o in ([], [f"method={name}"]))
    assert (ours.subject, method.subject) == ("xmoco+", name)
    assert not method.weak_keys
    assert not getattr(method, "local_crops", 0)
    assert method.key_momentum == ours.key_momentum == 0.99


@pytest.mark.parametrize(
    ("recipe", "name", "field"),
    [("alignuniform", "moco", "symmetric"), ("swav-imagenet", "mocov2plus", "local_crops")],
)
def test_what_another_method_has_as_published_is_not_taken_over(
    recipe: str, name: str, field: str
) -> None:
    method = load_config(recipe, [f"method={name}"]).method
    assert getattr(load_config(recipe).method, field)
    assert not getattr(method, field)
    assert method.subject == name


def test_settings_that_mean_the_same_are_taken_over_by_another_method() -> None:
    ours = load_config("imagenette").method
    assert load_config("imagenette", ["method=mocov2plus"]).method.temperature == ours.temperature
    simclr = load_config("imagenette", ["method=simclr"]).method
    assert simclr.temperature == type(simclr)().temperature != ours.temperature


def test_what_a_baseline_is_given_beyond_its_paper_is_in_its_name() -> None:
    weak = load_config("imagenette", ["method=mocov2plus", "weak_keys=true"]).method
    assert weak.subject == "mocov2plus+weak keys"
    assert load_config("ressl").method.subject == "ressl"  # which has them as published
    more = ["method=co2", "symmetric=true", "consistency_weight=1", "predictor_hidden=64"]
    subject = "co2+consistency+symmetric loss+predictor"
    assert load_config("demo", more).method.subject == subject


@pytest.mark.parametrize(
    ("recipe", "changes", "subject"),
    [
        ("sce-imagenet", "", "sce"),  # both directions and a predictor are published for ImageNet
        ("sce", "weak_keys=false", "sce+strong keys"),
        ("ressl", "weak_keys=false symmetric=true", "ressl+symmetric loss+strong keys"),
        ("mnn", "weak_keys=false", "mnn+strong keys"),
        ("msf", "", "msf"),
        ("mocov1", "symmetric=true", "moco+symmetric loss"),
        ("jcl", "symmetric=true", "jcl+symmetric loss"),
        ("alignuniform", "", "alignuniform"),  # symmetric in the table of XMoCo's paper
        ("alignuniform", "symmetric=false", "alignuniform"),  # as published
        ("mocov2plus", "teacher=keys", "mocov2plus"),  # nobody is taught
        ("mocov2plus", "teacher=keys label_weight=1", "mocov2plus+labels+keys as teacher"),
        ("cifar10", "teacher=keys label_weight=0", "xmoco+"),
        ("cifar10", "teacher=keys label_weight=0 consistency_weight=0", "xmoco"),
    ],
)
def test_what_differs_from_the_publication_is_in_the_name(
    recipe: str, changes: str, subject: str
) -> None:
    assert load_config(recipe, changes.split()).method.subject == subject


@pytest.mark.parametrize("name", ["simclr", "byol", "swav", "simsiam", "vicreg", "instdisc"])
def test_methods_without_banks(name: str) -> None:
    """They keep what they know of a recipe's method, and have no banks to set."""
    for recipe in recipe_names():
        assert (
            load_config(recipe, [f"method={name}"]).method
            == load_config(recipe, [f"method.name={name}"]).method
        )
    method = load_config("demo", [f"method={name}"]).method
    assert method.name == name
    if name == "byol":
        assert method.key_momentum == load_config("demo").method.key_momentum
    with pytest.raises(UserError, match=f"{name} has no setting bank_length"):
        load_config("demo", [f"method={name}", "bank_length=8"])


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ("positive_mass_end=0.5", "xmoco+"),
        ("positive_mass_end=0.9", "xmoco"),  # where it is already
        ("positive_mass_end=0.5 label_weight=0", "xmoco"),
    ],
)
def test_what_is_not_in_the_paper_has_another_name(changes: str, subject: str) -> None:
    assert load_config("demo", changes.split()).method.subject == subject
    with pytest.raises(UserError, match="mocov2plus has no setting positive_mass_end"):
        load_config("demo", ["method=mocov2plus", "positive_mass_end=0.5"])


@pytest.mark.parametrize("idea", ["consistency_weight", "label_weight"])
def test_xmocos_ideas_are_settings_of_methods_with_negatives(idea: str) -> None:
    """Off unless asked for; whose loss has one direction must take both."""
    for name in ("mocov2plus", "simclr", "co2", "jcl", "sce"):
        both = [] if name in ("mocov2plus", "simclr") else ["symmetric=true"]
        changes = [f"method={name}", *both]
        plain = load_config("cifar10", changes).method
        assert plain.added == ()
        published = not both or name == "sce"
        assert plain.subject == (name if published else f"{name}+symmetric loss")
        if (name, idea) == ("sce", "label_weight"):  # it has soft labels of its own
            continue
        method = load_config("cifar10", [*changes, f"{idea}=0.5"]).method
        assert method.added == (idea.removesuffix("_weight").replace("label", "labels"),)
        assert method.subject == plain.subject.replace(name, f"{name}+{method.added[0]}", 1)
        assert getattr(method, idea) == 0.5
    for name in ("co2", "jcl"):
        with pytest.raises(UserError) as caught:
            load_config("demo", [f"method={name}", f"{idea}=1"])
        assert str(caught.value) == (
            f"method.{idea} = 1: compares both sides of an image, so it needs symmetric=true."
        )
    for name in ("byol", "swav", "ressl", "alignuniform", "uota"):
        with pytest.raises(UserError, match=f"^{name} has no setting {idea}.$"):
            load_config("demo", [f"method={name}", f"{idea}=1"])


def test_the_views_of_swav() -> None:
    changes = ["method=swav", "local_crops=4", "local_size=24", "local_scale=[0.1, 0.3]"]
    method = load_config("demo", changes).method
    assert (method.local_crops, method.local_size, method.local_scale) == (4, 24, (0.1, 0.3))
    with pytest.raises(UserError, match=r"method\.local_scale = \[0, 1\]: must be 0 < low ≤ high"):
        load_config("demo", ["method=swav", "local_scale=[0, 1]"])


@pytest.mark.parametrize("choice", ["optim=lars", "optim.name=lars"])
def test_another_optimiser_keeps_what_fits(choice: str) -> None:
    before = load_config("demo").optim
    lars = load_config("demo", [choice, "trust=0.02", "sgd_momentum=0.8"]).optim
    assert isinstance(lars, LARSConfig)
    assert (lars.trust, lars.sgd_momentum) == (0.02, 0.8)
    assert (lars.learning_rate, lars.weight_decay) == (before.learning_rate, before.weight_decay)
    adamw = load_config("imagenet", ["optim=adamw", "betas=[0.9, 0.95]"]).optim  # has sgd_momentum
    assert isinstance(adamw, AdamWConfig)
    assert adamw.betas == (0.9, 0.95)
    assert adamw.cosine_offset == load_config("imagenet").optim.cosine_offset
    with pytest.raises(UserError, match=r"optim\.betas = \[0.9, 1\]: must be two numbers from 0"):
        load_config("demo", ["optim=adamw", "betas=[0.9, 1]"])


@pytest.mark.parametrize("recipe", ["imagenette", "imagenet", "barlowtwins"])
def test_rates_and_decays_of_adamw_and_others_are_not_those_of_each_other(recipe: str) -> None:
    own = AdamWConfig()
    adamw = load_config(recipe, ["optim=adamw"]).optim
    assert (adamw.learning_rate, adamw.weight_decay) == (own.learning_rate, own.weight_decay)
    assert adamw.learning_rate < 1e-3
    asked = load_config(recipe, ["optim=adamw", "learning_rate=0.002", "weight_decay=0.1"]).optim
    assert (asked.learning_rate, asked.weight_decay) == (0.002, 0.1)
    below = load_config(recipe, ["learning_rate=0.002"], below={"optim": "adamw"}).optim
    assert (below.name, below.learning_rate) == ("adamw", 0.002)


def test_a_recipe_of_adamw_leaves_its_rate_to_no_other(tmp_path: Path) -> None:
    recipe = tmp_path / "adamw.yaml"
    recipe.write_text("optim: {name: adamw, learning_rate: 1e-3, warmup_epochs: 3.0}\n")
    sgd = load_config(recipe, ["optim=sgd"]).optim
    assert (sgd.learning_rate, sgd.warmup_epochs) == (SGDConfig().learning_rate, 3)


def test_a_recipe_for_another_optimiser_drops_what_it_lacks(tmp_path: Path) -> None:
    parent, child, grandchild = (tmp_path / f"{name}.yaml" for name in ("one", "two", "three"))
    parent.write_text("optim: {name: lars, trust: 0.02, sgd_momentum: 0.8, weight_decay: 0.5}\n")
    child.write_text("inherits: one.yaml\noptim: adamw\n")
    adamw = load_config(child).optim
    assert isinstance(adamw, AdamWConfig)
    assert adamw.weight_decay == 0.05
    grandchild.write_text("inherits: two.yaml\noptim: {name: lars, learning_rate: 0.3}\n")
    lars = load_config(grandchild).optim
    assert isinstance(lars, LARSConfig)  # what was dropped on the way is not found again
    assert (lars.trust, lars.sgd_momentum, lars.weight_decay) == (0.001, 0.9, 1e-4)
    grandchild.write_text("inherits: two.yaml\noptim: {trust: 0.1}\n")
    with pytest.raises(UserError, match="adamw has no setting trust"):
        load_config(grandchild)
    both = "inherits: one.yaml\noptim: {name: sgd, trust: 0.1}\n"
    child.write_text(both)
    with pytest.raises(UserError, match="sgd has no setting trust"):
        load_config(child)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("epochs=0", "train.epochs = 0"),
        ("epochs=2.5", "train.epochs = 2.5: must be a whole number"),
        ("epochs=true", "train.epochs"),
        ("batch=1", "train.batch = 1"),
        ("temperature=0", "method.temperature"),
        ("temperature=.nan", "method.temperature"),
        ("learning_rate=.inf", "optim.learning_rate"),
        ("positive_mass=1.1", "method.positive_mass"),
        ("positive_mass_end=0", "method.positive_mass_end"),
        ("head_layers=6", "model.head_layers"),
        ("backbone=resnet19", "model.backbone"),
        ("crop_scale=[0, 1]", "crop_scale"),
        ("crop_scale=0.5", "views.crop_scale = 0.5: must be two numbers"),
        ("crop_scale=[0.1, 0.2, 0.3]", "must be two numbers"),
        ("crop_scale=[a, .nan]", "must be two numbers"),
        ("crop_ratio=[2, 1]", "crop_ratio"),
        ("blur_sigma=[0, 1]", "blur_sigma"),
        ("blur_kernel=4", "views.blur_kernel = 4: must be odd"),
        ("std=[0, 1, 1]", "input.std = [0, 1, 1]: must be positive"),
        ("mean=[1, 2]", "input.mean = [1, 2]: must be three numbers"),
        ("download=maybe", "data.download = 'maybe': must be true or false"),
        ("source=", "data.source = '': must not be empty"),
        ("method=[1]", "unknown method [1]"),
        ("method=simclear", "unknown method 'simclear' (did you mean simclr?); there are xmoco, "),
        ("optim=[1]", "unknown optimiser [1]; there are sgd, lars, adamw."),
        ("optim=lar", "unknown optimiser 'lar' (did you mean lars?); there are sgd, lars, adamw."),
        ("optim.name=adam", "unknown optimiser 'adam' (did you mean adamw?)"),
        ("trust=0.01", "sgd has no setting trust"),
        ("optim.betas=[0.9, 0.99]", "sgd has no setting betas"),
        ("sgd_momentum=1", "optim.sgd_momentum = 1"),
        ("queue_length=3", "xmoco has no setting queue_length"),
        ("label_weight=1.5", "method.label_weight = 1.5"),
        ("consistency_weight=-1", "method.consistency_weight = -1"),
        ("epochs=2024-13-45", "train.epochs = '2024-13-45'"),
        ("lr=1", "did you mean learning_rate?"),
        ("tau=1", "did you mean temperature?"),
        ("K=1", "did you mean bank_length?"),
        ("optim.wd=1", "did you mean weight_decay?"),
        ("workers=1", "did you mean readers?"),
        ("bank_lenght=3", "did you mean bank_length?"),
        ("trian.epochs=3", "did you mean train.epochs?"),
        ("optim.epochs=3", "unknown key 'optim.epochs'"),
        ("=3", "unknown key ''"),
    ],
)
def test_mistakes_are_named(change: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("demo", [change])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(UserError) as caught:
        load_config("demo", ["epochs=0", "nonsense", "batch=-1"], {"hue": 3.0, "colour": 1})
    for words in ("train.epochs", "'nonsense'", "train.batch", "views.hue", "unknown key 'colour'"):
        assert words in str(caught.value)


def test_all_mistakes_within_a_section_at_once() -> None:
    wrong = {
        "crop_scale": "[0.1, 0.2, 0.3]",
        "crop_ratio": "[2, 1]",
        "blur_sigma": "[0, 1]",
        "blur_kernel": "4",
        "hue": "3",
    }
    with pytest.raises(UserError) as caught:
        load_config("demo", [f"{key}={text}" for key, text in wrong.items()])
    for key, text in wrong.items():
        assert f"views.{key} = {text}: must be" in str(caught.value)


def test_other_names_are_suggestions_for_settings_that_exist() -> None:
    fields = {field for _, field in all_fields()}
    assert set(OTHER_NAMES.values()) <= fields
    assert not set(OTHER_NAMES) & fields


@given(
    epochs=st.integers(1, 10**6),
    momentum=st.floats(0, 0.999),
    scale=st.floats(0.01, 1),
    source=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1),
    method=st.sampled_from(sorted(KINDS["method"])),
    optim=st.sampled_from(["sgd", "lars"]),
)
@example(epochs=1, momentum=1e-5, scale=0.5, source="1e5", method="xmoco", optim="sgd")
@settings(deadline=None)
def test_config_yaml_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    epochs: int,
    momentum: float,
    scale: float,
    source: str,
    method: str,
    optim: str,
) -> None:
    changes = {"epochs": epochs, "sgd_momentum": momentum, "crop_scale": (scale, 1.0)}
    config = load_config(
        "demo", [f"method={method}", f"optim={optim}"], changes | {"source": source}
    )
    file = tmp_path_factory.getbasetemp() / "config.yaml"
    file.write_text(config_yaml(config), encoding="utf-8")
    assert read_config(file) == config
    assert load_config(file) == config


def test_a_config_changed_by_hand_reads_as_a_recipe_does(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("optim: {weight_decay: 1e-4}\n")
    assert read_config(tmp_path / "config.yaml") == load_config(None, ["weight_decay=1e-4"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        (b"\xff\xfe\xff", "it is not a text file"),
        (b"train: [", "it is not valid yaml"),
        (b"", "it holds no settings"),
        (b"train: 3", "train = 3: must hold keys and values"),
        (b"method: 3", "method = 3: must hold keys and values"),
        (b"train: {epochs: 0}\noptim: {lr: 3}", "train.epochs = 0"),
    ],
)
def test_a_config_that_cannot_be_used(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "config.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"{file} cannot be used: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_differences_leave_out_where_it_runs() -> None:
    old = load_config("demo")
    new = load_config("demo", ["epochs=9", "devices=4", "method=simclr"])
    found = differences(old, new)
    assert "train.epochs: 6 → 9" in found
    assert "method.name: xmoco → simclr" in found
    assert "method.history: queries → None" in found
    assert not any(text.startswith("run.") for text in found)
    assert differences(old, old) == []


def test_automatic_batch_norm_is_another_setting_than_what_it_chooses() -> None:
    auto, split = (load_config("demo", [f"batch_norm={kind}"]) for kind in ("auto", "split"))
    assert differences(auto, auto) == []
    assert differences(split, auto) == ["model.batch_norm: split → auto"]
    assert differences(auto, split) == ["model.batch_norm: auto → split"]


def test_descriptions_cover_every_field() -> None:
    named = set()
    for changes in (
        *([f"method={name}"] for name in KINDS["method"]),
        *([f"optim={name}"] for name in KINDS["optim"]),
    ):
        described = setting_descriptions(load_config("imagenet", changes))
        named |= {(section, key) for section, fields in described.items() for key, _, _ in fields}
        assert all(meaning for fields in described.values() for _, _, meaning in fields)
    assert named == set(all_fields())
    described = setting_descriptions(load_config("imagenet"))
    assert ("learning_rate", "0.0675") in [row[:2] for row in described["optim"]]


def test_nearest() -> None:
    assert nearest("epoch", ["epochs", "batch"]) == " (did you mean epochs?)"
    assert nearest("xyz", ["epochs", "batch"]) == ""


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("views.size", "input.size"),
        ("views.mean", "input.mean"),
        ("views.judged_size", "eval_size"),
        ("data.resident_gib", "preload_gib"),
    ],
)
def test_settings_that_moved_are_found_again(tmp_path: Path, key: str, meant: str) -> None:
    section, _, field = key.partition(".")
    recipe = tmp_path / "old.yaml"
    recipe.write_text(f"{section}: {{{field}: 32}}")
    with pytest.raises(UserError, match=rf"unknown key '{key}' \(did you mean {meant}\?\)"):
        load_config(recipe)
