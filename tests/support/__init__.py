"""Makers and fakes that tests share."""
