"""Where a model's files are: the one that ships with the package, a folder, or a Hugging Face hub id.

Invariant: what is returned is a local folder with a config.json; the network is asked only for files not yet here.
"""

import re
from importlib.resources import files
from pathlib import Path

from truegate.errors import UserError

EMBEDDED = "ledger"  # also accepted by name
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_WANTED = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken")


def model_folder(model: str | None) -> Path:
    """The folder of `model`: None or "ledger" is the embedded one, then a folder on disk, then a hub id[@revision]."""
    if model is None or (model == EMBEDDED and not Path(model).exists()):
        return _checked(Path(str(files("truegate"))) / "assets" / EMBEDDED, "the embedded model")
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _checked(folder, f"model folder {model}")
    if folder.exists():
        raise UserError(f"{model} is a file: give the folder that holds config.json and *.safetensors")
    if model.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(model):
        raise UserError(f"there is no folder {model}, and it is no hub id of the form owner/name")
    return _checked(_from_hub(model), f"hub model {model}")


def model_name(model: str | None) -> str:
    """The name a server gives the model: a hub id as it is, a folder's last part, "ledger" for the embedded one."""
    if model is None:
        return EMBEDDED
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser().resolve().name
    return model


def _checked(folder: Path, what: str) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(f"{what} has no config.json in {folder}: a Hugging Face checkpoint is wanted")
    return folder


def _from_hub(model: str) -> Path:
    repo, _, revision = model.partition("@")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"{model} is a hub id and huggingface_hub is not installed: pip install 'truegate[serve]'"
        ) from None
    wanted = {"repo_id": repo, "revision": revision or None, "allow_patterns": list(_WANTED)}
    try:
        cached = Path(snapshot_download(**wanted, local_files_only=True))
        if _complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    try:
        folder = Path(snapshot_download(**wanted))
        if _complete(folder):
            return folder
        cause = "it has no more than part of the files"  # what the client returns when it cannot reach the hub
    except Exception as error:  # the hub's client raises a dozen kinds; each means: not to be had
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    raise UserError(
        f"{model} is neither a folder nor whole in the local hub cache, and the hub did not give it ({cause}): "
        "check the name and the network, or download it elsewhere and pass its folder"
    )


def _complete(folder: Path) -> bool:
    """Whether a cached snapshot has its config and every shard its index names."""
    import json

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_text())["weight_map"].values())
        return (folder / "config.json").is_file() and all((folder / shard).is_file() for shard in shards)
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
