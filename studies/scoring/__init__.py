"""What choosing costs where models are large: in the step, before the steps, and not at all."""
