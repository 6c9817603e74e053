"""GPipe under an import name that no other project on the package index has: `import gpipe_torch as gpipe`.

The public names are those of `gpipe`. They stay where another project's `gpipe` is installed into the same environment:
of the files it only replaces `gpipe/__init__.py`, which nothing here needs.
"""

from typing import TYPE_CHECKING

from gpipe.public_names import __all__ as __all__
from gpipe.public_names import __dir__ as __dir__
from gpipe.public_names import __getattr__ as __getattr__

if TYPE_CHECKING:
    from gpipe import *  # noqa: F403
