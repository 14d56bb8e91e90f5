"""Whether advantages are wrong in the records that harm."""
