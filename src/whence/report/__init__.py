"""Pages to look at."""

from whence.report.page import write_report as write_report
