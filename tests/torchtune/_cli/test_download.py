"""tune download, against a small hub on this machine."""

import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.serving import serving

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"w" * 11 * 2**20,
    "original/params.json": b"{}",
}
COMMIT = "0" * 40
ROW = {"messages": [{"role": "user", "content": "why"}, {"role": "assistant", "content": "the cat"}]}
# Datasets -> their files.
DATASETS = {
    "own/rows": {"rows.jsonl": (json.dumps(ROW) + "\n").encode() * 3},
    "own/script": {"script.py": b"raise SystemExit"},
    "own/closed": None,  # gated
}


REPOSITORIES = ("own/model", "own/gated", "own/busy", "own/limited")


class Hub(BaseHTTPRequestHandler):
    """Knows the repositories and data sets above.

    Files of own/gated need the token ``right``, own/busy is always out of order, and own/limited has had too many
    requests.
    """

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        self.server.asked.append((self.command, self.path))
        path = self.path.partition("?")[0]
        repo = next((name for name in REPOSITORIES if f"{name}/" in f"{path}/"), None)
        dataset = next((name for name in DATASETS if f"datasets/{name}/" in f"{path}/"), None)
        if dataset is not None:
            self.dataset(dataset, path)
        elif repo is None:
            self.answer(401 if "Authorization" not in self.headers else 404, X_Error_Code="RepoNotFound")
        elif repo == "own/busy":
            self.answer(403, b"{}")
        elif repo == "own/limited":
            self.answer(429)
        elif "/resolve/" in path:
            self.file(repo, path.partition(f"/resolve/{COMMIT}/")[2])
        elif "/tree/" in path:
            rows = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": name} for name in FILES]
            self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
        else:
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    do_HEAD = do_GET

    def do_POST(self):
        """Takes what is uploaded with the token ``right``, in files that are small enough for the commit itself."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.asked.append((self.path, body))
        if self.headers.get("Authorization") != "Bearer right":
            self.answer(401, X_Error_Message="Invalid username or password")
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer(200, json.dumps({"files": files}).encode(), Content_Type="application/json")
        else:
            new = f"http://{self.headers['Host']}/own/new"
            reply = {"url": new, "commitUrl": f"{new}/commit/1", "commitOid": COMMIT}
            self.answer(200, json.dumps(reply).encode(), Content_Type="application/json")

    def dataset(self, dataset, path):
        files = DATASETS[dataset]
        name = path.rpartition("/")[2]
        if files is None:
            self.answer(403, X_Error_Code="GatedRepo")
        elif "/resolve/" in path and name in files:
            self.answer(200, files[name], ETag=f'"{name}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")
        elif "/resolve/" in path:
            self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        elif "/tree/" in path:
            rows = [{"type": "file", "path": name, "size": len(files[name]), "oid": name} for name in files]
            self.answer(200, json.dumps(rows).encode(), Content_Type="application/json")
        else:
            siblings = [{"rfilename": name} for name in files]
            info = {"id": dataset, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    def file(self, repo, name):
        if repo == "own/gated" and self.headers.get("Authorization") != "Bearer right":
            self.answer(403 if "Authorization" in self.headers else 401, X_Error_Code="GatedRepo")
        elif name == self.server.out_of_order and self.command == "GET":
            self.answer(500)
        elif name == self.server.cut and self.command == "GET" and "Range" not in self.headers:
            self.send_response(200)
            self.send_header("Content-Length", str(len(FILES[name])))
            self.end_headers()
            self.wfile.write(FILES[name][:-1])
            self.close_connection = True
        elif "Range" in self.headers:
            start = int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            self.server.ranges.append(start)
            span = f"bytes {start}-{len(FILES[name]) - 1}/{len(FILES[name])}"
            self.answer(
                206, FILES[name][start:], Content_Range=span, ETag=f'"{name.encode().hex()}"', X_Repo_Commit=COMMIT
            )
        else:
            self.answer(200, FILES[name], ETag=f'"{name.encode().hex()}"', X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    def log_message(self, *args):
        """Be quiet."""


@pytest.fixture
def hub():
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server, serving(server):
        server.asked = []
        server.ranges = []
        server.out_of_order = None
        server.cut = None
        server.url = f"http://127.0.0.1:{server.server_port}"
        yield server


def ask(endpoint, cache, *arguments, token):
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    environment.pop("HF_TOKEN", None)
    if token:
        environment["HF_TOKEN"] = token
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=environment)


@pytest.fixture
def folder(tmp_path):
    """Where downloads go."""
    return tmp_path / "here"


@pytest.fixture
def download(hub, folder):
    """``tune download`` into the folder."""

    def run(repo, *options, code=0, endpoint=hub.url, token=None):
        command = ["-m", "torchtune._cli.tune", "download", repo, "--output-dir", str(folder), *options]
        done = ask(endpoint, folder.parent / "cache", *command, token=token)
        assert done.returncode == code, done.stderr
        return done

    return run


def fetched(hub):
    """Names of the files that were asked for."""
    return {path.partition(f"{COMMIT}/")[2] for verb, path in hub.asked if verb == "GET" and "/resolve/" in path}


def test_every_file_of_a_model_is_downloaded(hub, folder, download):
    done = download("own/model")
    for name, body in FILES.items():
        assert (folder / name).read_bytes() == body
    assert json.loads((folder / "original_repo_id.json").read_text()) == {"repo_id": "own/model"}
    headline = "Successfully downloaded model repo and wrote to the following locations:\n"
    assert str(folder / "model.safetensors") in done.stdout.partition(headline)[2].splitlines()
    assert "Fetching 3 files: 100%" in done.stderr
    hub.asked.clear()
    download("own/model")
    assert not fetched(hub), "fetched twice"


def test_second_download_fetches_only_missing_files(hub, folder, download):
    hub.out_of_order = "original/params.json"
    broken = download("own/model", code=2)
    assert "status 500: run the same command again later, it fetches only what is missing." in broken.stderr
    assert not (folder / "original_repo_id.json").exists()
    downloaded = {path.name for path in folder.rglob("*") if path.name in FILES}
    hub.out_of_order = None
    hub.asked.clear()
    download("own/model")
    assert fetched(hub) == set(FILES) - downloaded


def test_interrupted_download_continues_at_its_byte(hub, folder, download):
    hub.cut = "model.safetensors"
    download("own/model")
    assert hub.ranges == [10 * 2**20]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_patterns_leave_files_out(folder, download):
    done = download("own/model", "--ignore-patterns", "original/*", "--ignore-patterns", "*.safetensors")
    assert "Ignoring files matching the following patterns: original/*, *.safetensors" in done.stdout
    visible = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert visible == {"config.json", "original_repo_id.json"}


def test_a_gated_model_needs_the_right_token(download):
    without = download("own/gated", code=2)
    assert without.stderr.splitlines()[-1].startswith("error: Repository 'own/gated' is gated, and a token")
    assert "the account of your token has no access" in download("own/gated", "--hf-token", "wrong", code=2).stderr
    download("own/gated", token="right")


@pytest.mark.parametrize(
    ("repo", "said"),
    [
        ("own/nothing", "Repository 'own/nothing' not found on the Hugging Face Hub"),
        ("own/busy", "answered with status 403: give --hf-token, or set HF_TOKEN to a token that may read it."),
        ("own/limited", "answered with status 429: it limits the number of requests, those without a token (HF_TOKEN)"),
        ("a/b/c", "'a/b/c' is not the name of a repository"),
    ],
)
def test_missing_repository_is_refused_in_one_sentence(repo, said, folder, download):
    done = download(repo, code=2)
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "original_repo_id.json").exists()


@pytest.fixture
def closed():
    """A url at which nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_download_without_network_fails(folder, download, closed):
    folder.mkdir()
    (folder / "config.json").write_text("{}")  # what a download that broke off may leave
    done = download("own/model", code=2, endpoint=closed)
    assert done.stderr.startswith("error: Failed to download 'own/model': no connection to")
    assert "Successfully" not in done.stdout


def test_unwritable_folder_is_refused(folder, download):
    folder.write_text("")
    done = download("own/model", code=2)
    assert f"{folder} cannot be written (" in done.stderr


def test_kaggle_is_refused_by_name(download):
    assert "Kaggle is not supported" in download("owner/model", "--source", "kaggle", code=2).stderr


def upload(endpoint, folder, repo_id, token):
    code = (
        "import sys, pathlib\nfrom torchtune._hub import upload\nfrom torchtune.utils import UserError\n"
        f"try:\n    print(upload(pathlib.Path({str(folder)!r}), {repo_id!r}))\n"
        "except UserError as error:\n    sys.exit(str(error))"
    )
    return ask(endpoint, folder.parent / "cache", "-c", code, token=token)


def test_an_export_is_uploaded_to_a_private_repository_without_hidden_files(hub, tmp_path):
    folder = tmp_path / "export"
    folder.mkdir()
    for name in ("config.json", ".complete"):
        (folder / name).write_text("{}")
    done = upload(hub.url, folder, "own/new", "right")
    assert (done.returncode, done.stdout) == (0, f"{hub.url}/own/new/commit/1\n"), done.stderr
    created = dict(hub.asked)["/api/repos/create"]
    committed = next(body for path, body in hub.asked if "/commit/" in path)
    assert {("name", "new"), ("organization", "own"), ("visibility", "private")} == json.loads(created).items()
    assert [row["value"]["path"] for row in map(json.loads, committed.splitlines()) if row["key"] == "file"] == [
        "config.json"
    ]


def test_a_hub_that_refuses_an_upload_is_one_sentence(hub, closed, tmp_path):
    (tmp_path / "export").mkdir()
    for endpoint, repo_id, token in (
        (hub.url, "own/new", "wrong"),
        (hub.url, "own/n/ew", "right"),
        (closed, "a/b", "x"),
    ):
        done = upload(endpoint, tmp_path / "export", repo_id, token)
        assert done.returncode == 1
        assert done.stderr.startswith(f"--push {repo_id}: {endpoint} does not take the files (")
        assert done.stderr.endswith(f"they are in {tmp_path / 'export'}.\n")
        assert done.stderr.count("\n") == 1


def test_model_of_one_line_comes_from_the_hub_once(hub, tmp_path):
    def ask_for(repo, token=None):
        command = ["-m", "torchtune._cli.tune", "cat", "any_lora", f"model={repo}"]
        return ask(hub.url, tmp_path / "cache", *command, token=token)

    first = ask_for("own/model")
    assert first.returncode == 0, first.stderr
    assert "checkpoint_dir: " + str(tmp_path / "cache") in first.stdout
    assert fetched(hub) == {"config.json", "model.safetensors"}
    hub.asked.clear()
    assert ask_for("own/model").stdout == first.stdout
    assert not fetched(hub), "fetched twice"
    gated = ask_for("own/gated")
    assert gated.returncode == 2
    assert "model=own/gated: " in gated.stderr
    assert "is gated, and a token of an account that has access is needed" in gated.stderr


def test_datasets_of_the_hub_are_read_or_refused_in_one_sentence(hub, tmp_path):
    code = f"""
from torchtune.data import DataError
from torchtune.datasets import load_rows
for name in {[*DATASETS, "own/none"]}:
    for streaming in (True, False):
        try:
            print(len(list(load_rows(name, split="train", streaming=streaming))), "rows")
        except DataError as error:
            print(error)
"""
    done = ask(hub.url, tmp_path / "cache", "-c", code, token=None)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8, lines
    assert lines[:2] == ["3 rows"] * 2
    for line, words in zip(
        lines[2::2], ("is made by a script, which is not run", "is gated", "no dataset"), strict=True
    ):
        assert words in line
    assert lines[2::2] == lines[3::2], "with streaming and without"
