from .finding import Check as Check
from .finding import Finding as Finding
from .inspection import choose_findings as choose_findings
from .inspection import count_outcomes as count_outcomes
from .inspection import find as find
from .inspection import inspect as inspect
from .inspection import open_run_or_logs as open_run_or_logs
from .inspection import say_nothing_stands_out as say_nothing_stands_out
