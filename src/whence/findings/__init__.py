"""What is wrong with an agent's run, in one line each."""

from whence.findings.finding import Finding as Finding
from whence.findings.finding_search import find as find
