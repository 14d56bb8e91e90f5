"""The page's template, scripts, styles and libraries, all in page/assets."""

from functools import cache
from importlib.resources import files

import jinja2
from markupsafe import Markup

from whence.page.content import compress_text

LIBRARIES = {"plotly": "vendor/plotly/plotly-basic.min.js", "tabulator": "vendor/tabulator/tabulator.min.js"}
"""Libraries in page/assets that a file holds compressed, and a server has at addresses."""

SCRIPTS = (
    *("base.js", "source.js", "strip.js", "curves.js", "causes.js", "responses.js"),
    *("moment.js", "lists.js", "map.js", "grid.js", "explorer.js"),
)
"""Scripts of the page's explorer, in page/assets, in the order in which they run."""

STYLES = ("vendor/tabulator/tabulator_simple.min.css", "explorer.css")
"""Style sheets of the page's explorer, in page/assets, after the page's own."""


@cache
def load_template() -> jinja2.Template:
    """Return the page's template, with what it calls for the libraries."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {
        "unpack_js": Markup(read_asset("unpack.js")),
        "pack_library": cache(lambda name: compress_text(read_library(name))),  # half of a small page's time
        "read_licence": lambda name: read_asset(f"vendor/{name}/LICENSE"),
    }
    return environment.from_string(read_asset("template.html"))


def read_library(name: str) -> str:
    """Return the script of a library, by its name in `LIBRARIES`."""
    return read_asset(LIBRARIES[name])


def read_asset(name: str) -> str:
    """Return the text of a file in page/assets."""
    return (files("whence.page") / "assets" / name).read_text(encoding="utf-8")
