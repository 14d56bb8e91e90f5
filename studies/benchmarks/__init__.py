"""What scoring costs: engines, training, other libraries, whole rounds and installing."""
