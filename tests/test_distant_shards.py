"""A run on images in S3: read in place, through failures of the network, resumed exactly."""

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from helpers import (
    assert_done,
    assert_refused,
    assert_same_end,
    checkpoints,
    make_images,
    no_pictures,
    run_cli,
    start_cli,
    wait_until,
    write_recipe,
)

moto_server = pytest.importorskip("moto.server")
pytest.importorskip("obstore")

SHARDS = 3


class Bucket:
    """A bucket on a server of this process, which can go away and come back."""

    def __init__(self) -> None:
        self.server: Any = moto_server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        import boto3

        # Not by the environment: obstore is to find its way by itself.
        self.client = boto3.client(
            "s3",
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="id",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self.client.create_bucket(Bucket="bucket")

    def put(self, folder: Path) -> None:
        for path in folder.glob("*.tar"):
            key = f"photos/{path.name}"
            self.client.put_object(Bucket="bucket", Key=key, Body=path.read_bytes())

    def be_away(self, seconds: float) -> None:
        self.server.stop()
        time.sleep(seconds)
        self.server = moto_server.ThreadedMotoServer("127.0.0.1", port=self.port, verbose=False)
        self.server.start()


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    bucket = Bucket()
    yield bucket
    bucket.server.stop()


def be_in(environment: dict[str, str]) -> None:
    os.environ.update(environment)


def write_shards(folder: Path) -> Path:
    import tarfile

    images = sorted(make_images(folder / "images", each=12).rglob("*.png"))
    (folder / "shards").mkdir()
    for shard in range(SHARDS):
        with tarfile.open(folder / "shards" / f"train-{shard}.tar", "w") as archive:
            for image in images[shard::SHARDS]:
                archive.add(image, image.relative_to(folder / "images"))
    return folder / "shards"


def test_a_run_on_s3_is_that_on_disk_though_it_was_interrupted(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shards = write_shards(tmp_path)
    bucket.put(shards)
    recipe = write_recipe(
        tmp_path / "fast.yaml",
        shards,
        data={"source": str(shards), "preload_gib": 0.0},
        train={"epochs": 5, "checkpoint_minutes": 0.0},
        monitor={"knn_every": 0},
    )
    with no_pictures():
        assert_done(run_cli("pretrain", "--recipe", recipe, "--out", tmp_path / "near"))
    url = f"s3://bucket/photos/train-{{0..{SHARDS - 1}}}.tar"
    far, said = tmp_path / "far", tmp_path / "said"
    environment = bucket.environment | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = start_cli(
        *("pretrain", "--recipe", recipe, "--data", url, "--out", far),
        said=said,
        prepare=partial(be_in, environment),
    )
    try:
        wait_until(lambda: checkpoints(far) or not process.is_alive())
        bucket.be_away(0.5)
        reached = len(said.read_text())
        wait_until(
            lambda: (
                any(path.name >= "step-000000007" for path in checkpoints(far))
                or not process.is_alive()
            )
        )
        assert process.is_alive(), said.read_text()[reached:]
        os.kill(process.pid or 0, signal.SIGKILL)
    finally:
        process.kill()
        process.join()
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    with no_pictures():
        assert_done(run_cli("pretrain", "--resume", "--out", far))
    assert "shards train: 48 images, 4 classes" in (far / "train.log").read_text()
    assert_same_end(far, tmp_path / "near")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("s3://bucket/nothing", "there are no shards (tar, parquet) in nothing."),
        ("s3://bucket/photos/train-{7..8}.tar", "cannot read s3://bucket/photos/train-7.tar: "),
        ("s3://nobodys-bucket/photos", "cannot list what is below s3://nobodys-bucket/photos ("),
        ("ftp://host/a.tar", "cannot open ftp://host: "),
    ],
)
def test_what_is_not_there_is_told(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    recipe = write_recipe(tmp_path / "fast.yaml", "images")
    done = run_cli("pretrain", "--recipe", recipe, "--data", source, "--out", tmp_path / "run")
    assert_refused(done, words)
    assert not (tmp_path / "run").exists()
