"""Pages to look at."""

from whence.report.markdown import write_tables as write_tables
from whence.report.page import write_report as write_report
from whence.report.page import write_run_report as write_run_report
