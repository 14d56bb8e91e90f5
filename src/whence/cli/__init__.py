"""The command `whence`."""

from whence.errors import Unsupported

try:
    import rich as _rich  # noqa: F401
    import typer as _typer  # noqa: F401
except ImportError as missing:
    raise Unsupported("The command `whence` needs its extra: in its source tree, pip install '.[cli]'.") from missing

# Commands are listed in the order of their modules.
from whence.cli import training as _training  # noqa: F401  isort: skip
from whence.cli import sweep as _sweep  # noqa: F401  isort: skip
from whence.cli import reading as _reading  # noqa: F401  isort: skip
from whence.cli import rounds as _rounds  # noqa: F401  isort: skip
from whence.cli import interventions as _interventions  # noqa: F401  isort: skip
from whence.cli import language as _language  # noqa: F401  isort: skip
from whence.cli import doctor as _doctor  # noqa: F401  isort: skip
from whence.cli.app import app as app
from whence.cli.app import main as main
