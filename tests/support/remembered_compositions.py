"""Command lines that several programs compose: to read what came of one takes a hundredth of what Hydra takes.

Interpolations stay as they are in what is kept, and what a run refuses is looked at afterwards, each time. Folders of
settings outside of this repository are read each time too.
"""

import os
import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobRuntime
from omegaconf import DictConfig

from gpipe.config.composed import CONF

_compose = ConfigLoaderImpl._load_configuration_impl
_SOURCES = {"pkg://hydra.conf", str(CONF), CONF.as_uri(), "structured://"}


def remember_compositions(folder: Path) -> None:
    """From now on, compose equal command lines once, in this process and in its forks.

    Args:
        folder: where they are kept, for several processes; it must be new, and belong to nobody else.
    """

    def compose(self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **how: Any) -> Any:
        sources = {source.path for source in self.config_search_path.get_path()}
        if not sources <= _SOURCES or any("searchpath" in word for word in overrides):
            return _compose(self, config_name, overrides, *args, **how)
        key = config_name, overrides, args, sorted(how.items()), JobRuntime.instance().get("name")
        path = folder / f"composed-{sha256(repr(key).encode()).hexdigest()}"
        if path.exists():
            found: DictConfig = pickle.loads(path.read_bytes())
            found.hydra.runtime.cwd = str(Path.cwd())
            return found
        found = _compose(self, config_name, overrides, *args, **how)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            unfinished.write_bytes(pickle.dumps(found))
            unfinished.rename(path)
        except OSError:  # the test lets the disk be full
            unfinished.unlink(missing_ok=True)
        return found

    ConfigLoaderImpl._load_configuration_impl = compose  # type: ignore[method-assign]
