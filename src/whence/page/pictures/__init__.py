"""Pictures of a moment or a judgement, as PNG."""

from whence.page.pictures.canvas import check_picture_name as check_picture_name
from whence.page.pictures.judgement_picture import draw_judgements as draw_judgements
from whence.page.pictures.moment_picture import draw_moment as draw_moment
