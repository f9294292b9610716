"""How long a server waits for its first right answer, by way of starting it; and what each later shape costs.

Every sample is a fresh process with caches of its own. Results are compared with eager's while they are measured: a way
that answers wrong, or a bundle that never hit, has no figure.
"""
