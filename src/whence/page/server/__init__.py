"""The page on loopback, live while training goes on."""

from whence.page.server.routes import make_app as make_app
from whence.page.server.serving import serve as serve
