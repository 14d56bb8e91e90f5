"""Pages to look at."""

from whence.report.page import write_report as write_report
from whence.report.page import write_run_report as write_run_report
