"""From a YAML file and `key=value` overrides to the tree, and back.

The last override of a key wins. Paths start at the working directory. Left out: including one file in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from megatrain.config.complaints import complaint
from megatrain.config.source import YamlDumper, parse, put, read
from megatrain.config.tree import Config
from megatrain.errors import ConfigError
from megatrain.files import shown, usable_path, written_whole


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the YAML file `path`, with dotted `key=value` overrides applied in order: the last one wins.

    Raises `ConfigError`, with file and line, for whatever is wrong with any of them.
    """
    path = usable_path(path)
    tree, places = read(path)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError("is not KEY=VALUE", where=repr(shown(override)), fix="write train.steps=100, say")
        place = f"override {shown(override)!r}"
        put(tree, key.split("."), parse(text, place, {}))
        for inner in [one for one in places if one.startswith(f"{key}.")]:
            del places[inner]
        places[key] = place
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise complaint(error, path, places) from None


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration; `load_config` gives it back equal.

    Raises `ConfigError` where the disk refuses.
    """
    keys = yaml.dump(config.model_dump(mode="json"), Dumper=YamlDumper, sort_keys=False, allow_unicode=True)
    text = "# Every key of this run, defaults included. `megatrain train --keys` explains them.\n" + keys
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written ({error.strerror or error})"
        raise ConfigError(what, where=str(path), fix="free some space, or choose another output.folder") from error
