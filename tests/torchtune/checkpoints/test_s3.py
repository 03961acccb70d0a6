"""Checkpoints in a real S3 server on this machine (moto's); skipped without ``pip install moto[server] s3fs``."""

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="needs the extra torchtune[s3]: pip install s3fs 'moto[server]'")
pytest.importorskip("moto.server", reason="needs a local S3 server: pip install 'moto[server]'")
import boto3
from moto.server import ThreadedMotoServer

from tests.torchtune.checkpoints.ranks import run
from tests.torchtune.checkpoints.small import load, write_folder
from torchtune.checkpoints import FullModelHFCheckpointer, ModelSource, _bucket
from torchtune.utils import UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server with one bucket; the environment names it and its credentials."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", address)
        patch.setenv("AWS_ACCESS_KEY_ID", "testing")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield address
    server.stop()


def start(source: Path, output: Path, url: str, *, resume: bool = False):
    checkpointer = FullModelHFCheckpointer(str(source), output_dir=str(output), upload=url)
    return checkpointer, checkpointer.open_output_dir(None, resume=resume)


def save_run(source: Path, output: Path, url: str, steps=(2, 4)) -> None:
    checkpointer, _ = start(source, output, url)
    model = load(source)
    for step in steps:
        checkpointer.save(f"step_{step}", model, state={"progress": {"seed": 1, "global_step": step}})
    checkpointer.close()


def test_s3_upload_resume_and_damage(server, source, tmp_path):
    url = f"s3://{BUCKET}/run"
    save_run(source, tmp_path / "run", url)
    client = boto3.client("s3")
    keys = {entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix="run/")["Contents"]}
    assert {"run/run.json", "run/step_2/.complete", "run/step_4/.manifest.json"} <= keys
    checkpointer, point = start(source, tmp_path / "fresh", url, resume=True)
    checkpointer.close()
    assert point.path == tmp_path / "fresh" / "step_4"
    client.put_object(Bucket=BUCKET, Key="run/step_4/model.safetensors", Body=b"half")
    checkpointer, point = start(source, tmp_path / "third", url, resume=True)
    checkpointer.close()
    assert point.path.name == "step_2"


def test_s3_large_file_is_sent_and_received_in_chunks(server, source, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    content = os.urandom(40 * 2**20 + 7)
    (folder / "file").write_bytes(content)
    remote = _bucket.RemoteFolder(f"s3://{BUCKET}/large", "upload")
    counts: list[int] = []
    sent = remote.upload(folder / "file", "file", counts.append)
    received = remote.download("file", folder / "again", counts.append)
    assert sent == received
    assert (folder / "again").read_bytes() == content
    assert max(counts) <= 16 * 2**20


def test_s3_bucket_that_does_not_exist_is_not_made(server, source, tmp_path):
    with pytest.raises(UserError, match=r"s3://nowhere/run cannot be written .*check that the bucket exists"):
        start(source, tmp_path / "run", "s3://nowhere/run")
    assert [bucket["Name"] for bucket in boto3.client("s3").list_buckets()["Buckets"]] == [BUCKET]


def test_s3_wrong_key_is_one_sentence(server, source, tmp_path):
    def check_keys_after(requests: str) -> None:
        headers = {"Content-Type": "text/plain"}
        address = f"{server}/moto-api/reset-auth"
        urllib.request.urlopen(urllib.request.Request(address, requests.encode(), headers, method="POST")).close()

    check_keys_after("0")
    try:
        with pytest.raises(UserError, match=r"s3://checkpoints/y cannot be listed .*check the credentials"):
            start(source, tmp_path / "run", f"s3://{BUCKET}/y")
    finally:
        check_keys_after("inf")


def test_s3_server_that_is_gone_is_one_sentence(source, tmp_path, monkeypatch, server):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(UserError, match=r"checkpointer.upload: s3://checkpoints/x cannot be listed .*the network"):
        start(source, tmp_path / "run", f"s3://{BUCKET}/x")
    s3fs.S3FileSystem.clear_instance_cache()


def test_s3_model_is_fetched_once(server, source, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHTUNE_CACHE", str(tmp_path / "cache"))
    client = boto3.client("s3")
    for path in source.iterdir():
        client.put_object(Bucket=BUCKET, Key=f"model/{path.name}", Body=path.read_bytes())
    first = ModelSource(f"s3://{BUCKET}/model")
    assert first.checkpoint_dir.is_relative_to(tmp_path / "cache")
    file = first.checkpoint_dir / "model.safetensors"
    fetched = file.stat().st_mtime_ns
    assert ModelSource(f"s3://{BUCKET}/model").checkpoint_dir == first.checkpoint_dir
    assert file.stat().st_mtime_ns == fetched
    assert file.read_bytes() == (source / "model.safetensors").read_bytes()


def _save_on_two_ranks(folder: Path) -> None:
    save_run(folder / "source", folder / "run", f"s3://{BUCKET}/two")


def _resume_on_two_ranks(folder: Path) -> None:
    checkpointer, point = start(folder / "source", folder / "fresh", f"s3://{BUCKET}/two", resume=True)
    checkpointer.close()
    assert point.path == folder / "fresh" / "step_4"


def test_two_ranks_save_to_and_resume_from_s3(server, tmp_path):
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # a fork cannot use the connections of this process
    write_folder(tmp_path / "source")
    run(2, [_save_on_two_ranks, _resume_on_two_ranks], tmp_path)
