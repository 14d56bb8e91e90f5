"""Ways to train that studies compare with selections."""
