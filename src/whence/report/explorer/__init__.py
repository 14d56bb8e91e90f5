"""The page's data: runs, rounds, records and moments in JSON types."""

from whence.report.explorer.causes import build_causes as build_causes
from whence.report.explorer.detail import build_detail as build_detail
from whence.report.explorer.page import describe_runs as describe_runs
from whence.report.explorer.query import query_records as query_records
from whence.report.explorer.rounds import build_round as build_round
from whence.report.explorer.run import ExploredRun as ExploredRun
