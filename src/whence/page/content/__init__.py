"""What a page says of a run: its rounds, the moments of a round, their causes, the records as a grid."""
