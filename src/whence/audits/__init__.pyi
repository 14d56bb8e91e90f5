from .environment_checks import audit as audit
