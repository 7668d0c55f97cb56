"""Which offline metric has policies in the order that the live model has them."""
