"""The page's data: runs, rounds, records and moments in JSON types."""

from whence.page.explored_run import ExploredRun as ExploredRun
from whence.page.explorer.detail import build_causes as build_causes
from whence.page.explorer.detail import build_detail as build_detail
from whence.page.explorer.grid import query_records as query_records
from whence.page.explorer.rounds import build_round as build_round
from whence.page.explorer.rounds import describe_runs as describe_runs
