"""benchmarks/pack.py: packages for a machine without network."""

import importlib
import os
import site
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import ModuleType

import pytest
from packaging.utils import canonicalize_name


@pytest.fixture(scope="module")
def program(benchmarks: None) -> ModuleType:
    return importlib.import_module("pack")


def test_what_packages_need_is_found_and_what_is_there_is_left_out(program: ModuleType) -> None:
    there = ["torch", "torchvision", "numpy"]
    found = program.needed(["xmoco"], extras=["timm"], there=there, python="3.12")
    assert {"timm", "rich", "markdown-it-py", "mdurl"} <= found  # mdurl by two packages between
    # What only torch needs; what is there; and what another extra brings.
    assert not found & {"torch", "sympy", "numpy", "hotcoco", "onnx"}


@pytest.fixture
def chosen(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., set[str]]:
    """Which packages a call takes, which are not fetched."""

    def call(*arguments: str) -> set[str]:
        found: list[set[str]] = []
        out = str(tmp_path / "packages.tar.xz")
        monkeypatch.setattr(program, "install", lambda names, *_: found.append(names))
        monkeypatch.setattr(sys, "argv", ["pack.py", out, *arguments])
        program.main()
        return found[0]

    return call


def test_what_is_added_to_a_pack_and_what_is_not_in_it(
    chosen: Callable[..., set[str]], program: ModuleType
) -> None:
    usual, smallest = chosen(), chosen("--no-tests", "--extras")
    assert smallest < usual
    assert {"timm", "hotcoco", *program.TESTS} <= usual - smallest
    assert {"pydantic", "matplotlib", "tensorboard"} <= smallest
    assert chosen("--also", "lightly") - usual == {"lightly", "tqdm"}
    assert chosen("--no-tests", "--also", "lightly", "execnet") >= {"lightly", "execnet", "timm"}


def test_every_package_has_a_wheel_in_the_lock_file(
    chosen: Callable[..., set[str]], program: ModuleType
) -> None:
    """It names a package's files by their hashes, of which one is the source's, if there is one."""
    names = chosen("--also", "lightly")
    lock = (program.TREE / "requirements.lock").read_text(encoding="utf-8")
    files = {
        section.partition("==")[0]: section.count("--hash=sha256:")
        for section in program.sections(lock, names)
    }
    assert files.keys() == names
    # A single file may be the source, as antlr4's is, which hydra needs; known to be a wheel are:
    assert {name for name, count in files.items() if count < 2} <= {"tensorboard"}


def test_a_package_that_is_not_installed_is_named(program: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no-such-package is not installed here"):
        program.needed(["no-such-package"], extras=[], there=[], python="3.12")


def test_what_one_version_of_python_needs(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another than the one here."""
    needs = [
        "old; python_version < '3.12'",
        "new; python_version >= '3.12'",
        "plugin; extra == 'x'",
    ]
    monkeypatch.setattr(program, "requires", {"app": needs}.get)
    for python, found in (("3.11", "old"), ("3.12", "new"), ("3.13", "new")):
        assert program.needed(["app"], [], [], python) == {"app", found}


def test_what_is_not_read_is_left_out(program: ModuleType, tmp_path: Path) -> None:
    fonts = "matplotlib/mpl-data/fonts"
    kept = ["timm/data/loader.py", "fontTools/agl.py", "fontTools/misc/fixedTools.py", "cabinet.py"]
    kept += [f"{fonts}/ttf/DejaVuSans.ttf", f"{fonts}/ttf/DejaVuSans-Bold.ttf"]
    kept += ["matplotlib/_path.so", "pygments/lexers/python.py", "pygments/lexer.py"]
    left = ["bin/pytest", "rich/a.pyi", "matplotlib/tests/test_x.py", "fontTools/pens/basePen.py"]
    left += [f"{fonts}/ttf/DejaVuSansMono.ttf", f"{fonts}/ttf/cmr10.ttf", f"{fonts}/afm/x.afm"]
    left += ["matplotlib/_qhull.x86_64.so", "pygments/lexers/ada.py", "fontTools/misc/a.x86_64.so"]
    for name in [*kept, *left]:
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    out = tmp_path / "new folder" / "packages.tar.xz"
    program.pack(tmp_path / "site", out)
    with tarfile.open(out) as archive:
        assert archive.getnames() == sorted(kept)


USE = """
import sys
before = set(sys.modules)  # by the environment itself
import in_lightly  # and with it all that compare.py imports
import torch
from matplotlib.font_manager import fontManager  # lists all fonts when first imported
from xmoco.report.curves import panel_svg
from xmoco.report.history import Series
from xmoco.report.panels import Panel
from xmoco.report.sheets import views_sheet

seen = set()
sys.addaudithook(lambda event, given: event == "open" and seen.add(str(given[0])))
panel_svg(Panel("Loss", "nats", {"ours": Series([1, 2], [1e6, 3e6])}, {"chance": 2e6}))
views_sheet(["λ × ξ"], [torch.zeros(2, 3, 8, 8, dtype=torch.uint8)])
modules = [module for name, module in sys.modules.items() if name not in before]
seen |= {str(getattr(module, "__file__", None)) for module in modules}
print(*seen, sep="\\n")
"""


def test_measuring_and_reporting_read_nothing_that_is_left_out(
    program: ModuleType, tmp_path: Path
) -> None:
    pytest.importorskip("lightly", reason="lightly is an extra: pip install '.[examples]'")
    paths = [str(program.TREE / folder) for folder in ("benchmarks", "examples", "src")]
    seen = subprocess.run(
        [sys.executable, "-c", USE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "MPLCONFIGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    prefixes = tuple(f"{folder}/" for folder in site.getsitepackages())
    names = {name.removeprefix(p) for name in seen for p in prefixes if name.startswith(p)}
    assert {"matplotlib/figure.py", "lightly/loss/__init__.py"} <= names
    assert any(name.endswith("DejaVuSans-Bold.ttf") for name in names)
    assert not {name for name in names if program.UNREAD.match(name) and name[-4:] != ".pyc"}
    providers = packages_distributions()
    for folder in {name.partition("/")[0] for name in names} & providers.keys():
        packages = {canonicalize_name(package) for package in providers[folder]}
        assert not packages <= {*program.UNUSED}, folder  # what another brings, too, is there
