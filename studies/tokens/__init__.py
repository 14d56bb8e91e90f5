"""Whether tokens' parts of scores find wrong steps of right answers."""
