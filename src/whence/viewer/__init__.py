"""The page on loopback, live while training goes on."""

from whence.viewer.app import make_app as make_app
from whence.viewer.server import serve as serve
