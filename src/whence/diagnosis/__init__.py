"""Why records harm or help, and what taught the policy what it does (LDA §4.1, §4.2)."""
