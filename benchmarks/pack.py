"""Pack what xmoco needs for a machine that has torch but no network, to measure there.

    .venv/bin/python benchmarks/pack.py .gpu/packages.tar.xz --python 3.12

The file has the packages of requirements.lock that xmoco, its extras ``--extras``, the tests and
``--also`` need, built for that version of Python on Linux, but for those that ``--there`` names and
what only they need. What measuring does not read (tests, sample data, stubs) is left out. On that
machine, in a copy of the project:

    mkdir /tmp/site && tar -xJf packages.tar.xz -C /tmp/site && python3 -m compileall -q /tmp/site
    PYTHONPATH=/tmp/site:src python3 benchmarks/compare.py …

``--also lightly`` adds what benchmarks/in_lightly.py needs. ``--no-tests --extras`` makes the
smallest file, with which ResNets are pre-trained, compared and reported on.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Container, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE = Path(__file__).resolve().parent.parent
THERE = (
    *("torch", "torchvision", "lightning-fabric", "numpy", "pillow", "pyyaml", "scikit-learn"),
    "huggingface-hub",
)
"""On a machine made for PyTorch."""
UNUSED = (
    # By TensorBoard's page, which is not looked at there.
    *("grpcio", "tensorboard-data-server", "werkzeug", "markdown", "setuptools"),
    # By lightly's own programs; and by contours, which are in no figure.
    *("hydra-core", "pytorch-lightning", "contourpy"),
)
"""Required, but not imported by what is measured."""
EXTRAS = ("detect", "timm")
TESTS = ("pytest", "pytest-xdist", "hypothesis", "pycocotools")
"""What make test-gpu and benchmarks/detect_metrics.py need besides."""
UNREAD = re.compile(
    r"bin/|.*\.(c|js|map|pyc|pyi|zip)$|timm/data/_info/"
    r"|matplotlib/(tests|mpl-data/(images|sample_data|stylelib|fonts/(afm|pdfcorefonts)))/"
    # Reports are written in this font; the last resort is opened beside any. Formulas need others.
    r"|matplotlib/mpl-data/fonts/ttf/(?!DejaVuSans(-Bold)?\.|LastResort)"
    r"|matplotlib/(_qhull|_tri|backends/_tkagg)\."
    # Of fontTools, matplotlib imports the names of glyphs; what is compiled, it has in Python, too.
    r"|fontTools/((?!misc)\w+/|.*\.so$)"
    # The languages that tracebacks and pytest are coloured as.
    r"|pygments/lexers/(?!__init__|_mapping|python|diff|special)"
    r"|dateutil/zoneinfo/.*\.gz$"
)
PINNED = re.compile(r"[\w.-]+(?===)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--platform", default="x86_64-manylinux_2_28", help="as uv names it")
    parser.add_argument("--there", nargs="*", default=THERE, help="packages it has already")
    parser.add_argument("--extras", nargs="*", default=EXTRAS, help="of xmoco")
    parser.add_argument(
        "--no-tests", action="store_true", help=f"without what tests need: {', '.join(TESTS)}"
    )
    parser.add_argument("--also", nargs="+", default=(), help="further packages")
    options = parser.parse_args()
    there = {canonicalize_name(name) for name in (*options.there, *UNUSED)}
    roots = ["xmoco", *(() if options.no_tests else TESTS), *options.also]
    names = needed(roots, options.extras, there, options.python)
    names -= {"xmoco"}
    with tempfile.TemporaryDirectory() as folder:
        install(names, options.python, options.platform, Path(folder))
        pack(Path(folder), options.out)
    size = options.out.stat().st_size / 2**20
    print(f"{len(names)} packages, {size:.1f} MiB: {', '.join(sorted(names))}")


def needed(
    roots: Iterable[str], extras: Iterable[str], there: Container[str], python: str
) -> set[str]:
    """The roots and all they need with that version of Python, by what is installed here."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in roots]
    while left:
        name = left.pop()
        if name in found or name in there:
            continue
        found.add(name)
        left += required_by(name, extras if name == "xmoco" else (), python)
    return found


def required_by(name: str, extras: Iterable[str], python: str) -> Iterator[str]:
    """Packages that this one names, for any of these extras or for none."""
    try:
        listed = requires(name) or []
    except PackageNotFoundError:
        sys.exit(f"pack.py: {name} is not installed here; what it needs is not known.")
    for requirement in map(Requirement, listed):
        marker = requirement.marker
        wanted = ({"extra": extra, "python_version": python} for extra in ("", *extras))
        if marker is None or any(map(marker.evaluate, wanted)):
            yield canonicalize_name(requirement.name)


def install(names: set[str], python: str, platform: str, folder: Path) -> None:
    """Those, at the versions of the lock file, whose hashes are checked."""
    pinned = folder.with_suffix(".lock")
    lock = (TREE / "requirements.lock").read_text(encoding="utf-8")
    pinned.write_text("".join(sections(lock, names)), encoding="utf-8")
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--no-deps"]
    target = ["--target", folder, "--python-version", python, "--python-platform", platform]
    checked = ["--only-binary", ":all:", "--require-hashes", "-r", pinned]
    try:
        if subprocess.run([*uv, *target, *checked], check=False).returncode:
            sys.exit("pack.py: uv could not install these packages; it says why above.")
    finally:
        pinned.unlink()


def sections(lock: str, names: set[str]) -> Iterator[str]:
    """What a lock file says of these packages."""
    for section in re.split(r"^(?=\w)", lock, flags=re.MULTILINE):
        named = PINNED.match(section)
        if named and canonicalize_name(named[0]) in names:
            yield section


def pack(folder: Path, out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for file in sorted(folder.rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.is_file() and not UNREAD.match(name):
                archive.add(file, name)


if __name__ == "__main__":
    main()
