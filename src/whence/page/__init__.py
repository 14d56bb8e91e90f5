"""Pages to look at."""

from whence.page.html import write_report as write_report
from whence.page.sweep_tables import write_tables as write_tables
