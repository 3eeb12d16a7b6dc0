"""Uploads the adapter of a run to the Hugging Face Hub. It needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

from fedllm.common.console import stage, warn
from fedllm.common.errors import RunError, UserError
from fedllm.results.names import NO_LICENCE
from fedllm.results.reader import require_run_folder

CONFIGS = ("adapter_config.json", "config.json")


def folder_to_push(folder: str | Path) -> Path:
    """The folder that `push_adapter` uploads: a run's adapter/ or model/, or an exported folder.

    Raises UserError if there is none.
    """
    folder = Path(folder).expanduser()
    if any((folder / config).is_file() for config in CONFIGS):
        return folder
    require_run_folder(folder)
    for name, config in zip(("adapter", "model"), CONFIGS, strict=True):
        if (folder / name / config).is_file():
            return folder / name
    raise UserError(f"{folder}: has no adapter yet, as it is not finished; write one first: fedllm export {folder}")


def push_adapter(folder: str | Path, name: str, *, private: bool = False) -> str:
    """Uploads a run's adapter/ with its model card to the Hub, and returns the address; the same as `fedllm push`.

    folder: a run folder, or a folder that was exported. name: owner/name on the Hub; the repository is made if it is
    not there. private: a new repository is only for its owner. The token is that of `hf auth login`, or HF_TOKEN; the
    Hub is the one that HF_ENDPOINT names.
    Raises UserError without a token or the right to write, or for a name that cannot be one, RunError if the Hub
    cannot be reached.
    """
    source = folder_to_push(folder)
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import disable_progress_bars, validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"{name}: is no name on the Hub, expected owner/name: {error}") from error
    if get_token() is None:
        raise UserError(
            "the Hub takes uploads with a token alone, and there is none; run hf auth login, or set HF_TOKEN"
        )
    _warn_of_path(source)
    _warn_of_licence(source)
    disable_progress_bars()  # the stage below says what is going on
    api = HfApi()
    try:
        with stage(f"uploading {source} to {api.endpoint}/{name}", at_once=True):
            address = api.create_repo(name, private=private or None, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=source, commit_message="Upload from fedllm")
    except HfHubHTTPError as error:
        code = error.response.status_code
        said = error.server_message or str(error).splitlines()[0]
        if code in (401, 403):
            raise UserError(
                f"{name}: the Hub refuses the upload ({code}: {said}); use a token that may write there, and a name "
                f"that begins with your own or your organisation's"
            ) from error
        raise RunError(f"{name}: the Hub did not take the upload ({code}: {said}); nothing here has changed") from error
    except Exception as error:  # no network, offline: the libraries raise many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RunError(
            f"{api.endpoint} cannot be reached: {reason}; look at the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
    return str(address)


def _warn_of_path(source: Path) -> None:
    """Warns of an adapter whose base has no name on the Hub: nobody else can load it, and it shows a path."""
    config = source / CONFIGS[0]
    if not config.is_file():
        return
    try:
        base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{config}: is not a readable adapter config: {error}") from error
    if Path(str(base)).is_absolute():
        warn(
            f"{config} names its base by the path {base}, which nobody else has; write the base's name on the Hub there"
        )


def _warn_of_licence(source: Path) -> None:
    """Warns of a model card whose licence nobody has filled in."""
    card = source / "README.md"
    if card.is_file() and NO_LICENCE in card.read_text(encoding="utf-8"):
        warn(f"{card} names no licence yet: replace its line '{NO_LICENCE}' by license: and its name on the Hub")
