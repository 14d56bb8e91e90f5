"""How far scores of whole rounds agree with training the rounds again."""
