"""A model is found in the package, in a folder, in the local hub cache, or refused in one clear line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from truegate.errors import UserError
from truegate.hub import model_folder, model_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ASK = """
import sys
from truegate.errors import UserError
from truegate.hub import model_folder
try:
    print(model_folder(sys.argv[1]))
except UserError as error:
    print("refused:", error)
"""


def cached(home: Path, *, shards: int, present: int) -> Path:
    """A hub cache that holds owner/name with some of its shards."""
    repo = home / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    names = [f"model-{n}-of-{shards}.safetensors" for n in range(shards)]
    weights = ", ".join(f'"w{n}": "{name}"' for n, name in enumerate(names))
    (snapshot / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{weights}}}}}')
    for name in names[:present]:
        (snapshot / name).write_bytes(b"")
    return snapshot


def ask(model: str, home: Path) -> str:
    """In a process of its own: the hub's client reads its settings once; the endpoint is a closed port of loopback."""
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9"}
    env = {key: value for key, value in env.items() if not key.lower().endswith("_proxy")}
    out = subprocess.run([sys.executable, "-c", ASK, model], env=env, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    return out.stdout.strip()


def test_the_local_cache_answers_without_the_network(tmp_path):
    snapshot = cached(tmp_path, shards=2, present=2)
    assert ask("owner/name", tmp_path) == str(snapshot)
    assert ask("owner/name@main", tmp_path) == str(snapshot)


def test_a_half_downloaded_model_or_an_absent_one_is_refused_with_the_remedy(tmp_path):
    cached(tmp_path, shards=2, present=1)
    for model in ("owner/name", "owner/other"):
        line = ask(model, tmp_path)
        assert line.startswith(f"refused: {model} is neither a folder nor whole in the local hub cache")
        assert "pass its folder" in line


def test_folders_and_the_embedded_model(tmp_path):
    assert (model_folder(None) / "config.json").is_file()
    assert model_folder("ledger") == model_folder(None)
    assert model_name(None) == "ledger"
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match="has no config"):
        model_folder(str(tmp_path / "mine"))
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert model_folder(str(tmp_path / "mine")) == tmp_path / "mine"
    assert model_name(str(tmp_path / "mine")) == "mine"
    assert model_name("owner/name") == "owner/name"


@pytest.mark.parametrize("model", ["/nowhere/at/all", "./nowhere", "three/part/name", "name", "../x", "a b/c"])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(UserError, match="there is no folder"):
        model_folder(model)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is a file"):
        model_folder(str(tmp_path / "model.safetensors"))
