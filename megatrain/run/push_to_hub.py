"""Upload a model folder to the Hugging Face hub, with a model card.

The card starts with the metadata that the hub reads (base model, data sets, tags). A new repository is private.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

from megatrain.errors import ExportError, first_line
from megatrain.run.history import config_of
from megatrain.system.paths import read_text

CARD = "README.md"
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def refuse_push(name: str, where: str) -> None:
    """Raise `ExportError` if `name` is not a valid repository name, or the user is not logged in to the hub.

    where: the key or option that holds the name.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ExportError(first_line(error), where=where, fix="name it organisation/model") from error
    try:
        HfApi().whoami(cache=True)
    except LocalTokenNotFoundError as error:
        raise ExportError("you are not logged in to the hub", where=where, fix=LOG_IN) from error
    except Exception as error:  # the client's network errors have no common base but this
        raise ExportError(f"the hub does not answer ({first_line(error)})", where=where, fix=LOG_IN) from error


def push(folder: Path, name: str, where: str, run: Path | None = None) -> str:
    """Upload the model in `folder` as `name`, and return its URL.

    run: folder of the run that trained it, whose configuration names base model and data. The card is uploaded last, so
    a repository with a card is complete. Raises `ExportError` if the hub refuses; files already uploaded stay there.
    """
    api = HfApi()
    try:
        card = _data(run, api).to_yaml()
        text = f"---\n{card}\n---\n" + (f"\n{read_text(folder / CARD)}" if (folder / CARD).exists() else "")
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, ignore_patterns=[CARD], commit_message="Model")
        with TemporaryDirectory() as beside:
            (Path(beside) / CARD).write_text(text, encoding="utf-8")
            api.upload_folder(repo_id=address.repo_id, folder_path=beside, commit_message="Card")
    except HfHubHTTPError as error:
        code = error.response.status_code
        fix = LOG_IN if code in (401, 403) else "push again; files already uploaded are not sent again"
        raise ExportError(f"the hub refuses {name} ({first_line(error)})", where=where, fix=fix) from error
    except Exception as error:  # the client's network errors have no common base but this
        fix = "push again; files already uploaded are not sent again"
        raise ExportError(f"could not be pushed ({first_line(error)})", where=where, fix=fix) from error
    return str(address)


def _data(run: Path | None, api: HfApi) -> ModelCardData:
    """Metadata for the card. Base model and data sets are included if they are names on the hub, not paths."""
    tree = {} if run is None else config_of(run)
    model, data, adapter = (tree.get(name) for name in ("model", "data", "adapter"))
    base = model.get("path") if isinstance(model, dict) else None
    sources = data.get("sources") if isinstance(data, dict) else None
    named = [sources] if isinstance(sources, str) else sources or []
    return ModelCardData(
        base_model=base if _is_of_hub(api, base, "model") else None,
        datasets=[each for each in named if _is_of_hub(api, each, "dataset")] or None,
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["megatrain"],
    )


def _is_of_hub(api: HfApi, name: object, kind: str) -> bool:
    """Whether `name` is on the hub; it could also be a path that looks like a name and no longer exists here."""
    if not isinstance(name, str) or Path(name).exists():
        return False
    try:
        return api.repo_exists(name, repo_type=kind)
    except HFValidationError:
        return False
