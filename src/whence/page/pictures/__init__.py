"""Pictures: what the terminal and the page show of a moment or a cause, as PNG."""

from whence.page.pictures.canvas import check_picture_name as check_picture_name
from whence.page.pictures.cause_picture import SHOWN as SHOWN
from whence.page.pictures.cause_picture import draw_causes as draw_causes
from whence.page.pictures.moment_picture import draw_moment as draw_moment
