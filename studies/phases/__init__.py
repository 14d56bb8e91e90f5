"""When a behaviour arose, and whether similar records come to score alike (LDA §4.2)."""
