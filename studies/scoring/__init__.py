"""What scoring language models costs, and how well cheap scores rank."""
