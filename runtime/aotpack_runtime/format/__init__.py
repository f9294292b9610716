"""The vocabulary both sides share: what is in a bundle, what a call is, which guards hold. Standard library only."""
