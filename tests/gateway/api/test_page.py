"""The files of the page over HTTP: headers, caching, keys, and what is vendored."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import pytest
from voltapile.gateway.api.page import FOLDER, POLICY, _takes_gzip, add_page, read_files

VENDOR = FOLDER / "vendor"


async def test_the_page_and_its_files(client):
    async with client.get("/") as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert response.headers["Content-Security-Policy"] == POLICY
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        text = await response.text()
    assert text == (FOLDER / "index.html").read_text()
    named = re.findall(r'(?:href|src)="(page/[^"]+)"', text)
    assert len(named) >= 5
    for name in named:
        async with client.get(f"/{name}") as response:
            assert response.status == 200, name


def test_nothing_is_inline_and_nothing_is_elsewhere():
    """What the policy forbids would only be seen in a browser's log."""
    html = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script>|https?:", html)
    for path in FOLDER.glob("*.[jc]s*"):
        text = path.read_text()
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML", text), path
    assert "unsafe" not in POLICY


@pytest.mark.parametrize(
    "name", ["nothing.js", "../api/app.py", "%2e%2e/api/app.py", "vendor/renew.sh", "vendor"]
)
async def test_what_is_no_file_of_it(client, name):
    async with client.get(f"/page/{name}") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_packed_and_not(client):
    plain = (FOLDER / "main.js").read_bytes()
    async with client.get("/page/main.js", headers={"Accept-Encoding": "identity"}) as response:
        assert "Content-Encoding" not in response.headers
        assert await response.read() == plain
        tag = response.headers["ETag"]
    packed = {"Accept-Encoding": "br, gzip"}
    async with client.get("/page/main.js", headers=packed, auto_decompress=False) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        assert response.headers["Vary"] == "Accept-Encoding"
        assert response.headers["ETag"] != tag
        assert gzip.decompress(await response.read()) == plain


@pytest.mark.parametrize(
    ("accepted", "takes"),
    [("gzip", True), ("br, GZIP;q=0.5", True), ("", False), ("br", False), ("gzip; q=0", False)],
)
def test_who_takes_gzip(accepted, takes):
    assert _takes_gzip(accepted) is takes


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', "*"])
async def test_what_is_known_is_not_sent_again(client, form):
    async with client.get("/page/style.css") as response:
        tag = response.headers["ETag"]
    headers = {"If-None-Match": form.format(tag)}
    async with client.get("/page/style.css", headers=headers) as response:
        assert response.status == 304
        assert response.headers["ETag"] == tag
        assert await response.read() == b""
    async with client.get("/page/style.css", headers={"If-None-Match": '"other"'}) as response:
        assert response.status == 200


async def test_only_the_page_needs_no_key(serve):
    client = await serve(api_keys=["secret"])
    for path, status in (("/", 200), ("/page/main.js", 200), ("/page/no", 404), ("/status", 401)):
        async with client.get(path) as response:
            assert response.status == status, path


async def test_a_server_without_it(serve):
    client = await serve(webui=False)
    for path in ("/", "/page/main.js"):
        async with client.get(path) as response:
            assert response.status == 404


def test_an_installation_without_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr("voltapile.gateway.api.page.read_files", lambda: read_files(tmp_path))
    with pytest.raises(FileNotFoundError, match="--no-webui"):
        add_page(None)


def test_vendored_files_are_as_they_came():
    """renew.sh writes the sums; who edits a file by hand is found here."""
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ")) for line in lines)
    files = {path for path in VENDOR.rglob("*") if path.suffix in (".js", ".LICENSE")}
    assert {path.relative_to(VENDOR).as_posix() for path in files} == set(sums)
    for path in files:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest == sums[path.relative_to(VENDOR).as_posix()], path


def test_vendored_packages_are_locked_and_named():
    wanted = json.loads((VENDOR / "package.json").read_text())["dependencies"]
    locked = json.loads((VENDOR / "package-lock.json").read_text())["packages"]
    notice = (Path(__file__).parents[3] / "NOTICE").read_text()
    for name, version in wanted.items():
        entry = locked[f"node_modules/{name}"]
        assert entry["version"] == version
        assert entry["integrity"].startswith("sha512-")
        assert "resolved" not in entry  # a registry's address
        assert f"{name} {version}" in notice


def test_it_stays_small():
    """Tens of KiB over the wire, all languages included."""
    files = read_files().items()
    packed = sum(len(file.packed) for name, file in files if not name.endswith("LICENSE"))
    assert packed < 100 << 10
