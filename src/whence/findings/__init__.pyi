from .finding import Finding as Finding
from .finding_search import find as find
