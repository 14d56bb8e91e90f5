"""Pictures: what the terminal and the page show of a moment, a cause, a phase or a judgement, as PNG."""
