"""How often a proof sees a cause, where there is one and where there is none."""
