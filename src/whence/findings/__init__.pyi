from .environment_checks import audit as audit
from .finding import Check as Check
from .finding import Finding as Finding
from .inspection import find as find
from .inspection import inspect as inspect
